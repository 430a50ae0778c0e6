// SPDX-License-Identifier: Apache-2.0
// append_mla() and gather_mla() on CUDA. A CTA appends one token: its threads normalise and narrow
// the latent dims, four at once, and then rotate words of the dims behind these and of the queries.
// A warp gathers one row.
#include <cstdint>
#include <type_traits>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/rotation.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kQuad = 4;  // dims that a thread takes at once
constexpr int kDimsOfScale = 128;
static_assert(kDimsOfScale == 32 * kQuad);            // a warp has all dims of one scale
static_assert(kDsMlaScaledDims == kThreads * kQuad);  // a CTA has all dims that have scales

/// Loads four consecutive elements as float32. Unless kWords, it loads them one by one, and those
/// behind the end of the row are 0.
template <DType kDType, bool kWords>
__device__ void load_quad(const void* row, int first, int num_dims, float (&values)[kQuad]) {
  using Storage = typename Format<kDType>::Storage;
  const auto* from = static_cast<const Storage*>(row) + first;
  if constexpr (kWords) {
    unpack<kDType, kQuad>(*reinterpret_cast<const Word<kDType, kQuad>*>(from), values);
  } else {
    for (int i = 0; i < kQuad; ++i) {
      values[i] = first + i < num_dims ? Format<kDType>::load(from[i]) : 0.0F;
    }
  }
}

template <DType kDType, bool kWords>
__device__ void store_quad(void* row, int first, int num_dims, const float (&values)[kQuad]) {
  using Storage = typename Format<kDType>::Storage;
  auto* to = static_cast<Storage*>(row) + first;
  if constexpr (kWords) {
    *reinterpret_cast<Word<kDType, kQuad>*>(to) = pack<kDType, kQuad>(values);
  } else {
    for (int i = 0; i < kQuad; ++i) {
      if (first + i < num_dims) to[i] = Format<kDType>::store(values[i]);
    }
  }
}

/// Copies up to four consecutive elements as they are.
template <DType kDType, bool kWords>
__device__ void copy_quad(const void* from_row, void* to_row, int first, int num_dims) {
  using Storage = typename Format<kDType>::Storage;
  const auto* from = static_cast<const Storage*>(from_row) + first;
  auto* to = static_cast<Storage*>(to_row) + first;
  if constexpr (kWords) {
    using QuadWord = Word<kDType, kQuad>;
    *reinterpret_cast<QuadWord*>(to) = *reinterpret_cast<const QuadWord*>(from);
  } else {
    for (int i = 0; i < kQuad; ++i) {
      if (first + i < num_dims) to[i] = from[i];
    }
  }
}

/// 1 / sqrt(mean square + eps) of a row. All threads of the CTA call it.
template <DType kDType, bool kWords>
__device__ float norm_factor(const void* row, int num_dims, float eps) {
  __shared__ float sums[kWarps];
  const auto thread = static_cast<int>(threadIdx.x);
  float sum = 0.0F;
  for (int first = kQuad * thread; first < num_dims; first += kQuad * kThreads) {
    float values[kQuad];
    load_quad<kDType, kWords>(row, first, num_dims, values);
    for (const float value : values) sum += value * value;
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0U, sum, distance);
  }
  if (thread % 32 == 0) sums[thread / 32] = sum;
  __syncthreads();
  sum = 0.0F;
  for (const float of_warp : sums) sum += of_warp;
  return __fdiv_rn(1.0F, __fsqrt_rn(__fdiv_rn(sum, static_cast<float>(num_dims)) + eps));
}

/// Multiplies `values` by `factor` and by the weights of their dims, and rounds them to the dtype
/// of rows, as rmsnorm() does.
template <DType kDType>
__device__ void normalise(const MlaAppendParams& p, float factor, int first,
                          float (&values)[kQuad]) {
  const int num_dims = p.parts[0].num_dims;
  for (int i = 0; i < kQuad && first + i < num_dims; ++i) {
    const float weight =
        p.weight_dtype == DType::kFloat32
            ? static_cast<const float*>(p.norm_weight)[first + i]
            : Format<kDType>::load(
                  static_cast<const typename Format<kDType>::Storage*>(p.norm_weight)[first + i]);
    values[i] = Format<kDType>::load(Format<kDType>::store(values[i] * factor * weight));
  }
}

