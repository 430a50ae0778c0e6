// SPDX-License-Identifier: Apache-2.0
// merge_states() on CUDA: one pass over all states, whatever their number. A CTA has whole rows
// (token, head). A thread merges every kThreads-th column of a row; a column is a word of o.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/error.h"
#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxListed = 64;  // states that fit into the 4 KB of a kernel's argument
constexpr int kGroup = 4;       // states whose words a thread loads at once

/// The rows of a state. Strides of o are in bytes, strides of lse in elements.
struct StateRows {
  char* o;
  float* lse;
  int64_t o_token_stride;
  int64_t o_head_stride;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
};

/// States are listed one by one or, if `stacked`, given by listed[0] and the steps from each state
/// to the next.
struct MergeParams {
  StateRows listed[kMaxListed];
  StateRows out;
  int64_t o_step;
  int64_t lse_step;
  int64_t num_rows;
  int32_t num_heads;
  int32_t num_states;
  int32_t num_columns;
  float ln_base;  // the natural logarithm of the base of lse
  bool stacked;
};
static_assert(sizeof(MergeParams) <= 4096);

/// One row (token, head) of every state.
struct Row {
  const MergeParams& p;
  int64_t token;
  int64_t head;

  __device__ const StateRows& state(int i) const { return p.listed[p.stacked ? 0 : i]; }
  __device__ float lse(int i) const {
    const StateRows& s = state(i);
    return s.lse[i * p.lse_step + token * s.lse_token_stride + head * s.lse_head_stride];
  }
  __device__ const char* o(int i) const {
    const StateRows& s = state(i);
    return s.o + i * p.o_step + token * s.o_token_stride + head * s.o_head_stride;
  }
};

/// Loads the words of states [begin, begin + kGroup) at one column.
template <class WordType>
__device__ void load_group(const Row& row, int column, int begin, WordType (&words)[kGroup]) {
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    if (begin + j >= row.p.num_states) return;
    words[j] = __ldcs(reinterpret_cast<const WordType*>(row.o(begin + j)) + column);
  }
}

template <DType kDType, int kVec>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeParams p) {
  using WordType = Word<kDType, kVec>;
  const int width = min(p.num_columns, kThreads);
  const int row_in_cta = static_cast<int>(threadIdx.x) / width;
  const int first_column = static_cast<int>(threadIdx.x) - row_in_cta * width;
  const int64_t index = int64_t{blockIdx.x} * (kThreads / width) + row_in_cta;
  const bool is_active = row_in_cta < kThreads / width && index < p.num_rows;
  const Row row{p, index / p.num_heads, index % p.num_heads};
  const float minus_infinity = -INFINITY;
  float largest = minus_infinity;  // fmaxf() ignores NaN; an lse of NaN makes the total NaN
  float total = 0.0F;

  if (is_active) {
    WordType words[kGroup];
    // These loads are in flight while the loop below loads lse.
    load_group(row, first_column, 0, words);
#pragma unroll kGroup
    for (int i = 0; i < p.num_states; ++i) largest = fmaxf(largest, row.lse(i));
#pragma unroll kGroup
    for (int i = 0; i < p.num_states; ++i) {
      const float lse = row.lse(i);
      if (lse != minus_infinity) total += expf((lse - largest) * p.ln_base);
    }
    for (int column = first_column; column < p.num_columns; column += width) {
      float sum[kVec] = {};
      for (int begin = 0; begin < p.num_states; begin += kGroup) {
        if (begin > 0 || column != first_column) load_group(row, column, begin, words);
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          if (begin + j >= p.num_states) break;
          const float lse = row.lse(begin + j);
          if (lse == minus_infinity) continue;  // its o may be anything
          const float weight = expf((lse - largest) * p.ln_base) / total;
          float values[kVec];
          unpack<kDType, kVec>(words[j], values);
          for (int d = 0; d < kVec; ++d) sum[d] += weight * values[d];
        }
      }
      char* to = p.out.o + row.token * p.out.o_token_stride + row.head * p.out.o_head_stride;
      reinterpret_cast<WordType*>(to)[column] = pack<kDType, kVec>(sum);
    }
  }
  // out.lse may be the lse of a state, which all threads of the row have read by now.
  __syncthreads();
  if (is_active && first_column == 0) {
    p.out.lse[row.token * p.out.lse_token_stride + row.head * p.out.lse_head_stride] =
        total == 0.0F ? minus_infinity : largest + logf(total) / p.ln_base;  // NaN if total is NaN
  }
}

