// SPDX-License-Identifier: Apache-2.0
// apply_rope() on CUDA: a CTA has a token. Its threads make the rotation of each pair once, for all
// heads, and then rotate words of the heads.
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 256;

__device__ void rotate(float& a, float& b, float2 cos_sin) {
  const float first = a * cos_sin.x - b * cos_sin.y;
  b = b * cos_sin.x + a * cos_sin.y;
  a = first;
}

/// Items of a head: words (or elements, where kVec is 1) that are rotated, then those that are
/// kept.
template <DType kDType, int kVec>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ RopeParams p) {
  using WordType = Word<kDType, kVec>;
  __shared__ float2 rotations[kMaxRotaryDim / 2];
  const auto token = static_cast<int32_t>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int num_pairs = p.rotary_dim / 2;
  const double position = p.position(token);
  for (int i = thread; i < num_pairs; i += kThreads) {
    const double turns = position * p.turns[i];
    float sine = 0.0F;
    float cosine = 0.0F;
    // Whole turns are dropped in double: positions may be large.
    sincospif(2.0F * static_cast<float>(turns - rint(turns)), &sine, &cosine);
    rotations[i] = make_float2(p.gain * cosine, p.gain * sine);
  }
  __syncthreads();

  const bool within_words = p.interleaved && kVec > 1;  // both dims of a pair lie in one word
  const int num_rotated = within_words ? p.rotary_dim / kVec : num_pairs / kVec;
  const int per_head = num_rotated + (p.head_dim - p.rotary_dim) / kVec;
  const int num_q = p.sides[0].num_heads * per_head;
  const int num_items = num_q + p.sides[1].num_heads * per_head;
  for (int item = thread; item < num_items; item += kThreads) {
    const bool is_k = item >= num_q;
    const RopeSide& side = p.sides[is_k];
    const int item_of_side = is_k ? item - num_q : item;
    const int head = item_of_side / per_head;
    const int i = item_of_side - head * per_head;
    const auto* from = reinterpret_cast<const WordType*>(
        side.from + token * side.from_token_stride + head * side.from_head_stride);
    auto* to = reinterpret_cast<WordType*>(side.to + token * side.to_token_stride +
                                           head * side.to_head_stride);
    if (i >= num_rotated) {
      const int word = p.rotary_dim / kVec + i - num_rotated;
      to[word] = from[word];
    } else if (within_words) {
      float values[kVec];
      unpack<kDType, kVec>(from[i], values);
#pragma unroll
      for (int j = 0; j + 1 < kVec; j += 2) {
        rotate(values[j], values[j + 1], rotations[(i * kVec + j) / 2]);
      }
      to[i] = pack<kDType, kVec>(values);
    } else {
      const int first = p.interleaved ? 2 * i : i;
      const int second = p.interleaved ? 2 * i + 1 : i + num_rotated;
      float a[kVec];
      float b[kVec];
      unpack<kDType, kVec>(from[first], a);
      unpack<kDType, kVec>(from[second], b);
#pragma unroll
      for (int j = 0; j < kVec; ++j) rotate(a[j], b[j], rotations[i * kVec + j]);
      to[first] = pack<kDType, kVec>(a);
      to[second] = pack<kDType, kVec>(b);
    }
  }
}

bool allows_words(const RopeSide& side) {
  return is_aligned(side.from, 16, side.from_token_stride, side.from_head_stride,
                    reinterpret_cast<int64_t>(side.to), side.to_token_stride, side.to_head_stride);
}

}  // namespace

Status apply_rope(const RopeParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    constexpr int kVec = kWordElements<kDType>;
    const int rotated = p.interleaved ? p.rotary_dim : p.rotary_dim / 2;
    const bool by_word = rotated % kVec == 0 && p.head_dim % kVec == 0 &&
                         p.rotary_dim % kVec == 0 && allows_words(p.sides[0]) &&
                         allows_words(p.sides[1]);
    return launch(by_word ? rope_kernel<kDType, kVec> : rope_kernel<kDType, 1>,
                  {.ctas = dim3(static_cast<unsigned>(p.num_rows)), .threads = dim3(kThreads)},
                  device, stream, p);
  });
}

}  // namespace flashplan::cuda
