// SPDX-License-Identifier: Apache-2.0
// rope_append_paged_kv() on CUDA: a CTA has one token. Its threads find the token's place, compute
// the rotation of each pair once for all heads, and then take words of q, k and v.
#include <cstdint>
#include <type_traits>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/paged_cache.h"
#include "ops/cuda/pdl.h"
#include "ops/cuda/rotation.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 256;

template <DType kFrom, DType kTo, int kVec>
__global__ void __launch_bounds__(kThreads)
    rope_append_kernel(const __grid_constant__ RopeAppendParams p) {
  using FromWord = Word<kFrom, kVec>;
  using ToWord = Word<kTo, kVec>;
  __shared__ float2 rotations[kMaxRotaryDim / 2];
  __shared__ PlaceOfKey place_of_token;
  const auto token = static_cast<int32_t>(blockIdx.x);
  wait_for_kernels_before();
  find_places<kThreads>(p.append.places, token, p.num_rows, 1, &place_of_token);
  __syncthreads();
  const PlaceOfKey place = place_of_token;
  if (place.key < 0) return;
  fill_rotations(p.rope, place.key, rotations);
  __syncthreads();

  const RopeSide& q = p.rope.sides[0];
  const AppendSide& k = p.append.sides[0];
  const AppendSide& v = p.append.sides[1];
  const HeadItems<kVec> items(p.rope);
  const int words_of_v = v.head_dim / kVec;
  const int num_q = q.num_heads * items.count;
  const int num_qk = num_q + k.num_heads * items.count;
  // Where the page id is outside of the cache, only q is written.
  const int num_items = place.page < 0 ? num_q : num_qk + v.num_heads * words_of_v;
  const auto row_of = [&](const AppendSide& side, int head) {
    return reinterpret_cast<const FromWord*>(side.rows + token * side.token_stride +
                                             head * side.row_head_stride);
  };
  const auto stored_row_of = [&](const AppendSide& side, int head) {
    return reinterpret_cast<ToWord*>(side.cache + place.page * side.page_stride +
                                     place.row_in_page * side.row_stride + head * side.head_stride);
  };
  for (int item = static_cast<int>(threadIdx.x); item < num_items; item += kThreads) {
    if (item < num_q) {
      const int head = item / items.count;
      const auto* from = reinterpret_cast<const FromWord*>(q.from + token * q.from_token_stride +
                                                           head * q.from_head_stride);
      auto* to =
          reinterpret_cast<FromWord*>(q.to + token * q.to_token_stride + head * q.to_head_stride);
      rotate_item<kFrom, kVec>(p.rope, items, rotations, from, item - head * items.count,
                               [&](int i, FromWord word) { to[i] = word; });
    } else if (item < num_qk) {
      const int head = (item - num_q) / items.count;
      ToWord* to = stored_row_of(k, head);
      const float scale = k.scale_of(head);
      rotate_item<kFrom, kVec>(
          p.rope, items, rotations, row_of(k, head), item - num_q - head * items.count,
          [&](int i, FromWord word) { to[i] = stored<kFrom, kTo, kVec>(k, scale, word); });
    } else {
      const int head = (item - num_qk) / words_of_v;
      const int i = item - num_qk - head * words_of_v;
      stored_row_of(v, head)[i] = stored<kFrom, kTo, kVec>(v, v.scale_of(head), row_of(v, head)[i]);
    }
  }
}

template <DType kFrom, DType kTo>
Status run(const RopeAppendParams& p, Device device, Stream stream) {
  constexpr int kVec = kWordElements<kFrom>;
  const bool by_word = divides_into_words(p.rope, kVec) && allows_words(p.rope.sides[0]) &&
                       allows_words(p.append.sides[0], kVec) &&
                       allows_words(p.append.sides[1], kVec);
  return launch(by_word ? rope_append_kernel<kFrom, kTo, kVec> : rope_append_kernel<kFrom, kTo, 1>,
                {.ctas = dim3(static_cast<unsigned>(p.num_rows)),
                 .threads = dim3(kThreads),
                 .pdl = p.pdl && can_wait(device)},
                device, stream, p);
}

}  // namespace

Status rope_append_paged_kv(const RopeAppendParams& p, Device device, Stream stream) noexcept {
  static_assert(sizeof(RopeAppendParams) <= 4096);  // the most that a kernel's argument may take
  return with_float(p.rope.dtype, [&](auto dtype) {
    constexpr DType kFrom = decltype(dtype)::value;
    return with_stored<kFrom>(p.append.sides[0].cache_dtype, [&](auto to) {
      return run<kFrom, decltype(to)::value>(p, device, stream);
    });
  });
}

}  // namespace flashplan::cuda
