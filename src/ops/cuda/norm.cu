// SPDX-License-Identifier: Apache-2.0
// rmsnorm(), add_rmsnorm() and layernorm() on CUDA. The threads of a row keep it in registers from
// the sums to the result, so that it is read once. Only rows of more than kMaxThreads * kHeld words
// are read again.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/pdl.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kHeld = 4;             // words of a row that a thread keeps in registers
constexpr int kMaxThreads = 1024;    // threads of a row, at most
constexpr int kSharedThreads = 256;  // threads of a CTA that has several rows

/// Adds the values of the threads of a row. Threads (x, y) of the CTA work on its row y. A CTA of
/// one row may have many warps; if it has several rows, each has 1, 2, 4, 8, 16 or 32 threads.
__device__ float sum_of_row(float value, float* partial) {
  const int size = static_cast<int>(blockDim.x);
  for (int distance = 16; distance > 0; distance /= 2) {
    if (distance < size) value += __shfl_xor_sync(~0U, value, distance);
  }
  if (size <= 32) return value;
  const int thread = static_cast<int>(threadIdx.x);
  const int num_warps = size / 32;
  if (thread % 32 == 0) partial[thread / 32] = value;
  __syncthreads();
  value = thread % 32 < num_warps ? partial[thread % 32] : 0.0F;
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0U, value, distance);
  }
  return value;
}

/// Loads the words of a row. Threads keep words, not values: as float32, 16-bit values would take
/// twice as many registers, and an SM could load fewer rows at the same time.
template <DType kDType, int kVec>
struct NormRow {
  using WordType = Word<kDType, kVec>;

  const WordType* x;
  WordType* residual;  // null: there is none
  int num_words;

  /// Loads every blockDim.x-th word from `first` on. Words behind the end of the row are zeros.
  __device__ void load(const WordType* from, int first, WordType (&words)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int word = first + i * static_cast<int>(blockDim.x);
      words[i] = word < num_words ? from[word] : WordType{};
    }
  }
  __device__ void load_again(int first, WordType (&words)[kHeld]) const {
    load(residual != nullptr ? residual : x, first, words);
  }

  /// Loads words for the first time: adds x to the residual, if there is one, and stores the sum.
  /// All loads are on their way before one is waited for.
  __device__ void load_and_add(int first, WordType (&words)[kHeld]) const {
    load(x, first, words);
    if (residual == nullptr) return;
    WordType before[kHeld];
    load(residual, first, before);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      float values[kVec];
      float added[kVec];
      unpack<kDType, kVec>(before[i], values);
      unpack<kDType, kVec>(words[i], added);
      for (int j = 0; j < kVec; ++j) values[j] += added[j];
      words[i] = pack<kDType, kVec>(values);  // the rounded sum
      const int word = first + i * static_cast<int>(blockDim.x);
      if (word < num_words) residual[word] = words[i];
    }
  }

  /// The sum of (value - mean), or of its square, over the words inside the row.
  template <bool kSquared>
  __device__ float add_up(const WordType (&words)[kHeld], float mean, int first) const {
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * static_cast<int>(blockDim.x) >= num_words) continue;
      float values[kVec];
      unpack<kDType, kVec>(words[i], values);
      for (int j = 0; j < kVec; ++j) {
        const float value = values[j] - mean;
        sum += kSquared ? value * value : value;
      }
    }
    return sum;
  }
};

enum class Weights {
  kLikeRows,  // weights have the dtype of rows
  kFloat32,   // weights are float32, and rows have 16 bits
  kNone,
};

/// Loads kVec float32 numbers. If kVec > 1, they must be aligned to 16 bytes.
template <int kVec>
__device__ void load_floats(const float* from, float (&to)[kVec]) {
  if constexpr (kVec == 1) {
    to[0] = __ldg(from);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; i += 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from + i));
      to[i] = four.x;
      to[i + 1] = four.y;
      to[i + 2] = four.z;
      to[i + 3] = four.w;
    }
  }
}

/// Divides results by their scale, whose inverse is given, and stores them in the dtype of `out`.
template <DType kDType, int kVec>
__device__ void store_scaled(const NormParams& p, char* out, int word, float inverse,
                             float (&values)[kVec]) {
  for (int j = 0; j < kVec; ++j) values[j] *= inverse;
  if (p.out_dtype == kDType) {
    reinterpret_cast<Word<kDType, kVec>*>(out)[word] = pack<kDType, kVec>(values);
    return;
  }
  auto* narrow = reinterpret_cast<Word<DType::kFloat8E4M3, kVec>*>(out) + word;
  *narrow = p.out_dtype == DType::kFloat8E4M3 ? pack<DType::kFloat8E4M3, kVec>(values)
                                              : pack<DType::kFloat8E5M2, kVec>(values);
}