/// The largest magnitude of the dims of a warp; NaN is ignored.
__device__ float largest_of_warp(const float (&values)[kQuad]) {
  float largest = 0.0F;
  for (const float value : values) largest = fmaxf(largest, fabsf(value));
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, distance));
  }
  return largest;
}

/// Appends the latent dims of a token. All threads of the CTA call it.
template <DType kFrom, DType kTo, bool kScaled, bool kWords>
__device__ void append_latent(const MlaAppendParams& p, int token, char* to) {
  const MlaPart& part = p.parts[0];
  const char* from = part.row(token);
  const auto thread = static_cast<int>(threadIdx.x);
  const bool is_normed = p.norm_weight != nullptr;
  const float factor = is_normed ? norm_factor<kFrom, kWords>(from, part.num_dims, p.eps) : 1.0F;
  for (int first = kQuad * thread; first < part.num_dims; first += kQuad * kThreads) {
    if constexpr (kFrom == kTo) {
      if (part.verbatim && !is_normed) {
        copy_quad<kFrom, kWords>(from, to, first, part.num_dims);
        continue;
      }
    }
    float values[kQuad];
    load_quad<kFrom, kWords>(from, first, part.num_dims, values);
    if (is_normed) normalise<kFrom>(p, factor, first, values);
    float scale = p.scale;
    if constexpr (kScaled) {  // the loop has one round, in which all threads of a warp have dims of
                              // one scale
      constexpr float kLeast = 1.17549435e-38F;
      scale = fmaxf(__fdiv_rn(largest_of_warp(values), 448.0F), kLeast);
      if (thread % 32 == 0) {
        __builtin_memcpy(to + kDsMlaScaledDims + thread / 32 * sizeof(scale), &scale,
                         sizeof(scale));
      }
    }
    for (float& value : values) value = __fdiv_rn(value, scale);
    store_quad<kTo, kWords>(to, first, part.num_dims, values);
  }
}

/// A word of the dims behind the latent ones, as the cache stores it.
template <DType kFrom, DType kTo, int kVec>
__device__ Word<kTo, kVec> stored_tail(const MlaAppendParams& p, Word<kFrom, kVec> word) {
  if constexpr (kFrom == kTo) {
    if (p.parts[1].verbatim) return word;
  }
  float values[kVec];
  unpack<kFrom, kVec>(word, values);
  for (float& value : values) value = __fdiv_rn(value, p.scale);
  return pack<kTo, kVec>(values);
}

