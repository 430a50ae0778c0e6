// SPDX-License-Identifier: Apache-2.0
// softmax() on CUDA: a cluster of CTAs keeps a row in its shared memory.
#include <cmath>
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/mailbox.h"
#include "ops/cuda/row_part.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {
namespace {

struct Shared {
  BulkBarrier arrived[kBulks];  // of the part
  Mailbox mail;
  float warp_values[kRowWarps];
  uint64_t of_ranks[kMaxCluster];  // as message_of() makes them
};

/// The largest value of a CTA, and the sum of its exponentials as a part of it.
__device__ inline uint64_t message_of(float largest, float sum) {
  return sampling::bits_of(largest) | uint64_t{sampling::bits_of(sum)} << 32;
}
__device__ inline float largest_in(uint64_t message) {
  return sampling::float_of(static_cast<uint32_t>(message));
}
__device__ inline float sum_in(uint64_t message) {
  return sampling::float_of(static_cast<uint32_t>(message >> 32));
}

/// 2^x, one instruction; 0 below 2^-126.
__device__ inline float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return exp2f(x);
#endif
}

/// exp(x - largest) of four elements, where factor is log2(e) / temperature.
__device__ inline float4 exp_of(const float4& x, float largest, float factor) {
  return make_float4(exp2_fast((x.x - largest) * factor), exp2_fast((x.y - largest) * factor),
                     exp2_fast((x.z - largest) * factor), exp2_fast((x.w - largest) * factor));
}

/// Each CTA takes the exponentials of its part from the part's own largest value, so that the CTAs
/// of a row exchange values only once.
template <DType kFrom, DType kTo, bool kHeld>
__global__ void __launch_bounds__(kRowThreads, kRowCtasOfSm)
    softmax_kernel(const __grid_constant__ RowParams<SoftmaxParams> params) {
  __shared__ Shared shared;
  extern __shared__ float4 memory[];
  const SoftmaxParams& p = params.p;
  const int32_t row = row_of_cluster();
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  RowPart<kFrom, kHeld> part({p.logits, p.row_stride, nullptr, 0}, row, p.vocab, params.split,
                             reinterpret_cast<float*>(memory), -INFINITY);
  part.start_load(shared.arrived);
  if (thread == 32) {
    shared.mail.init();
    Mailbox::fence_init();
  }
  cluster_arrive_relaxed();
  const float factor = __fdiv_rn(1.44269504F, p.temperature.of(row));
  float largest = -INFINITY;
  part.finish_load(shared.arrived, [&](float x) {
    largest = fmaxf(largest, x);  // ignores NaN, which the sum keeps
  });
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, distance));
  }
  if (lane == 0) shared.warp_values[thread / 32] = largest;
  __syncthreads();
  largest = shared.warp_values[0];
  for (int w = 1; w < kRowWarps; ++w) largest = fmaxf(largest, shared.warp_values[w]);
  __syncthreads();

  const float base = largest == -INFINITY ? 0.0F : largest;  // a part of nothing but -inf adds 0
  float sum = 0.0F;
#pragma unroll 1
  for (int i = thread * 4; i < part.count(); i += kRowThreads * 4) {
    const float4 e = exp_of(part.word(i), base, factor);
    sum += (e.x + e.y) + (e.z + e.w);
    if (kHeld) part.replace(i, e);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0U, sum, distance);
  }
  if (lane == 0) shared.warp_values[thread / 32] = sum;
  __syncthreads();
  cluster_wait();  // all CTAs have begun: their shared memory can be written to
  if (thread < cluster_size()) {
    sum = shared.warp_values[0];
    for (int w = 1; w < kRowWarps; ++w) sum += shared.warp_values[w];
    shared.mail.send(&shared.of_ranks[cluster_rank()], message_of(largest, sum), thread);
    if (thread == 0) {
      shared.mail.expect(static_cast<uint32_t>(cluster_size()) * sizeof(shared.of_ranks[0]));
    }
  }
  shared.mail.wait(0);
  float of_row = -INFINITY;
  for (int rank = 0; rank < cluster_size(); ++rank) {
    of_row = fmaxf(of_row, largest_in(shared.of_ranks[rank]));
  }
  sum = 0.0F;
  for (int rank = 0; rank < cluster_size(); ++rank) {
    const uint64_t message = shared.of_ranks[rank];
    sum += sum_in(message) * exp2_fast((largest_in(message) - of_row) * factor);
  }
  const float scale = exp2_fast((largest - of_row) * factor) / sum;

  constexpr int kVec = kWordElements<kTo>;
  using Storage = typename Format<kTo>::Storage;
  auto* out = reinterpret_cast<Storage*>(p.out + row * p.out_stride) + part.begin();
  const bool by_word = (reinterpret_cast<uint64_t>(out) & 15) == 0;
  // `out` may be the memory of the logits: the thread that reads an element again also writes it.
#pragma unroll 1
  for (int i = thread * kVec; i < part.count(); i += kRowThreads * kVec) {
    float values[kVec];
#pragma unroll
    for (int v = 0; v < kVec; v += 4) {
      float4 e = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      if (i + v < part.count()) {
        e = kHeld ? part.word(i + v) : exp_of(part.word(i + v), base, factor);
      }
      values[v] = e.x * scale;
      values[v + 1] = e.y * scale;
      values[v + 2] = e.z * scale;
      values[v + 3] = e.w * scale;
    }
    if (by_word && i + kVec <= part.count()) {
      __stcs(reinterpret_cast<Word<kTo, kVec>*>(out + i), pack<kTo, kVec>(values));
    } else {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        if (i + v < part.count()) out[i + v] = Format<kTo>::store(values[v]);
      }
    }
  }
}

}  // namespace

Status softmax(const SoftmaxParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kFrom = decltype(dtype)::value;
    constexpr DType kWide = DType::kFloat32;
    constexpr RowKernels<SoftmaxParams> kToFloat32{softmax_kernel<kFrom, kWide, true>,
                                                   softmax_kernel<kFrom, kWide, false>};
    constexpr RowKernels<SoftmaxParams> kToSame{softmax_kernel<kFrom, kFrom, true>,
                                                softmax_kernel<kFrom, kFrom, false>};
    // The same split for any number of rows: results do not depend on the batch.
    return launch_rows(p.out_dtype == kWide ? kToFloat32 : kToSame, p, device, stream,
                       {.max_cluster = kMaxCluster / 2});
  });
}

}  // namespace flashplan::cuda
