// SPDX-License-Identifier: Apache-2.0
// quantize_fp8() on CUDA. A CTA has some tokens of one head. Its threads lie along the words of a
// token in x, and along tokens in y.
#include <algorithm>
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 256;

/// Calls body(from, to, word) for this thread's words of all tokens: word number `word` of the row
/// that is read at `from` and written at `to`.
template <DType kFrom, DType kTo, int kVec, class Body>
__device__ void for_each_word(const QuantizeParams& p, const Body& body) {
  const RopeSide& heads = p.heads;
  const auto head = static_cast<int>(blockIdx.x);
  const int num_words = p.head_dim / kVec;
  const auto tokens_at_once = static_cast<int>(gridDim.y * blockDim.y);
  for (auto token = static_cast<int64_t>(blockIdx.y * blockDim.y + threadIdx.y); token < p.num_rows;
       token += tokens_at_once) {
    const auto* from = reinterpret_cast<const Word<kFrom, kVec>*>(
        heads.from + token * heads.from_token_stride + head * heads.from_head_stride);
    auto* to = reinterpret_cast<Word<kTo, kVec>*>(heads.to + token * heads.to_token_stride +
                                                  head * heads.to_head_stride);
    for (auto word = static_cast<int>(threadIdx.x); word < num_words;
         word += static_cast<int>(blockDim.x)) {
      body(from, to, word);
    }
  }
}

/// Raises the scales, which must be 0 before, to those that the values need.
template <DType kFrom, int kVec>
__global__ void __launch_bounds__(kThreads)
    raise_scales_kernel(const __grid_constant__ QuantizeParams p) {
  constexpr unsigned kInfinity = 0x7f800000U;
  // Holds the bits of a float >= 0: such bits are ordered as the floats are.
  __shared__ unsigned largest;
  const bool is_first = threadIdx.x == 0 && threadIdx.y == 0;
  if (is_first) largest = 0;
  __syncthreads();
  unsigned mine = 0;
  for_each_word<kFrom, kFrom, kVec>(p, [&](const auto* from, const auto* /*to*/, int word) {
    float values[kVec];
    unpack<kFrom, kVec>(from[word], values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const unsigned magnitude = __float_as_uint(values[i]) & 0x7fffffffU;
      if (magnitude < kInfinity) mine = max(mine, magnitude);
    }
  });
  atomicMax(&largest, mine);
  __syncthreads();
  if (!is_first) return;
  const float scale = p.scale_for(__uint_as_float(largest));
  atomicMax(reinterpret_cast<unsigned*>(p.scale_of(static_cast<int>(blockIdx.x))),
            __float_as_uint(scale));
}

template <DType kFrom, DType kTo, int kVec>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  const auto head = static_cast<int>(blockIdx.x);
  float scale = p.number;
  if (p.source != ScaleSource::kNumber) scale = *p.scale_of(head);
  // raise_scales_kernel leaves 0 for a head of zeros, and the first CTA of the head writes 1 there
  // below. Other CTAs of the head may read 0 or 1, and use 1 either way.
  if (p.source == ScaleSource::kValues && scale == 0.0F) scale = 1.0F;
  for_each_word<kFrom, kTo, kVec>(p, [&](const auto* from, auto* to, int word) {
    to[word] = narrowed<kFrom, kTo, kVec>(from[word], scale);
  });
  if (p.source != ScaleSource::kTensor && blockIdx.y == 0 && threadIdx.x == 0 && threadIdx.y == 0) {
    *p.scale_of(head) = scale;
  }
}

template <int kVec>
Grid grid_for(const QuantizeParams& p) {
  constexpr int kMostCtas = 2048;
  const int num_words = std::max(p.head_dim / kVec, 1);
  int width = 1;
  while (width < num_words && width < kThreads) width *= 2;
  const int tokens_of_cta = kThreads / width;
  const int heads = std::max(p.heads.num_heads, p.num_scales);
  const int most = std::max(kMostCtas / heads, 1);
  const int ctas = std::clamp((p.num_rows + tokens_of_cta - 1) / tokens_of_cta, 1, most);
  return {.ctas = dim3(static_cast<unsigned>(heads), static_cast<unsigned>(ctas)),
          .threads = dim3(static_cast<unsigned>(width), static_cast<unsigned>(tokens_of_cta))};
}

template <DType kFrom, DType kTo, int kVec>
Status run(const QuantizeParams& p, Device device, Stream stream) {
  const Grid grid = grid_for<kVec>(p);
  if (p.source == ScaleSource::kValues) {
    const DeviceGuard guard(device.index);
    if (!guard.status().ok()) return guard.status();
    FLASHPLAN_CUDA_CALL(cudaMemsetAsync, p.scale, 0,
                        static_cast<size_t>(p.num_scales) * sizeof(float), stream);
    FLASHPLAN_RETURN_IF_ERROR(launch(raise_scales_kernel<kFrom, kVec>, grid, device, stream, p));
  }
  return launch(quantize_kernel<kFrom, kTo, kVec>, grid, device, stream, p);
}

}  // namespace

Status quantize_fp8(const QuantizeParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kFrom = decltype(dtype)::value;
    constexpr int kVec = kWordElements<kFrom>;
    const RopeSide& heads = p.heads;
    const bool by_word =
        p.head_dim % kVec == 0 &&
        is_aligned(heads.from, 16, heads.from_token_stride, heads.from_head_stride) &&
        is_aligned(heads.to, kVec, heads.to_token_stride, heads.to_head_stride);
    if (p.out_dtype == DType::kFloat8E5M2) {
      return by_word ? run<kFrom, DType::kFloat8E5M2, kVec>(p, device, stream)
                     : run<kFrom, DType::kFloat8E5M2, 1>(p, device, stream);
    }
    return by_word ? run<kFrom, DType::kFloat8E4M3, kVec>(p, device, stream)
                   : run<kFrom, DType::kFloat8E4M3, 1>(p, device, stream);
  });
}

}  // namespace flashplan::cuda
