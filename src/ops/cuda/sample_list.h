// SPDX-License-Identifier: Apache-2.0
// What a CTA that reads a row without keeping it remembers of it: candidates, which may pass the
// filters of sample(), and the masses of blocks.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample_draw.h"

namespace flashplan::cuda {

constexpr int32_t kMostStreamedTopK = 128;  // for which there is a bound of the candidates

using Mass = unsigned long long;  // as atomicAdd() takes it

/// What a CTA keeps of a row.
struct StreamList {
  static constexpr int kMost = 512;  // of a warp
  static constexpr int kMostBlocks = 1024;
  static constexpr int kBins = 8192;
  union {
    struct {
      uint32_t keys[kRowWarps][kMost];  // of the candidates that a warp has found
      uint32_t ids[kRowWarps][kMost];
    };
    uint32_t counts[kBins];  // of elements, by ranges of their logarithmic weights
  };
  Mass masses[kMostBlocks];  // of what is kept of blocks
};

template <DType kDType>
class SampleList : protected SampleDraw<kDType, false, false> {
  using Base = SampleDraw<kDType, false, false>;

 public:
  /// `memory`: of the bins' groups, and of a StreamList behind them.
  __device__ SampleList(const RowParams<SampleParams>& params, int32_t row, SampleShared& shared,
                        float* memory)
      : Base(params, row, shared, memory),
        list_(*reinterpret_cast<StreamList*>(memory + kGroups * 2)) {}

 protected:
  using Base::least_;
  using Base::most_;
  using Base::p_;
  using Base::part_;
  using Base::scale_;
  using Base::shared_;
  static constexpr int kVec = kWordElements<kDType>;

  /// Those of the warp's elements, of which this thread has some from i on, that are at least `low`
  /// and below `high`.
  __device__ void list(const float (&x)[kVec], int i, float low, float high = INFINITY) {
    if (num_ > StreamList::kMost) return;
    const unsigned before = (1U << lane_of_thread()) - 1;
    const int warp = warp_of_thread();
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const bool is_in = x[e] >= low && !(x[e] >= high) && i + e < part_.count();
      const unsigned lanes = __ballot_sync(~0U, is_in);
      const int place = num_ + __popc(lanes & before);
      if (is_in && place < StreamList::kMost) {
        list_.keys[warp][place] = key_of(x[e]);
        list_.ids[warp][place] = static_cast<uint32_t>(i + e);
      }
      num_ += __popc(lanes);
    }
  }

  /// Whether the lists have had room; gives num_listed_. All threads.
  __device__ bool has_listed_all() {
    num_listed_ = static_cast<int>(sum_of_cta(lane_of_thread() == 0 ? num_ : 0));
    return __syncthreads_or(num_ > StreamList::kMost ? 1 : 0) == 0;
  }

  /// Calls body(key, id) for the candidates of this thread.
  template <class Body>
  __device__ void for_each(const Body& body) const {
    const int warp = warp_of_thread();
#pragma unroll 1
    for (int c = lane_of_thread(); c < num_; c += 32) {
      body(list_.keys[warp][c], list_.ids[warp][c]);
    }
  }

  /// The id of the last tie that is kept, of `num_ties` in the list.
  __device__ uint32_t find_last_tie(uint32_t tie, uint64_t num_ties) {
    if (tie == 0 || num_ties <= cut_.num_ties) return ~0U;
    return find_id(cut_.num_ties,
                   [&](uint32_t key, uint32_t /*id*/) { return key == cut_.key ? 1U : 0U; });
  }
  /// The weight, 0 for what is not kept.
  __device__ uint32_t weight_of_listed(uint32_t key, uint32_t id, uint32_t tie,
                                       uint32_t last_tie) const {
    if (key == cut_.key) return id <= last_tie ? tie : 0U;
    return this->template amount_of_key<true>(key, cut_);
  }

  /// The id at which the sum of amount_of(key, id), in the order of ids, reaches `wanted`.
  template <class AmountOf>
  __device__ uint32_t find_id(uint64_t wanted, const AmountOf& amount_of) {
    const auto last = static_cast<uint32_t>(p_.vocab - 1);
    least_ = 0;
    most_ = last;
    this->find_key(wanted, 0, [&](const auto& add) {
      this->for_each([&](uint32_t key, uint32_t id) { add(last - id, amount_of(key, id)); });
    });
    return last - least_;
  }

  struct Sums {
    uint64_t mass;  // above the cut
    uint64_t ties;
  };
  __device__ Sums sums() {
    Sums own{};
    this->for_each([&](uint32_t key, uint32_t /*id*/) {
      own.mass += this->template amount_of_key<true>(key, cut_);
      own.ties += key == cut_.key ? 1U : 0U;
    });
    return {sum_of_cta(own.mass), sum_of_cta(own.ties)};
  }

  /// After the row has been read: whether it has no error.
  __device__ bool has_largest() {
    scale_.largest = sampling::value_of(shared_.most);
    return fabsf(scale_.largest) < INFINITY;
  }

  /// Leaves in shared_.least and shared_.most those of the CTA. Barriers are before and after.
  __device__ void share_extremes(uint32_t least, uint32_t most) {
    least = ~__reduce_max_sync(~0U, ~least);
    most = __reduce_max_sync(~0U, most);
    if (lane_of_thread() == 0) {
      atomicMin(&shared_.least, least);
      atomicMax(&shared_.most, most);
    }
    __syncthreads();
  }

  /// Its barriers are before and after.
  __device__ uint64_t sum_of_cta(uint64_t value) {
    value = sum_of_warp(value);
    __syncthreads();
    const int lane = lane_of_thread();
    if (lane == 0) shared_.warp_values[warp_of_thread()][0] = value;
    __syncthreads();
    return sum_of_warp(lane < kRowWarps ? shared_.warp_values[lane][0] : 0);
  }

  __device__ void write_token(uint32_t id, uint32_t weight, uint64_t total) const {
    float logprob = 0.0F;
    if (p_.logprobs != nullptr) {
      logprob = static_cast<float>(log(static_cast<double>(weight) / static_cast<double>(total)));
    }
    this->write(static_cast<int32_t>(id), logprob, SampleError::kNone);
  }

  StreamList& list_;
  Cut cut_{};
  int32_t top_k_ = 0;
  float bound_ = -INFINITY;  // a value that all listed elements reach
  int num_ = 0;              // of candidates of the warp
  int num_listed_ = 0;       // of candidates
};

}  // namespace flashplan::cuda
