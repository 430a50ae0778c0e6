// SPDX-License-Identifier: Apache-2.0
// The rotation of heads on CUDA, for all operators that rotate. Intrinsics fix every rounding: the
// compiler cannot fuse operations of one operator only, so all operators give the same bits.
#pragma once

#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/params.h"

namespace flashplan::cuda {

/// Computes the rotation of each pair at a position. All threads of a CTA call it, and need a
/// barrier before they use the rotations.
__device__ inline void fill_rotations(const RopeParams& p, double position, float2* rotations) {
  const auto num_threads = static_cast<int>(blockDim.x);
  for (int i = static_cast<int>(threadIdx.x); i < p.rotary_dim / 2; i += num_threads) {
    const double turns = __dmul_rn(position, p.turns[i]);
    float sine = 0.0F;
    float cosine = 0.0F;
    // Whole turns are dropped in double, because positions may be large.
    sincospif(2.0F * static_cast<float>(turns - rint(turns)), &sine, &cosine);
    rotations[i] = make_float2(p.gain * cosine, p.gain * sine);
  }
}

__device__ inline void rotate(float& a, float& b, float2 cos_sin) {
  const float first = __fmaf_rn(a, cos_sin.x, -__fmul_rn(b, cos_sin.y));
  b = __fmaf_rn(b, cos_sin.x, __fmul_rn(a, cos_sin.y));
  a = first;
}

/// How a head is divided into items, of which a thread takes one at a time. The first num_rotated
/// items are rotated: each is one word if within_words, else two words. Each of the other items is
/// one word that is copied. A word has kVec elements.
template <int kVec>
struct HeadItems {
  bool within_words;  // both dims of a pair lie in one word
  int num_rotated;
  int count;

  FLASHPLAN_HOST_DEVICE explicit HeadItems(const RopeParams& p)
      : within_words(p.interleaved && kVec > 1),
        num_rotated(within_words ? p.rotary_dim / kVec : p.rotary_dim / 2 / kVec),
        count(num_rotated + (p.head_dim - p.rotary_dim) / kVec) {}
};

/// Rotates item i of the head at `from`, and calls store(index, word) for each word of the item.
template <DType kDType, int kVec, class Store>
__device__ void rotate_item(const RopeParams& p, const HeadItems<kVec>& items,
                            const float2* rotations, const Word<kDType, kVec>* from, int i,
                            const Store& store) {
  if (i >= items.num_rotated) {
    const int word = p.rotary_dim / kVec + i - items.num_rotated;
    store(word, from[word]);
  } else if (items.within_words) {
    float values[kVec];
    unpack<kDType, kVec>(from[i], values);
#pragma unroll
    for (int j = 0; j + 1 < kVec; j += 2) {
      rotate(values[j], values[j + 1], rotations[(i * kVec + j) / 2]);
    }
    store(i, pack<kDType, kVec>(values));
  } else {
    const int first = p.interleaved ? 2 * i : i;
    const int second = p.interleaved ? 2 * i + 1 : i + items.num_rotated;
    float a[kVec];
    float b[kVec];
    unpack<kDType, kVec>(from[first], a);
    unpack<kDType, kVec>(from[second], b);
#pragma unroll
    for (int j = 0; j < kVec; ++j) rotate(a[j], b[j], rotations[i * kVec + j]);
    store(first, pack<kDType, kVec>(a));
    store(second, pack<kDType, kVec>(b));
  }
}

/// Whether heads can be rotated by words of `elements` dims.
inline bool divides_into_words(const RopeParams& p, int elements) {
  const int rotated = p.interleaved ? p.rotary_dim : p.rotary_dim / 2;
  return rotated % elements == 0 && p.head_dim % elements == 0 && p.rotary_dim % elements == 0;
}

/// Whether every head can be read in aligned words of 16 bytes, and written in aligned words of
/// `bytes_out` bytes.
inline bool allows_words(const RopeSide& side, int bytes_out = 16) {
  return is_aligned(side.from, 16, side.from_token_stride, side.from_head_stride) &&
         is_aligned(side.to, bytes_out, side.to_token_stride, side.to_head_stride);
}

}  // namespace flashplan::cuda