/// kIsScaled: results are divided by a scale, or narrowed. Results that need neither have kernels
/// of their own, which have no registers left for a scale.
template <DType kDType, int kVec, Weights kWeights, bool kIsScaled>
__global__ void __launch_bounds__(kMaxThreads) norm_kernel(const __grid_constant__ NormParams p) {
  using WordType = Word<kDType, kVec>;
  __shared__ float partial[2][32];
  wait_for_kernels_before();
  const unsigned place = blockIdx.x * blockDim.y + threadIdx.y;
  const bool has_row = place < static_cast<unsigned>(p.num_rows);
  const int index = has_row ? static_cast<int>(place) : p.num_rows - 1;
  const int thread = static_cast<int>(threadIdx.x);
  const NormRow<kDType, kVec> row{
      reinterpret_cast<const WordType*>(row_at(p.x, index)),
      p.residual.data == nullptr ? nullptr : reinterpret_cast<WordType*>(row_at(p.residual, index)),
      has_row ? p.row_size / kVec : 0};  // threads without a row take part in sum_of_row()
  const int step = static_cast<int>(blockDim.x) * kHeld;
  const bool is_held = row.num_words <= step;

  WordType words[kHeld];
  float sum = 0.0F;
  float squares = 0.0F;
  for (int first = thread; first < row.num_words || first == thread; first += step) {
    row.load_and_add(first, words);
    if (p.centered)
      sum += row.template add_up<false>(words, 0.0F, first);
    else
      squares += row.template add_up<true>(words, 0.0F, first);
  }
  // Weights are loaded before the sums, whose shuffles hide the latency of memory. Weights of
  // float32 beside rows of 16 bits would take twice the registers of a row, so they are loaded when
  // they are used.
  constexpr bool kHoldsWeights = kWeights == Weights::kLikeRows;
  const auto* weights = static_cast<const WordType*>(p.weight);
  WordType weight_words[kHeld];
  if constexpr (kHoldsWeights) row.load(weights, thread, weight_words);
  const auto size = static_cast<float>(p.row_size);
  float mean = 0.0F;
  if (p.centered) {
    mean = sum_of_row(sum, partial[0]) / size;
    for (int first = thread; first < row.num_words || first == thread; first += step) {
      if (!is_held) row.load_again(first, words);
      squares += row.template add_up<true>(words, mean, first);
    }
  }
  const float factor = rsqrtf(sum_of_row(squares, partial[1]) / size + p.eps);

  char* out = row_at(p.out, index);
  float inverse = 1.0F;
  if constexpr (kIsScaled) {
    inverse = __frcp_rn(p.scales == nullptr ? p.scale : p.scale * *p.scales);
  }
  const auto* float_weights = static_cast<const float*>(p.weight);
  for (int first = thread; first < row.num_words; first += step) {
    if (!is_held) {
      row.load_again(first, words);
      if constexpr (kHoldsWeights) row.load(weights, first, weight_words);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int word = first + i * static_cast<int>(blockDim.x);
      if (word >= row.num_words) break;
      float values[kVec];
      float weight[kVec];
      float bias[kVec] = {};
      unpack<kDType, kVec>(words[i], values);
      if constexpr (kHoldsWeights) unpack<kDType, kVec>(weight_words[i], weight);
      if constexpr (kWeights == Weights::kFloat32) load_floats(float_weights + word * kVec, weight);
      if (p.bias != nullptr) {
        if constexpr (kWeights == Weights::kFloat32) {
          load_floats(static_cast<const float*>(p.bias) + word * kVec, bias);
        } else {
          unpack<kDType, kVec>(__ldg(static_cast<const WordType*>(p.bias) + word), bias);
        }
      }
      for (int j = 0; j < kVec; ++j) {
        values[j] = (values[j] - mean) * factor;
        if constexpr (kWeights != Weights::kNone) values[j] *= weight[j] + p.weight_offset;
        values[j] += bias[j];
      }
      if constexpr (kIsScaled) {
        store_scaled<kDType, kVec>(p, out, word, inverse, values);
      } else {
        reinterpret_cast<WordType*>(out)[word] = pack<kDType, kVec>(values);
      }
    }
  }
}

/// Many rows get as few threads each as can hold a row, so that each thread has many loads in
/// flight. Few rows get a thread for each word, since nothing else hides the latency of memory.
/// Rows of up to 16 words share a warp.
Grid make_grid(int32_t num_rows, int32_t num_words) {
  constexpr int kManyRows = 1024;
  const int words_of_thread = num_rows >= kManyRows ? kHeld : 1;
  const int wanted = (num_words + words_of_thread - 1) / words_of_thread;
  const int whole_warps = std::clamp((wanted + 31) / 32 * 32, 32, kMaxThreads);
  const auto threads = num_words <= 16 ? std::bit_ceil(static_cast<unsigned>(num_words))
                                       : static_cast<unsigned>(whole_warps);
  const unsigned rows = threads <= 32 ? kSharedThreads / threads : 1;
  return {.ctas = dim3((static_cast<unsigned>(num_rows) + rows - 1) / rows),
          .threads = dim3(threads, rows)};
}

template <DType kDType, Weights kWeights>
Status run(const NormParams& p, Device device, Stream stream) {
  constexpr int kVec = kWordElements<kDType>;
  const bool is_narrow = p.out_dtype != kDType;
  const bool is_scaled = is_narrow || p.scale != 1.0F || p.scales != nullptr;
  const bool by_word = p.row_size % kVec == 0 && is_aligned(p.x, 16) &&
                       is_aligned(p.out, is_narrow ? kVec : 16) && is_aligned(p.residual, 16) &&
                       is_aligned(p.weight, 16) && is_aligned(p.bias, 16);
  const auto choose = [&](auto scaled) {
    constexpr bool kIsScaled = decltype(scaled)::value;
    return by_word ? norm_kernel<kDType, kVec, kWeights, kIsScaled>
                   : norm_kernel<kDType, 1, kWeights, kIsScaled>;
  };
  Grid grid = make_grid(p.num_rows, p.row_size / (by_word ? kVec : 1));
  grid.pdl = p.pdl && can_wait(device);
  return launch(is_scaled ? choose(std::true_type()) : choose(std::false_type()), grid, device,
                stream, p);
}

}  // namespace

Status norm(const NormParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    if (p.weight == nullptr) return run<kDType, Weights::kNone>(p, device, stream);
    if constexpr (kDType != DType::kFloat32) {
      if (p.weight_dtype != kDType) return run<kDType, Weights::kFloat32>(p, device, stream);
    }
    return run<kDType, Weights::kLikeRows>(p, device, stream);
  });
}

}  // namespace flashplan::cuda
