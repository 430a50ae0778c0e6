// SPDX-License-Identifier: Apache-2.0
// softmax() on CUDA: the CTAs of a cluster divide a row. Each CTA holds its part of the row in
// registers or, if the part is too long for them, reads it three times.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/sample/mailbox.h"
#include "ops/cuda/sample/row_part.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {
namespace {

constexpr int kHeldThreads = 512;  // threads of a CTA that holds its part in registers
constexpr int kElementsOfThread = 32;
constexpr int32_t kHeldElements = kHeldThreads * kElementsOfThread;

template <int kThreads>
struct Shared {
  Mailbox mail;
  float warp_values[kThreads / 32];
  uint64_t of_ranks[kMaxCluster];  // the messages of all CTAs, made by message_of()
};

/// Packs the largest value of a CTA's part, and the sum of exponentials relative to that value.
__device__ inline uint64_t message_of(float largest, float sum) {
  return sampling::bits_of(largest) | uint64_t{sampling::bits_of(sum)} << 32;
}
__device__ inline float largest_in(uint64_t message) {
  return sampling::float_of(static_cast<uint32_t>(message));
}
__device__ inline float sum_in(uint64_t message) {
  return sampling::float_of(static_cast<uint32_t>(message >> 32));
}

/// 2^x by one instruction; results below 2^-126 are 0.
__device__ inline float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return exp2f(x);
#endif
}

/// Reduces one value of each thread of a CTA.
template <int kThreads, class Reduce>
__device__ float reduce_cta(float value, Shared<kThreads>& shared, const Reduce& reduce) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = reduce(value, __shfl_xor_sync(~0U, value, distance));
  }
  const int thread = static_cast<int>(threadIdx.x);
  if (thread % 32 == 0) shared.warp_values[thread / 32] = value;
  __syncthreads();
  value = shared.warp_values[0];
  for (int w = 1; w < kThreads / 32; ++w) value = reduce(value, shared.warp_values[w]);
  __syncthreads();
  return value;
}
template <int kThreads>
__device__ float largest_of_cta(float value, Shared<kThreads>& shared) {
  // fmaxf ignores NaN elements, but the sum of exponentials is NaN then, and so are all results.
  return reduce_cta(value, shared, [](float a, float b) { return fmaxf(a, b); });
}
template <int kThreads>
__device__ float sum_of_cta(float value, Shared<kThreads>& shared) {
  return reduce_cta(value, shared, [](float a, float b) { return a + b; });
}

/// Lets the CTAs of the row exchange messages. cluster_wait() is due before the first one is sent.
template <int kThreads>
__device__ void open_mail(Shared<kThreads>& shared) {
  if (threadIdx.x == 0) {
    shared.mail.init();
    Mailbox::fence_init();
    shared.mail.expect(static_cast<uint32_t>(cluster_size()) * sizeof(shared.of_ranks[0]));
  }
  cluster_arrive_relaxed();
}

/// This CTA's exponentials times this number are probabilities. `largest`: the largest value of the
/// CTA's part; `sum`: the sum of its exponentials. A CTA takes exponentials relative to the largest
/// value of its own part, not of the row, so that the CTAs of a row exchange values only once.
template <int kThreads>
__device__ float scale_of_part(float largest, float sum, float factor, Shared<kThreads>& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  cluster_wait();  // all CTAs have begun: their shared memory can be written to
  if (thread < cluster_size()) {
    shared.mail.send(&shared.of_ranks[cluster_rank()], message_of(largest, sum), thread);
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
  return exp2_fast((largest - of_row) * factor) / sum;
}

/// What is subtracted from the elements of a part before exponentials are taken: the largest of
/// them, or 0 if all are -infinity, so that they add 0 to the sum and not NaN.
__device__ inline float base_of(float largest) { return largest == -INFINITY ? 0.0F : largest; }

/// log2(e) / temperature of a row.
__device__ inline float factor_of(const SoftmaxParams& p, int32_t row) {
  return __fdiv_rn(1.44269504F, p.temperature.of(row));
}

/// The memory that the results of a part are written to.
template <DType kTo>
class PartOut {
 public:
  using Storage = typename Format<kTo>::Storage;

  __device__ PartOut(const SoftmaxParams& p, int32_t row, int32_t begin, int32_t count)
      : out_(reinterpret_cast<Storage*>(p.out + row * p.out_stride) + begin),
        count_(count),
        by_word_((reinterpret_cast<uint64_t>(out_) & 15) == 0) {}

  /// Stores elements i to i + kCount - 1 of the part, as one word if possible. i is a multiple of
  /// kCount.
  template <int kCount>
  __device__ void store(int i, const float (&values)[kCount]) const {
    if (by_word_ && i + kCount <= count_) {
      __stcs(reinterpret_cast<Word<kTo, kCount>*>(out_ + i), pack<kTo, kCount>(values));
      return;
    }
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (i + v < count_) out_[i + v] = Format<kTo>::store(values[v]);
    }
  }

 private:
  Storage* const out_;
  const int32_t count_;
  const bool by_word_;
};

