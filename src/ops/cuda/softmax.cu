// SPDX-License-Identifier: Apache-2.0
// softmax() on CUDA: a cluster of CTAs keeps a row in its shared memory.
#include <cmath>
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/row_part.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

struct KernelParams {
  SoftmaxParams p;
  RowSplit split;
};

struct Shared {
  float warp_values[kRowWarps];
  float of_ctas[2][kMaxCluster];  // the largest values, the sums
};

struct Add {
  static __device__ float of(float a, float b) { return a + b; }
};
struct Larger {  // ignores NaN, which the sum keeps
  static __device__ float of(float a, float b) { return fmaxf(a, b); }
};

/// Reduces over all threads of the cluster; all of them add in the same order.
template <class Op>
__device__ float all_reduce(float value, float (&of_ctas)[kMaxCluster], Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int distance = 16; distance > 0; distance /= 2) {
    value = Op::of(value, __shfl_xor_sync(~0U, value, distance));
  }
  if (thread % 32 == 0) shared.warp_values[thread / 32] = value;
  __syncthreads();
  value = shared.warp_values[0];
  for (int w = 1; w < kRowWarps; ++w) value = Op::of(value, shared.warp_values[w]);
  if (thread < cluster_size()) *shared_of(&of_ctas[cluster_rank()], thread) = value;
  cluster_sync();
  value = of_ctas[0];
  for (int rank = 1; rank < cluster_size(); ++rank) value = Op::of(value, of_ctas[rank]);
  return value;
}

template <DType kFrom, DType kTo>
__global__ void __launch_bounds__(kRowThreads)
    softmax_kernel(const __grid_constant__ KernelParams params) {
  __shared__ Shared shared;
  extern __shared__ float4 memory[];
  const SoftmaxParams& p = params.p;
  const int32_t row = row_of_cluster();
  RowPart<kFrom> part(p.logits + row * p.row_stride, nullptr, p.vocab, params.split,
                      reinterpret_cast<float*>(memory));
  float largest = -INFINITY;
  part.load([&](float x) { largest = fmaxf(largest, x); });
  largest = all_reduce<Larger>(largest, shared.of_ctas[0], shared);

  constexpr float kLog2E = 1.44269504F;
  const float factor = __fdiv_rn(kLog2E, p.temperature.of(row));
  const int thread = static_cast<int>(threadIdx.x);
  float sum = 0.0F;
  for (int i = thread; i < part.count(); i += kRowThreads) {
    sum += exp2f((part.at(i) - largest) * factor);
  }
  sum = all_reduce<Add>(sum, shared.of_ctas[1], shared);
  const float scale = 1.0F / sum;

  constexpr int kVec = kWordElements<kTo>;
  using Storage = typename Format<kTo>::Storage;
  auto* out = reinterpret_cast<Storage*>(p.out + row * p.out_stride) + part.begin();
  // `out` may be the memory of the logits: the thread that reads an element again also writes it.
  const auto result = [&](int i) { return exp2f((part.at(i) - largest) * factor) * scale; };
  const bool by_word = (reinterpret_cast<uint64_t>(out) & 15) == 0;
  const int num_words = by_word ? part.count() / kVec : 0;
  for (int word = thread; word < num_words; word += kRowThreads) {
    float values[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = result(word * kVec + i);
    reinterpret_cast<Word<kTo, kVec>*>(out)[word] = pack<kTo, kVec>(values);
  }
  for (int i = num_words * kVec + thread; i < part.count(); i += kRowThreads) {
    out[i] = Format<kTo>::store(result(i));
  }
  cluster_sync();  // a CTA's shared memory must live until all have written to it
}

}  // namespace

Status softmax(const SoftmaxParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kFrom = decltype(dtype)::value;
    KernelParams params{p, {}};
    const Grid grid = split_rows(p.num_rows, p.vocab, device, &params.split);
    return launch(p.out_dtype == DType::kFloat32 ? softmax_kernel<kFrom, DType::kFloat32>
                                                 : softmax_kernel<kFrom, kFrom>,
                  grid, device, stream, params);
  });
}

}  // namespace flashplan::cuda
