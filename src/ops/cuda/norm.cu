// SPDX-License-Identifier: Apache-2.0
// rmsnorm(), add_rmsnorm() and layernorm() on CUDA. The threads of a row keep it in registers from
// the sums to the result, so that it is read once. Only rows of more than kMaxThreads * kHeld words
// are read again.
#include <algorithm>
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kHeld = 4;           // words of a thread
constexpr int kMaxThreads = 1024;  // of a row
constexpr int kWarpRows = 8;       // rows of a CTA whose rows have one warp each

/// The threads of row y of the CTA are (x, y). Either each warp has a row, or the CTA has one row.
__device__ float sum_of_row(float value, float* partial) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0U, value, distance);
  }
  if (blockDim.x == 32) return value;
  const int thread = static_cast<int>(threadIdx.x);
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  if (thread % 32 == 0) partial[thread / 32] = value;
  __syncthreads();
  value = thread % 32 < num_warps ? partial[thread % 32] : 0.0F;
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0U, value, distance);
  }
  return value;
}

template <DType kDType, int kVec>
struct NormRow {
  using WordType = Word<kDType, kVec>;

  const NormParams& p;
  const WordType* x;
  WordType* residual;  // or null
  int num_words;

  /// Loads every blockDim.x-th word from `first` on; zeros behind the last one.
  __device__ void load(int first, float (&values)[kHeld][kVec]) const {
    WordType words[kHeld] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int word = first + i * static_cast<int>(blockDim.x);
      if (word < num_words) words[i] = (residual != nullptr ? residual : x)[word];
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) unpack<kDType, kVec>(words[i], values[i]);
  }

  /// Loads words for the first time: adds x to the residual, if there is one, and stores the sum.
  __device__ void load_and_add(int first, float (&values)[kHeld][kVec]) const {
    load(first, values);
    if (residual == nullptr) return;
    WordType words[kHeld] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int word = first + i * static_cast<int>(blockDim.x);
      if (word < num_words) words[i] = x[word];
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      float added[kVec];
      unpack<kDType, kVec>(words[i], added);
      for (int j = 0; j < kVec; ++j) values[i][j] += added[j];
      const WordType sum = pack<kDType, kVec>(values[i]);
      const int word = first + i * static_cast<int>(blockDim.x);
      if (word < num_words) residual[word] = sum;
      unpack<kDType, kVec>(sum, values[i]);  // the rounded sum
    }
  }
};

/// The sum of (value - mean), or of its square, over the words inside the row.
template <int kVec, bool kSquared>
__device__ float add_up(const float (&values)[kHeld][kVec], float mean, int first, int num_words) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * static_cast<int>(blockDim.x) >= num_words) continue;
    for (int j = 0; j < kVec; ++j) {
      const float value = values[i][j] - mean;
      sum += kSquared ? value * value : value;
    }
  }
  return sum;
}

template <DType kDType, int kVec>
__global__ void __launch_bounds__(kMaxThreads) norm_kernel(const __grid_constant__ NormParams p) {
  using WordType = Word<kDType, kVec>;
  __shared__ float partial[2][32];
  const auto index = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  if (index >= p.num_rows) return;  // whole warps, and only where a row has one
  const int thread = static_cast<int>(threadIdx.x);
  const NormRow<kDType, kVec> row{
      p, reinterpret_cast<const WordType*>(row_at(p.x, index)),
      p.residual.data == nullptr ? nullptr : reinterpret_cast<WordType*>(row_at(p.residual, index)),
      p.row_size / kVec};
  const int step = static_cast<int>(blockDim.x) * kHeld;
  const bool is_held = row.num_words <= step;

  float values[kHeld][kVec];
  float sum = 0.0F;
  float squares = 0.0F;
  for (int first = thread; first < row.num_words || first == thread; first += step) {
    row.load_and_add(first, values);
    if (p.centered)
      sum += add_up<kVec, false>(values, 0.0F, first, row.num_words);
    else
      squares += add_up<kVec, true>(values, 0.0F, first, row.num_words);
  }
  const auto size = static_cast<float>(p.row_size);
  float mean = 0.0F;
  if (p.centered) {
    mean = sum_of_row(sum, partial[0]) / size;
    for (int first = thread; first < row.num_words || first == thread; first += step) {
      if (!is_held) row.load(first, values);
      squares += add_up<kVec, true>(values, mean, first, row.num_words);
    }
  }
  const float factor = rsqrtf(sum_of_row(squares, partial[1]) / size + p.eps);

  auto* out = reinterpret_cast<WordType*>(row_at(p.out, index));
  const auto* weights = static_cast<const WordType*>(p.weight);
  const auto* biases = static_cast<const WordType*>(p.bias);
  for (int first = thread; first < row.num_words; first += step) {
    if (!is_held) row.load(first, values);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int word = first + i * static_cast<int>(blockDim.x);
      if (word >= row.num_words) break;
      float weight[kVec];
      float bias[kVec] = {};
      unpack<kDType, kVec>(__ldg(weights + word), weight);
      if (biases != nullptr) unpack<kDType, kVec>(__ldg(biases + word), bias);
      for (int j = 0; j < kVec; ++j) {
        values[i][j] = (values[i][j] - mean) * factor * (weight[j] + p.weight_offset) + bias[j];
      }
      out[word] = pack<kDType, kVec>(values[i]);
    }
  }
}

/// For many rows, as few threads as can hold a row, so that each has many loads in flight. For few
/// rows, one thread for each word, since nothing else hides the latency of memory.
Grid make_grid(int32_t num_rows, int32_t num_words) {
  constexpr int kManyRows = 1024;
  const int words_of_thread = num_rows >= kManyRows ? kHeld : 1;
  const int wanted = (num_words + words_of_thread - 1) / words_of_thread;
  const int threads = std::clamp((wanted + 31) / 32 * 32, 32, kMaxThreads);
  const int rows = threads == 32 ? kWarpRows : 1;
  return {.ctas = dim3(static_cast<unsigned>((num_rows + rows - 1) / rows)),
          .threads = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows))};
}

}  // namespace

Status norm(const NormParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    constexpr int kVec = kWordElements<kDType>;
    const bool by_word = p.row_size % kVec == 0 && is_aligned(p.x, 16) && is_aligned(p.out, 16) &&
                         is_aligned(p.residual, 16) && is_aligned(p.weight, 16) &&
                         is_aligned(p.bias, 16);
    return launch(by_word ? norm_kernel<kDType, kVec> : norm_kernel<kDType, 1>,
                  make_grid(p.num_rows, p.row_size / (by_word ? kVec : 1)), device, stream, p);
  });
}

}  // namespace flashplan::cuda
