// SPDX-License-Identifier: Apache-2.0
// sample() with any filters: a cluster of CTAs keeps a row in its shared memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/filters.h"
#include "ops/cuda/sample/ways.h"

namespace flashplan::cuda {

/// One row of logits or of probabilities. All threads of the cluster go through all calls together.
template <DType kDType, bool kFromProbs, bool kHeld>
class Sampler : SampleFilters<kDType, kFromProbs, kHeld> {
  using Base = SampleFilters<kDType, kFromProbs, kHeld>;

 public:
  using Base::Base;

  __device__ void run() {
    this->start();
    const SampleError error = choose();
    if (error != SampleError::kNone && is_first_thread_of_cluster()) {
      write(-1, NAN, error);
    }
  }

 private:
  using Base::largest_;
  using Base::p_;
  using Base::part_;
  using Base::read;
  using Base::scale_;
  using Base::shared_;
  using Base::write;

  /// Draws and writes the token, or returns why there is none. After the last barrier of the
  /// cluster no CTA touches the memory of another one, so each may end when it likes.
  __device__ SampleError choose() {
    const SampleError of_row = this->load();
    const SampleError error = this->error_of_parameters();
    if (error != SampleError::kNone) return error;
    if (of_row != SampleError::kNone) return of_row;
    if (shared_.temperature == 0.0F) return take_largest();
    scale_ = sampling::make_scale(largest_, shared_.temperature, kFromProbs);
    if (!this->has_filters()) return this->draw_from_all();
    Cut cut = sampling::keep_all(sampling::least_weight(shared_.min_p));
    uint64_t token = 0;
    if (sampling::is_tried(shared_.top_k, shared_.top_p, shared_.min_p, p_.vocab)) {
      const auto tried = this->draw_by_tries();
      if (tried.error != SampleError::kNone) return tried.error;
      token = tried.token;
      if (token != 0 && p_.logprobs == nullptr) {
        write_tried(token, 1);
        return SampleError::kNone;
      }
    } else if (kFromProbs || p_.joint) {
      const uint64_t all = this->count_row();
      if (kFromProbs && !sampling::sums_to_one(all, largest_)) return SampleError::kProbabilities;
    }
    if (!p_.joint && this->draw_from_gathered(cut)) return SampleError::kNone;
    const uint64_t total = this->apply_filters(&cut);
    if (token != 0) {
      write_tried(token, total);
    } else {
      this->draw(cut);
    }
    return SampleError::kNone;
  }

  /// Writes a token that top-p keeps. `total`: the mass of all that it keeps.
  __device__ void write_tried(uint64_t token, uint64_t total) const {
    if (!is_first_thread_of_cluster()) return;
    const uint32_t weight = this->weight_of(sampling::value_of(static_cast<uint32_t>(token >> 32)));
    this->write_token(static_cast<uint32_t>(token), weight, total);
  }

  /// The first id of the largest value.
  __device__ SampleError take_largest() {
    uint32_t first = ~0U;
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      read(i, x);
#pragma unroll
      for (int e = 3; e >= 0; --e) {
        if (x[e] == largest_) first = min(first, static_cast<uint32_t>(part_.begin() + i + e));
      }
    }
    first = ~this->largest_of_cluster(~first);
    if (is_first_thread_of_cluster()) {
      write(static_cast<int32_t>(first), 0.0F, SampleError::kNone);
    }
    return SampleError::kNone;
  }
};

/// For rows that a kernel cannot draw from in its own way: a function of its own, so that the
/// registers it needs do not make the loops over rows spill others.
template <DType kDType, bool kFromProbs>
__device__ __noinline__ void draw_from_cluster(const RowParams<SampleParams>& params,
                                               SampleShared& shared, float* memory) {
  Sampler<kDType, kFromProbs, false>(params.p, params.split, shared, memory).run();
}

namespace {

template <DType kDType, bool kFromProbs, bool kHeld>
__global__ void __launch_bounds__(kRowThreads, kRowCtasOfSm)
    sample_kernel(const __grid_constant__ RowParams<SampleParams> params) {
  __shared__ SampleShared shared;
  extern __shared__ float4 memory[];
  if (is_without_row(params.p, row_of_cluster())) return;
  Sampler<kDType, kFromProbs, kHeld>(params.p, params.split, shared,
                                     reinterpret_cast<float*>(memory))
      .run();
}

}  // namespace

template <DType kDType>
Status sample_cluster(const SampleParams& p, Device device, Stream stream) noexcept {
  const RowDivision division = division_of_rows(p.num_rows, device);
  constexpr RowKernels<SampleParams> kFromProbs{sample_kernel<kDType, true, true>,
                                                sample_kernel<kDType, true, false>};
  constexpr RowKernels<SampleParams> kFromLogits{sample_kernel<kDType, false, true>,
                                                 sample_kernel<kDType, false, false>};
  return launch_rows(p.from_probs ? kFromProbs : kFromLogits, p, device, stream, division);
}

}  // namespace flashplan::cuda