/// `kTo`, `kTail`: the cache's dtypes for the latent dims and for the dims behind them.
template <DType kFrom, DType kTo, DType kTail, bool kScaled, bool kWords>
__global__ void __launch_bounds__(kThreads)
    append_mla_kernel(const __grid_constant__ MlaAppendParams p) {
  constexpr int kVec = kWords ? kWordElements<kFrom> : 1;
  using FromWord = Word<kFrom, kVec>;
  using TailWord = Word<kTail, kVec>;
  __shared__ float2 rotations[kMaxRotaryDim / 2];
  const auto token = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t page_size = p.places.pages.page_size.value;
  const int64_t slot = p.places.slots[token];
  const int64_t page = slot < 0 ? -1 : slot / page_size;
  const bool has_place = page >= 0 && page < p.places.pages.num_pages;
  const bool rotates = p.rope.head_dim > 0;
  if (rotates) {
    fill_rotations(p.rope, p.rope.position(token), rotations);
    __syncthreads();
  }
  const auto row_in_page = static_cast<int32_t>(slot - page * page_size);
  if (has_place) {
    append_latent<kFrom, kTo, kScaled, kWords>(p, token, p.parts[0].slot(page, row_in_page));
  }
  const MlaPart& tail = p.parts[1];
  const auto* k_pe = reinterpret_cast<const FromWord*>(tail.row(token));
  auto* stored = reinterpret_cast<TailWord*>(has_place ? tail.slot(page, row_in_page) : nullptr);
  if (!rotates) {
    for (int i = thread; has_place && i < tail.num_dims / kVec; i += kThreads) {
      stored[i] = stored_tail<kFrom, kTail, kVec>(p, k_pe[i]);
    }
    return;
  }
  const RopeSide& q = p.rope.sides[0];
  const HeadItems<kVec> items(p.rope);
  const int num_q = q.num_heads * items.count;
  const int num_items = num_q + (has_place && tail.num_dims > 0 ? items.count : 0);
  for (int item = thread; item < num_items; item += kThreads) {
    if (item >= num_q) {
      rotate_item<kFrom, kVec>(
          p.rope, items, rotations, k_pe, item - num_q,
          [&](int i, FromWord word) { stored[i] = stored_tail<kFrom, kTail, kVec>(p, word); });
      continue;
    }
    const int head = item / items.count;
    auto* row =
        reinterpret_cast<FromWord*>(q.to + token * q.to_token_stride + head * q.to_head_stride);
    rotate_item<kFrom, kVec>(p.rope, items, rotations, row, item - head * items.count,
                             [&](int i, FromWord word) { row[i] = word; });
  }
}

template <DType kFrom, DType kTo, DType kTail, bool kScaled>
Status run_append(const MlaAppendParams& p, Device device, Stream stream) {
  constexpr int kVec = kWordElements<kFrom>;
  const MlaPart& latent = p.parts[0];
  const MlaPart& tail = p.parts[1];
  constexpr int kFromBytes = kQuad * static_cast<int>(item_size(kFrom));
  constexpr int kToBytes = kQuad * static_cast<int>(item_size(kTo));
  constexpr int kTailBytes = kVec * static_cast<int>(item_size(kTail));
  const bool by_word = latent.num_dims % kQuad == 0 && tail.num_dims % kVec == 0 &&
                       (p.rope.head_dim == 0 || divides_into_words(p.rope, kVec)) &&
                       allows_words(p.rope.sides[0]) &&
                       is_aligned(latent.rows, kFromBytes, latent.row_stride) &&
                       is_aligned(latent.cache, kToBytes, latent.page_stride, latent.slot_stride) &&
                       is_aligned(tail.rows, 16, tail.row_stride) &&
                       is_aligned(tail.cache, kTailBytes, tail.page_stride, tail.slot_stride);
  return launch(by_word ? append_mla_kernel<kFrom, kTo, kTail, kScaled, true>
                        : append_mla_kernel<kFrom, kTo, kTail, kScaled, false>,
                {.ctas = dim3(static_cast<unsigned>(p.num_rows)), .threads = dim3(kThreads)},
                device, stream, p);
}

/// Gathers one part of a row, the latent dims or those behind them, from `stored`; zeros if this is
/// null. `scales`: one for each 128 dims, or null. All lanes of a warp call it.
template <DType kFrom, DType kTo, bool kWords>
__device__ void gather_part(const MlaPart& part, float scale, const char* stored,
                            const char* scales, char* to) {
  for (int first = kQuad * (static_cast<int>(threadIdx.x) % 32); first < part.num_dims;
       first += kQuad * 32) {
    if constexpr (kFrom == kTo) {
      if (part.verbatim && stored != nullptr) {
        copy_quad<kFrom, kWords>(stored, to, first, part.num_dims);
        continue;
      }
    }
    float values[kQuad] = {};
    if (stored != nullptr) {
      load_quad<kFrom, kWords>(stored, first, part.num_dims, values);
      float own = 1.0F;
      if (scales != nullptr) {
        __builtin_memcpy(&own, scales + first / kDimsOfScale * sizeof(own), sizeof(own));
      }
      for (float& value : values) value = __fmul_rn(__fmul_rn(value, own), scale);
    }
    store_quad<kTo, kWords>(to, first, part.num_dims, values);
  }
}

