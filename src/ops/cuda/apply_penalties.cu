// SPDX-License-Identifier: Apache-2.0
// apply_penalties() on CUDA: a CTA has a part of the vocabulary of one request. In shared memory it
// counts the tokens of the history that lie in this part. Then it changes the logit of each token
// that it counted, once.
#include <algorithm>
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kPart = 8 * 1024;  // token ids that a CTA counts at once

template <DType kDType>
__global__ void __launch_bounds__(kThreads)
    penalties_kernel(const __grid_constant__ PenaltyParams p) {
  using Storage = typename Format<kDType>::Storage;
  __shared__ int32_t counts[kPart];
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const Penalties penalties = p.penalties_of(row);
  if (!penalties.are_valid()) return;
  const int len = min(p.history_lens[row], p.max_len);
  const int64_t step = int64_t{gridDim.y} * kPart;
  for (int64_t first = int64_t{blockIdx.y} * kPart; first < p.vocab; first += step) {
    const int size = static_cast<int>(min(int64_t{kPart}, p.vocab - first));
    for (int i = thread; i < size; i += kThreads) counts[i] = 0;
    __syncthreads();
    for (int i = thread; i < len; i += kThreads) {
      const int64_t id = p.token(row, i) - first;
      if (id >= 0 && id < size) atomicAdd(&counts[id], 1);
    }
    __syncthreads();
    auto* logits = reinterpret_cast<Storage*>(p.logits + row * p.row_stride) + first;
    // No barrier follows this loop: the thread that reads a counter here also clears it for the
    // next part.
    for (int i = thread; i < size; i += kThreads) {
      const int count = counts[i];
      if (count == 0) continue;
      logits[i] = Format<kDType>::store(sampling::penalised(Format<kDType>::load(logits[i]),
                                                            static_cast<float>(count), penalties));
    }
  }
}

}  // namespace

Status apply_penalties(const PenaltyParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr int kMostParts = 65535;  // CUDA's limit of CTAs along y; a CTA may have several parts
    const int parts = std::min(p.vocab / kPart + (p.vocab % kPart != 0 ? 1 : 0), kMostParts);
    const Grid grid{.ctas = dim3(static_cast<unsigned>(p.num_rows), static_cast<unsigned>(parts)),
                    .threads = dim3(kThreads)};
    return launch(penalties_kernel<decltype(dtype)::value>, grid, device, stream, p);
  });
}

}  // namespace flashplan::cuda
