// SPDX-License-Identifier: Apache-2.0
// apply_rope() on CUDA: a CTA rotates one token. Its threads compute the rotation of each pair once
// for all heads, or read it from a table, and then rotate words of the heads.
#include <algorithm>
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/rotation.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kMaxThreads = 256;

/// Reads the rotation of each pair from the caller's table. At a position outside of it nothing is
/// rotated. The CTA needs a barrier before it uses the rotations.
__device__ void read_rotations(const RopeParams& p, int32_t token, float2* rotations) {
  const float* row = p.table_row(token);
  const int32_t num_pairs = p.rotary_dim / 2;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_pairs;
       i += static_cast<int32_t>(blockDim.x)) {
    rotations[i] = row == nullptr ? make_float2(1.0F, 0.0F)
                                  : make_float2(__ldg(row + i), __ldg(row + num_pairs + i));
  }
}

/// 8-bit results are rounded to kDType first, as if apply_rope() and then quantize_fp8() were
/// called.
template <DType kDType, DType kTo, int kVec>
__global__ void __launch_bounds__(kMaxThreads) rope_kernel(const __grid_constant__ RopeParams p) {
  using WordType = Word<kDType, kVec>;
  __shared__ float2 rotations[kMaxRotaryDim / 2];
  const auto token = static_cast<int32_t>(blockIdx.x);
  if (p.table != nullptr) {
    read_rotations(p, token, rotations);
  } else {
    fill_rotations(p, p.position(token), rotations);
  }
  __syncthreads();

  const HeadItems<kVec> items(p);
  const int num_q = p.sides[0].num_heads * items.count;
  const int num_items = num_q + p.sides[1].num_heads * items.count;
  const auto num_threads = static_cast<int>(blockDim.x);
  for (int item = static_cast<int>(threadIdx.x); item < num_items; item += num_threads) {
    const bool is_k = item >= num_q;
    const RopeSide& side = p.sides[is_k];
    const int item_of_side = is_k ? item - num_q : item;
    const int head = item_of_side / items.count;
    const auto* from = reinterpret_cast<const WordType*>(
        side.from + token * side.from_token_stride + head * side.from_head_stride);
    auto* to = reinterpret_cast<Word<kTo, kVec>*>(side.to + token * side.to_token_stride +
                                                  head * side.to_head_stride);
    rotate_item<kDType, kVec>(p, items, rotations, from, item_of_side - head * items.count,
                              [&](int i, WordType word) {
                                if constexpr (kTo == kDType) {
                                  to[i] = word;
                                } else {
                                  to[i] = narrowed<kDType, kTo, kVec>(word, side.scale_of(head));
                                }
                              });
  }
}

/// The number of threads of a CTA: the fewest whole warps that take a token's items (see HeadItems)
/// in the fewest rounds.
template <int kVec>
int num_threads_for(const RopeParams& p) {
  const int num_items = (p.sides[0].num_heads + p.sides[1].num_heads) * HeadItems<kVec>(p).count;
  const int rounds = std::max((num_items + kMaxThreads - 1) / kMaxThreads, 1);
  return std::max((num_items + rounds * 32 - 1) / (rounds * 32), 1) * 32;
}

}  // namespace

Status apply_rope(const RopeParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    constexpr int kVec = kWordElements<kDType>;
    return with_stored<kDType>(p.out_dtype, [&](auto out_dtype) {
      constexpr DType kTo = decltype(out_dtype)::value;
      constexpr int kBytesOut = kVec * static_cast<int>(item_size(kTo));
      const bool by_word = divides_into_words(p, kVec) && allows_words(p.sides[0], kBytesOut) &&
                           allows_words(p.sides[1], kBytesOut);
      const int num_threads = by_word ? num_threads_for<kVec>(p) : num_threads_for<1>(p);
      return launch(by_word ? rope_kernel<kDType, kTo, kVec> : rope_kernel<kDType, kTo, 1>,
                    {.ctas = dim3(static_cast<unsigned>(p.num_rows)),
                     .threads = dim3(static_cast<unsigned>(num_threads))},
                    device, stream, p);
    });
  });
}

}  // namespace flashplan::cuda
