// SPDX-License-Identifier: Apache-2.0
// The probabilities from which speculative_verify() draws on CUDA once drafts are rejected: a CTA's
// part of a row.
#pragma once

#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/sample/row_part.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {

/// A draft that was rejected, and what the target's probabilities summed to at that time, after
/// those of the drafts rejected before it had been subtracted.
struct Rejected {
  int32_t draft;
  float sum;
};

template <DType kDType>
__device__ float probability(const char* row, int64_t i) {
  using Storage = typename Format<kDType>::Storage;
  return __fadd_rn(Format<kDType>::load(reinterpret_cast<const Storage*>(row)[i]), 0.0F);
}

/// The probability of a token in the distribution of a draft.
template <DType kDType>
__device__ float probability_of_draft(const VerifyParams& p, int32_t request, int32_t draft,
                                      int32_t id) {
  const char* row = p.draft_row(request, draft);
  if (row != nullptr) return probability<kDType>(row, id);
  return id == p.token(request, draft) ? 1.0F : 0.0F;
}

/// The target's probabilities, from which those of rejected drafts are subtracted.
template <DType kDType, bool kHeld>
class Residual {
 public:
  __device__ Residual(const RowParams<VerifyParams>& params, int32_t request,
                      const Rejected* rejected, float* memory)
      : params_(params),
        request_(request),
        rejected_(rejected),
        memory_(memory),
        row_(params.p.target_row(request, -1)),
        part_(part_of<kHeld>(row_)) {}

  /// Takes the target's row after draft `node` (-1: before all drafts). Does not load it yet.
  __device__ void begin_row(int32_t node) {
    row_ = params_.p.target_row(request_, node);
    num_rejected = 0;
    part_ = part_of<kHeld>(row_);
  }

  /// Loads this CTA's part of the target's row, from which nothing is subtracted yet, and calls
  /// body(value) for each value.
  template <class Body>
  __device__ void load(const Body& body) {
    num_rejected = 0;
    part_.load(body);
  }

  __device__ int32_t begin() const { return part_.begin(); }
  __device__ int32_t count() const { return part_.count(); }

  __device__ float at(int32_t i) const {
    return kHeld ? part_.at(i) : reduced(part_.at(i), part_.begin() + i);
  }

  /// Starts to fetch this CTA's part of a draft's distribution into L2. One thread calls it.
  __device__ void prefetch_draft(int32_t draft) const {
    const char* row = params_.p.draft_row(request_, draft);
    if (row != nullptr) part_of<false>(row).prefetch(count());
  }

  /// Subtracts a draft's distribution from this CTA's part of the target's row. The whole row sums
  /// to `sum`. Calls body(rest, q) for each element: with what is left of it, and the draft's
  /// probability. The row's last word may reach behind its end; there both are 0.
  template <class Body>
  __device__ void subtract(int32_t draft, float sum, const Body& body) {
    const char* row = params_.p.draft_row(request_, draft);
    const RowPart<kDType, false> of_draft = part_of<false>(row);
    const auto drafted = static_cast<int32_t>(params_.p.token(request_, draft)) - begin();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < count(); i += kRowThreads * 4) {
      const auto one_hot = [&](int e) { return i + e == drafted ? 1.0F : 0.0F; };
      const float4 q = row != nullptr ? of_draft.word(i)
                                      : make_float4(one_hot(0), one_hot(1), one_hot(2), one_hot(3));
      const auto rest_of = [&](int e, float target, float q_of_e) {
        if (!kHeld && i + e < count()) target = reduced(target, begin() + i + e);
        const float rest = sampling::residual(target, sum, q_of_e);
        body(rest, q_of_e);
        return rest;
      };
      const float4 word = part_.word(i);
      const float4 rest = make_float4(rest_of(0, word.x, q.x), rest_of(1, word.y, q.y),
                                      rest_of(2, word.z, q.z), rest_of(3, word.w, q.w));
      if (kHeld) part_.replace(i, rest);
    }
  }

  /// The value of any id, also outside of this CTA's part: computed from the row in global memory.
  __device__ float of_id(int32_t id) const { return reduced(probability<kDType>(row_, id), id); }

  int32_t num_rejected = 0;

 private:
  template <bool kIsHeld>
  __device__ RowPart<kDType, kIsHeld> part_of(const char* row) const {
    return {{row, 0, nullptr, 0}, 0, params_.p.vocab, params_.split, memory_, 0.0F};
  }

  __device__ float reduced(float value, int32_t id) const {
    for (int32_t r = 0; r < num_rejected; ++r) {
      const float q = probability_of_draft<kDType>(params_.p, request_, rejected_[r].draft, id);
      value = sampling::residual(value, rejected_[r].sum, q);
    }
    return value;
  }

  const RowParams<VerifyParams>& params_;
  int32_t request_;
  const Rejected* rejected_;
  float* memory_;
  const char* row_;
  RowPart<kDType, kHeld> part_;
};

}  // namespace flashplan::cuda