/// `kFrom`, `kTail`: the cache's dtypes for the latent dims and for the dims behind them.
template <DType kFrom, DType kTail, DType kTo, bool kWords>
__global__ void __launch_bounds__(kThreads)
    gather_mla_kernel(const __grid_constant__ MlaGatherParams p) {
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (row >= p.num_rows || row < p.indptr[0] || row >= p.indptr[p.batch_size]) return;
  const MlaGatherParams::Place place = p.place_of(p.request_of(row), row);
  const auto stored_of = [&](const MlaPart& part) -> const char* {
    return place.page < 0 ? nullptr : part.slot(place.page, place.row_in_page);
  };
  const char* latent = stored_of(p.parts[0]);
  const char* scales = p.has_scales && latent != nullptr ? latent + kDsMlaScaledDims : nullptr;
  gather_part<kFrom, kTo, kWords>(p.parts[0], p.scale, latent, scales, p.parts[0].row(row));
  gather_part<kTail, kTo, kWords>(p.parts[1], p.scale, stored_of(p.parts[1]), nullptr,
                                  p.parts[1].row(row));
}

template <DType kFrom, DType kTail, DType kTo>
Status run_gather(const MlaGatherParams& p, Device device, Stream stream) {
  bool by_word = true;
  for (const MlaPart& part : p.parts) {
    const int to_bytes = kQuad * static_cast<int>(item_size(kTo));
    const int from_bytes = kQuad * static_cast<int>(item_size(part.cache_dtype));
    by_word = by_word && part.num_dims % kQuad == 0 &&
              is_aligned(part.rows, to_bytes, part.row_stride) &&
              is_aligned(part.cache, from_bytes, part.page_stride, part.slot_stride);
    if (p.parts[1].num_dims == 0) break;
  }
  const dim3 ctas(static_cast<unsigned>((int64_t{p.num_rows} + kWarps - 1) / kWarps));
  return launch(by_word ? gather_mla_kernel<kFrom, kTail, kTo, true>
                        : gather_mla_kernel<kFrom, kTail, kTo, false>,
                {.ctas = ctas, .threads = dim3(kThreads)}, device, stream, p);
}

}  // namespace

Status append_mla(const MlaAppendParams& p, Device device, Stream stream) noexcept {
  static_assert(sizeof(MlaAppendParams) <= 4096);  // the most that a kernel's argument may take
  constexpr DType kE4M3 = DType::kFloat8E4M3;
  if (p.has_scales) {
    return run_append<DType::kBFloat16, kE4M3, DType::kBFloat16, true>(p, device, stream);
  }
  return with_float(p.parts[0].dtype, [&](auto dtype) {
    constexpr DType kFrom = decltype(dtype)::value;
    return with_stored<kFrom>(p.parts[0].cache_dtype, [&](auto to) {
      constexpr DType kTo = decltype(to)::value;
      return run_append<kFrom, kTo, kTo, false>(p, device, stream);
    });
  });
}

Status gather_mla(const MlaGatherParams& p, Device device, Stream stream) noexcept {
  constexpr DType kE4M3 = DType::kFloat8E4M3;
  return with_float(p.parts[0].dtype, [&](auto dtype) {
    constexpr DType kTo = decltype(dtype)::value;
    if (p.has_scales) return run_gather<kE4M3, DType::kBFloat16, kTo>(p, device, stream);
    return with_stored<kTo>(p.parts[0].cache_dtype, [&](auto from) {
      constexpr DType kFrom = decltype(from)::value;
      return run_gather<kFrom, kFrom, kTo>(p, device, stream);
    });
  });
}

}  // namespace flashplan::cuda