using Kernel = void (*)(MergeParams);

struct Instance {
  int word_elements;
  Kernel by_word;
  Kernel by_element;
};

template <DType kDType>
constexpr Instance kInstance{kWordElements<kDType>, &merge_kernel<kDType, kWordElements<kDType>>,
                             &merge_kernel<kDType, 1>};

StateRows make_rows(const AttentionState& state) {
  StateRows rows{};
  rows.o = static_cast<char*>(state.o.data);
  rows.lse = static_cast<float*>(state.lse.data);
  rows.o_token_stride = stride_bytes(state.o, 0);
  rows.o_head_stride = stride_bytes(state.o, 1);
  rows.lse_token_stride = state.lse.stride[0];
  rows.lse_head_stride = state.lse.stride[1];
  return rows;
}

/// Whether the states are slices of one tensor; if so, writes the steps between them.
bool find_steps(const AttentionState* states, int32_t num_states, MergeParams* p) {
  const StateRows first = make_rows(states[0]);
  const StateRows second = make_rows(states[1]);
  p->o_step = second.o - first.o;
  p->lse_step = second.lse - first.lse;
  for (int32_t i = 1; i < num_states; ++i) {
    const StateRows rows = make_rows(states[i]);
    const bool fits =
        rows.o == first.o + i * p->o_step && rows.lse == first.lse + i * p->lse_step &&
        rows.o_token_stride == first.o_token_stride && rows.o_head_stride == first.o_head_stride &&
        rows.lse_token_stride == first.lse_token_stride &&
        rows.lse_head_stride == first.lse_head_stride;
    if (!fits) return false;
  }
  return true;
}

bool allows_words(const StateRows& rows) {
  return is_aligned(rows.o, 16, rows.o_token_stride, rows.o_head_stride);
}

}  // namespace

Status merge_states(const AttentionState* states, int32_t num_states, const AttentionState& out,
                    float ln_base, Stream stream) noexcept {
  const TensorView& o = out.o;
  MergeParams p{};
  p.stacked = num_states > kMaxListed;
  if (p.stacked && !find_steps(states, num_states, &p)) {
    return error(StatusCode::kUnsupported,
                 "o: expected at most %d states or slices of one tensor on %s, got %d states",
                 kMaxListed, to_string(o.device).text, num_states);
  }
  p.out = make_rows(out);
  Instance instance{};
  FLASHPLAN_RETURN_IF_ERROR(with_float(o.dtype, [&](auto dtype) -> Status {
    instance = kInstance<decltype(dtype)::value>;
    return {};
  }));
  bool by_word =
      o.shape[2] % instance.word_elements == 0 && allows_words(p.out) && p.o_step % 16 == 0;
  for (int32_t i = 0; i < (p.stacked ? 1 : num_states); ++i) {
    p.listed[i] = make_rows(states[i]);
    by_word = by_word && allows_words(p.listed[i]);
  }
  p.num_rows = o.shape[0] * o.shape[1];
  p.num_heads = static_cast<int32_t>(o.shape[1]);
  p.num_states = num_states;
  p.ln_base = ln_base;
  p.num_columns = static_cast<int32_t>(o.shape[2] / (by_word ? instance.word_elements : 1));
  if (p.num_rows == 0 || p.num_columns == 0) return {};

  const int64_t rows_of_cta = kThreads / std::min(p.num_columns, kThreads);
  const dim3 grid(static_cast<unsigned>((p.num_rows + rows_of_cta - 1) / rows_of_cta));
  return launch(by_word ? instance.by_word : instance.by_element, {grid, kThreads}, o.device,
                stream, p);
}

}  // namespace flashplan::cuda