/// The kernel for parts of rows of up to kHeldElements elements, which it reads once.
template <DType kFrom, DType kTo>
__global__ void __launch_bounds__(kHeldThreads, 2)
    held_softmax_kernel(const __grid_constant__ RowParams<SoftmaxParams> params) {
  __shared__ Shared<kHeldThreads> shared;
  const SoftmaxParams& p = params.p;
  const int32_t row = row_of_cluster();
  const RowPart<kFrom, false> part({p.logits, p.row_stride, nullptr, 0}, row, p.vocab, params.split,
                                   nullptr, -INFINITY);
  constexpr int kVec = kWordElements<kFrom>;
  constexpr int kWords = kElementsOfThread / kVec;
  const auto first_of = [](int u) {
    return (u * kHeldThreads + static_cast<int>(threadIdx.x)) * kVec;
  };
  Word<kFrom, kVec> words[kWords] = {};
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    if (part.has_words(first_of(u), kVec)) words[u] = __ldcs(part.words_at(first_of(u)));
  }
  open_mail(shared);
  float x[kWords][kVec];
#pragma unroll
  for (int u = 0; u < kWords; ++u) unpack<kFrom, kVec>(words[u], x[u]);
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    if (!part.has_words(first_of(u), kVec)) part.read_elements(first_of(u), x[u]);
  }
  const float factor = factor_of(p, row);
  float largest = -INFINITY;
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
#pragma unroll
    for (float value : x[u]) largest = fmaxf(largest, value);
  }
  largest = largest_of_cta(largest, shared);
  const float base = base_of(largest);
  float sum = 0.0F;
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
#pragma unroll
    for (float& value : x[u]) {
      value = exp2_fast((value - base) * factor);
      sum += value;
    }
  }
  const float scale = scale_of_part(largest, sum_of_cta(sum, shared), factor, shared);
  const PartOut<kTo> out(p, row, part.begin(), part.count());
  constexpr int kOut = kWordElements<kTo> < kVec ? kWordElements<kTo> : kVec;
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
#pragma unroll
    for (int v = 0; v < kVec; v += kOut) {
      float values[kOut];
#pragma unroll
      for (int e = 0; e < kOut; ++e) values[e] = x[u][v + e] * scale;
      out.store(first_of(u) + v, values);
    }
  }
}

/// The kernel for longer parts of rows, which it reads three times.
template <DType kFrom, DType kTo>
__global__ void __launch_bounds__(kRowThreads, kRowCtasOfSm)
    long_softmax_kernel(const __grid_constant__ RowParams<SoftmaxParams> params) {
  __shared__ Shared<kRowThreads> shared;
  const SoftmaxParams& p = params.p;
  const int32_t row = row_of_cluster();
  const int thread = static_cast<int>(threadIdx.x);
  RowPart<kFrom, false> part({p.logits, p.row_stride, nullptr, 0}, row, p.vocab, params.split,
                             nullptr, -INFINITY);
  open_mail(shared);
  const float factor = factor_of(p, row);
  float largest = -INFINITY;
  part.load([&](float x) { largest = fmaxf(largest, x); });
  largest = largest_of_cta(largest, shared);
  const float base = base_of(largest);
  const auto exp_of = [&](float x) { return exp2_fast((x - base) * factor); };
  float sum = 0.0F;
  part.load([&](float x) { sum += exp_of(x); });
  const float scale = scale_of_part(largest, sum_of_cta(sum, shared), factor, shared);
  const PartOut<kTo> out(p, row, part.begin(), part.count());
  constexpr int kVec = kWordElements<kTo>;
  // `out` may be the memory of the logits: the thread that reads an element again also writes it.
#pragma unroll 1
  for (int i = thread * kVec; i < part.count(); i += kRowThreads * kVec) {
    float values[kVec];
#pragma unroll
    for (int v = 0; v < kVec; v += 4) {
      const float4 x = part.word(i + v);
      values[v] = exp_of(x.x) * scale;
      values[v + 1] = exp_of(x.y) * scale;
      values[v + 2] = exp_of(x.z) * scale;
      values[v + 3] = exp_of(x.w) * scale;
    }
    out.store(i, values);
  }
}

/// How many CTAs share a row: as few as hold it in registers. It does not depend on the number of
/// rows, so results do not depend on the batch.
int ctas_of_row(int32_t vocab, Device device) {
  const int32_t holding = (vocab - 1) / kHeldElements + 1;
  // A GPC, of 16 or 18 SMs, runs two clusters if these have 13 CTAs, and also if they have 16.
  constexpr int kMostFewer = 12;
  return std::min(holding <= kMostFewer ? holding : kMaxCluster, row_limits(device).max_cluster);
}

}  // namespace

Status softmax(const SoftmaxParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kFrom = decltype(dtype)::value;
    constexpr DType kWide = DType::kFloat32;
    RowParams<SoftmaxParams> params{p, {}};
    Grid grid = split_rows(p.num_rows, p.vocab, device, {.cluster = ctas_of_row(p.vocab, device)},
                           &params.split);
    const bool is_held = params.split.part <= kHeldElements;
    if (is_held) grid.threads = dim3(kHeldThreads);
    grid.smem_bytes = 0;
    const auto run = [&](auto* held, auto* longer) {
      return launch(is_held ? held : longer, grid, device, stream, params);
    };
    return p.out_dtype == kWide
               ? run(held_softmax_kernel<kFrom, kWide>, long_softmax_kernel<kFrom, kWide>)
               : run(held_softmax_kernel<kFrom, kFrom>, long_softmax_kernel<kFrom, kFrom>);
  });
}

}  // namespace flashplan::cuda
