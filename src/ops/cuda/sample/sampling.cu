// SPDX-License-Identifier: Apache-2.0
// sample() on CUDA. Without filters, a cluster of CTAs reads a row and keeps nothing of it. With
// filters, a cluster has the row in its shared memory, or, of many rows, a CTA reads one without
// keeping it.
#include <cmath>
#include <cstdint>

#include "flashplan/sampling.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/sample/filters.h"
#include "ops/cuda/sample/plain.h"
#include "ops/cuda/sample/stream.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

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

/// For rows that stream_kernel() cannot draw from: a function of its own, so that the registers it
/// needs do not make the loops over rows spill others.
template <DType kDType, bool kFromProbs>
__device__ __noinline__ void draw_from_cluster(const RowParams<SampleParams>& params,
                                               SampleShared& shared, float* memory) {
  Sampler<kDType, kFromProbs, false>(params.p, params.split, shared, memory).run();
}

constexpr int kStreamCtasOfSm = 2;  // with a third, registers would be spilled

template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, kStreamCtasOfSm)
    stream_kernel(const __grid_constant__ RowParams<SampleParams> params) {
  __shared__ SampleShared shared;
  extern __shared__ float4 memory[];
  auto* floats = reinterpret_cast<float*>(memory);
  if (is_without_row(params.p, row_of_cluster())) return;
  if (SampleStream<kDType>(params.p, params.split, shared, floats).run()) return;
  __syncthreads();
  draw_from_cluster<kDType, false>(params, shared, floats);
}

/// The dynamic shared memory begins with a CountedShared. Sampler's follows, after so many floats.
constexpr int kCounted = static_cast<int>(sizeof(CountedShared)) / 4;

/// With top-p or a large top-k alone. Rows from which draw_counted() does not draw, which are very
/// few, are drawn as with other filters.
template <DType kDType, bool kFromProbs>
__global__ void __launch_bounds__(kRowThreads, kStreamCtasOfSm)
    counted_kernel(const __grid_constant__ RowParams<SampleParams> params) {
  __shared__ SampleShared shared;
  extern __shared__ float4 memory[];
  auto* floats = reinterpret_cast<float*>(memory);
  const int32_t row = row_of_cluster();
  if (is_without_row(params.p, row)) return;
  auto& counted = *reinterpret_cast<CountedShared*>(floats);
  if (draw_counted<kDType, kFromProbs>(params.p, row, counted, shared)) return;
  __syncthreads();
  draw_from_cluster<kDType, kFromProbs>(params, shared, floats + kCounted);
}

constexpr int kPlainCtasOfSm = 2;  // so that a block and its weights fit the registers

template <DType kDType, bool kFromProbs>
__global__ void __launch_bounds__(kRowThreads, kPlainCtasOfSm)
    plain_kernel(const __grid_constant__ SampleParams p) {
  __shared__ PlainShared shared;
  const int32_t row = row_of_cluster();
  if (is_without_row(p, row)) return;
  SamplePlain<kDType, kFromProbs>(p, row, shared).run();
}

/// Whether the temperature of all rows is 0.
bool is_greedy(const SampleParams& p) {
  return p.temperature.each == nullptr && p.temperature.all == 0.0F;
}
/// Whether each row may have filters of its own.
bool has_filters_of_rows(const SampleParams& p) {
  return p.top_k.each != nullptr || p.top_p.each != nullptr || p.min_p.each != nullptr;
}

/// Whether plain_kernel() is to draw from all rows: the options say that none has a filter, or that
/// each takes its largest logit. For the largest logits of few rows, sample_kernel() is faster.
bool is_plain(const SampleParams& p, bool has_clusters, int num_sms) {
  if (p.vocab > kMostEntries * sampling::kBlock) return false;
  if (is_greedy(p)) return !p.from_probs && (!has_clusters || p.num_rows >= num_sms / 3);
  return !has_filters_of_rows(p) &&
         !sampling::has_filters(p.top_k.all, p.top_p.all, p.min_p.all, p.vocab);
}

/// How many CTAs share a row that is read once. A row gets several only if the launch then has at
/// most one CTA for each SM, and if there are blocks for the warps of all of them.
int ctas_of_row(const SampleParams& p, bool has_clusters, int num_sms) {
  constexpr int32_t kElementsOfCta = kRowWarps * sampling::kBlock;
  int ctas = 1;
  while (has_clusters && ctas < kMaxCluster && p.vocab > ctas * kElementsOfCta &&
         int64_t{p.num_rows} * ctas * 2 <= num_sms) {
    ctas *= 2;
  }
  return ctas;
}
Grid grid_of_rows(const SampleParams& p, int cluster, bool has_clusters, int smem_bytes = 0) {
  return {.ctas = dim3(static_cast<unsigned>(p.num_rows) * static_cast<unsigned>(cluster)),
          .threads = dim3(kRowThreads),
          .cluster = has_clusters ? cluster : 0,
          .smem_bytes = smem_bytes};
}

