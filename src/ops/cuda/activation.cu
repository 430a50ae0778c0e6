// SPDX-License-Identifier: Apache-2.0
// gated_activation() on CUDA: a thread reads a word of each half of a row and writes one word.
#include <algorithm>
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/pdl.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float activate(Activation activation, float x) {
  if (activation == Activation::kGelu) return x * normcdff(x);
  // The result is x * sigmoid(u). For SiLU, u is x. GELU by tanh multiplies x by (1 + tanh(t)) / 2,
  // which is sigmoid(2 t), so u is 2 t.
  const float u = activation == Activation::kSilu ? x : x * (1.5957691F + 0.071354816F * (x * x));
  // For u < -87 the sigmoid is less than 2e-38. It is taken as 0, so that exp(-u) cannot overflow:
  // the result must be 0 for every x down to -3e38.
  return u < -87.0F ? x * 0.0F : __fdividef(x, 1.0F + __expf(-u));
}

/// CTAs lie along rows in x and along the words of a row in y. Inside a CTA, threads lie along
/// words in x and along rows in y.
template <DType kFrom, DType kTo, int kVec>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const __grid_constant__ ActivationParams p) {
  wait_for_kernels_before();
  const int num_words = p.row_size / kVec;
  const auto word = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  const auto row = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  if (row >= p.num_rows || word >= num_words) return;
  const auto* from = reinterpret_cast<const Word<kFrom, kVec>*>(row_at(p.x, row));
  float gate[kVec];
  float up[kVec];
  unpack<kFrom, kVec>(__ldcs(from + word), gate);
  unpack<kFrom, kVec>(__ldcs(from + num_words + word), up);
  for (int i = 0; i < kVec; ++i) {
    gate[i] = activate(p.activation, gate[i]) * up[i];
    if (p.scale != 1.0F) gate[i] = __fdiv_rn(gate[i], p.scale);
  }
  reinterpret_cast<Word<kTo, kVec>*>(row_at(p.out, row))[word] = pack<kTo, kVec>(gate);
}

template <DType kFrom, DType kTo>
Status run(const ActivationParams& p, Device device, Stream stream) {
  constexpr int kVec = kWordElements<kFrom>;
  constexpr int kBytesOut = kVec * static_cast<int>(item_size(kTo));
  const bool by_word =
      p.row_size % kVec == 0 && is_aligned(p.x, 16) && is_aligned(p.out, kBytesOut);
  const int num_words = p.row_size / (by_word ? kVec : 1);
  const int width = std::min((num_words + 31) / 32 * 32, kThreads);
  const int rows = kThreads / width;
  const Grid grid{.ctas = dim3(static_cast<unsigned>((p.num_rows + rows - 1) / rows),
                               static_cast<unsigned>((num_words + width - 1) / width)),
                  .threads = dim3(static_cast<unsigned>(width), static_cast<unsigned>(rows)),
                  .pdl = p.pdl && can_wait(device)};
  return launch(by_word ? activation_kernel<kFrom, kTo, kVec> : activation_kernel<kFrom, kTo, 1>,
                grid, device, stream, p);
}

}  // namespace

Status gated_activation(const ActivationParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kFrom = decltype(dtype)::value;
    return with_stored<kFrom>(
        p.out_dtype, [&](auto to) { return run<kFrom, decltype(to)::value>(p, device, stream); });
  });
}

}  // namespace flashplan::cuda