Status sample_plain(const SampleParams& p, Device device, Stream stream, bool has_clusters,
                    int num_sms) noexcept {
  const Grid grid = grid_of_rows(p, ctas_of_row(p, has_clusters, num_sms), has_clusters);
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    const auto kernel = p.from_probs ? plain_kernel<kDType, true> : plain_kernel<kDType, false>;
    return launch(kernel, grid, device, stream, p);
  });
}

/// Whether counted_kernel() is to draw from all rows. If a threshold has to be found, one CTA must
/// read a row; for fewer rows, clusters that keep a row are faster.
bool is_counted(const SampleParams& p, bool has_clusters, int num_sms) {
  if (is_greedy(p) || !is_countable(p) || p.joint) return false;
  if (p.from_probs && (p.temperature.each != nullptr || p.temperature.all == 0.0F)) return false;
  if (p.top_k.each != nullptr || p.min_p.each != nullptr || p.min_p.all > 0.0F) return false;
  const bool is_tried =
      p.top_p.each == nullptr && sampling::is_tried(p.top_k.all, p.top_p.all, p.min_p.all, p.vocab);
  if (is_tried && p.logprobs == nullptr) return true;
  const bool has_top_p = p.top_p.each != nullptr || p.top_p.all < 1.0F;
  const bool has_top_k = p.top_k.all < p.vocab;
  if (has_top_k && (has_top_p || p.top_k.all <= kMostStreamedTopK)) return false;
  return p.vocab > kMaxHeld && (!has_clusters || p.num_rows > num_sms / 2);
}

Status sample_counted(const SampleParams& p, Device device, Stream stream, bool has_clusters,
                      int num_sms) noexcept {
  const int cluster = ctas_of_row(p, has_clusters, num_sms);
  const int32_t blocks = (p.vocab - 1) / sampling::kBlock + 1;
  const int32_t part = ((blocks - 1) / cluster + 1) * sampling::kBlock;
  const RowParams<SampleParams> params{p, {.part = part, .held = false}};
  const Grid grid =
      grid_of_rows(p, cluster, has_clusters, kCounted * 4 + cluster * bytes_of_rank(cluster));
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    const auto kernel = p.from_probs ? counted_kernel<kDType, true> : counted_kernel<kDType, false>;
    return launch(kernel, grid, device, stream, params);
  });
}

/// Whether stream_kernel() is faster than a cluster for each row. It needs about one row per SM.
/// Filters that may keep more than its lists hold are left to clusters.
bool is_streamed(const SampleParams& p, bool has_clusters, int num_sms) {
  if (p.from_probs || p.joint || p.vocab <= kMaxHeld) return false;
  constexpr float kLargeMinP = 0.02F;  // keeps few
  const bool has_few = p.top_k.each != nullptr || p.top_k.all <= kMostStreamedTopK ||
                       p.min_p.each != nullptr || p.min_p.all >= kLargeMinP;
  return has_few && (!has_clusters || p.num_rows >= num_sms);
}

}  // namespace

Status sample(const SampleParams& p, Device device, Stream stream) noexcept {
  const bool has_clusters = device_facts(device.index).major >= 9;
  const int num_sms = device_facts(device.index).num_sms;
  if (is_plain(p, has_clusters, num_sms)) {
    return sample_plain(p, device, stream, has_clusters, num_sms);
  }
  if (is_counted(p, has_clusters, num_sms)) {
    return sample_counted(p, device, stream, has_clusters, num_sms);
  }
  if (is_streamed(p, has_clusters, num_sms)) {
    return with_float(p.dtype, [&](auto dtype) {
      constexpr DType kDType = decltype(dtype)::value;
      const RowParams<SampleParams> params{p, {.part = p.vocab, .held = false}};
      const int bytes = SampleList<kDType>::kListed * 4 + static_cast<int>(sizeof(StreamList));
      const Grid grid = grid_of_rows(p, 1, has_clusters, bytes);
      return launch(stream_kernel<kDType>, grid, device, stream, params);
    });
  }
  const RowDivision division = division_of_rows(p.num_rows, device);
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    constexpr RowKernels<SampleParams> kFromProbs{sample_kernel<kDType, true, true>,
                                                  sample_kernel<kDType, true, false>};
    constexpr RowKernels<SampleParams> kFromLogits{sample_kernel<kDType, false, true>,
                                                   sample_kernel<kDType, false, false>};
    return launch_rows(p.from_probs ? kFromProbs : kFromLogits, p, device, stream, division);
  });
}

}  // namespace flashplan::cuda
