// SPDX-License-Identifier: Apache-2.0
// append_paged_kv() on CUDA: a copy whose rows land where the page table says. CTAs take tiles of
// tokens; a thread moves one column (a word of one head of k or v) of several tokens.
#include <algorithm>
#include <cstdint>
#include <iterator>

#include "common/error.h"
#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/paged_cache.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 256;
// A thread loads the words of this many tokens at most before it stores one.
constexpr int kMaxTokens = 8;
constexpr int kMaxLanes = 32;  // tokens that the threads of a CTA move side by side
// Each thread gets more tokens, up to kMaxTokens, until a grid has at most this many CTAs: about 8
// for each SM of a large GPU.
constexpr int64_t kManyCtas = 1024;
constexpr int kMaxTile = kMaxTokens * kMaxLanes;

struct KernelParams {
  AppendParams append;
  int32_t columns_per_head[2];
  int32_t first_columns;      // columns of sides[0]
  int32_t num_columns;        // columns of sides[0] and sides[1]
  int32_t width;              // threads that share the columns of one token
  int32_t lanes;              // tokens that a CTA moves side by side
  int32_t tokens_per_thread;  // tokens that a thread moves one after the other
  int32_t tile;               // tokens of a CTA: lanes * tokens_per_thread
};

template <DType kFrom, DType kTo, int kVec>
__global__ void __launch_bounds__(kThreads, 4)
    append_kernel(const __grid_constant__ KernelParams p) {
  using FromWord = Word<kFrom, kVec>;
  using ToWord = Word<kTo, kVec>;
  __shared__ Place places[kMaxTile];
  const int first = static_cast<int>(blockIdx.x) * p.tile;
  // In a CUDA graph k may have many more rows than the batch has tokens. If each thread moves
  // several tokens, CTAs without tokens end here. If it moves one, no CTA reads indptr here, since
  // each thread would wait for indptr before it loads its row.
  const TokenPlaces& tokens = p.append.places;
  if (p.tokens_per_thread > 1 && tokens.by_lengths() && first >= tokens.indptr[tokens.batch_size]) {
    return;
  }

  const int lane = static_cast<int>(threadIdx.x) / p.width;
  const int column =
      static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x) - lane * p.width;
  const bool is_active = lane < p.lanes && column < p.num_columns;
  const bool is_second = column >= p.first_columns;
  const AppendSide& side = p.append.sides[is_second];
  const int side_column = is_second ? column - p.first_columns : column;
  const int head = side_column / p.columns_per_head[is_second];
  const int word = side_column - head * p.columns_per_head[is_second];

  const char* from = side.rows + int64_t{first + lane} * side.token_stride +
                     head * side.row_head_stride + word * static_cast<int>(sizeof(FromWord));
  const int num_tokens = is_active ? p.append.num_rows - first - lane : 0;
  const float scale = is_active ? side.scale_of(head) : 1.0F;
  FromWord words[kMaxTokens];
#pragma unroll
  for (int i = 0; i < kMaxTokens; ++i) {
    const int offset = i * p.lanes;
    if (i < p.tokens_per_thread && offset < num_tokens) {
      words[i] = __ldcs(reinterpret_cast<const FromWord*>(from + offset * side.token_stride));
    }
  }

  find_places<kThreads>(tokens, first, p.append.num_rows, p.tile, places);
  __syncthreads();
  if (!is_active) return;
  char* to = side.cache + head * side.head_stride + word * static_cast<int>(sizeof(ToWord));
#pragma unroll
  for (int i = 0; i < kMaxTokens; ++i) {
    if (i >= p.tokens_per_thread) return;
    const Place place = places[lane + i * p.lanes];
    if (place.page < 0) continue;
    *reinterpret_cast<ToWord*>(to + place.page * side.page_stride +
                               place.row_in_page * side.row_stride) =
        stored<kFrom, kTo, kVec>(side, scale, words[i]);
  }
}

using Kernel = void (*)(KernelParams);

struct Instance {
  DType from;
  DType to;
  int word_elements;
  Kernel by_word;
  Kernel by_element;
};

template <DType kFrom, DType kTo>
constexpr Instance kInstance{kFrom, kTo, kWordElements<kFrom>,
                             &append_kernel<kFrom, kTo, kWordElements<kFrom>>,
                             &append_kernel<kFrom, kTo, 1>};

constexpr Instance kInstances[] = {
    kInstance<DType::kFloat32, DType::kFloat32>,
    kInstance<DType::kFloat16, DType::kFloat16>,
    kInstance<DType::kBFloat16, DType::kBFloat16>,
    kInstance<DType::kFloat8E4M3, DType::kFloat8E4M3>,
    kInstance<DType::kFloat8E5M2, DType::kFloat8E5M2>,
    kInstance<DType::kFloat32, DType::kFloat8E4M3>,
    kInstance<DType::kFloat16, DType::kFloat8E4M3>,
    kInstance<DType::kBFloat16, DType::kFloat8E4M3>,
    kInstance<DType::kFloat32, DType::kFloat8E5M2>,
    kInstance<DType::kFloat16, DType::kFloat8E5M2>,
    kInstance<DType::kBFloat16, DType::kFloat8E5M2>,
};

/// The kernel of a pair of dtypes that the caller has checked.
const Instance& instance_for(DType from, DType to) {
  const auto* const last = std::end(kInstances) - 1;
  return *std::find_if(std::begin(kInstances), last,
                       [&](const Instance& i) { return i.from == from && i.to == to; });
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Appends by one launch: keys and values, if their dtypes are equal, or the only side with heads.
Status launch_sides(const AppendParams& append, Device device, Stream stream) {
  const AppendSide& first = append.sides[append.sides[0].num_heads == 0 ? 1 : 0];
  const Instance& instance = instance_for(first.dtype, first.cache_dtype);
  KernelParams p{};
  p.append = append;
  bool by_word = true;
  for (const AppendSide& side : append.sides) {
    by_word = by_word && (side.num_heads == 0 || allows_words(side, instance.word_elements));
  }
  const int32_t elements = by_word ? instance.word_elements : 1;
  for (int i = 0; i < 2; ++i) {
    const AppendSide& side = append.sides[i];
    p.columns_per_head[i] = std::max(side.head_dim / elements, 1);
    p.num_columns += side.num_heads * (side.head_dim / elements);
    if (i == 0) p.first_columns = p.num_columns;
  }
  if (p.num_columns == 0) return {};

  p.width = std::min(p.num_columns, kThreads);
  p.lanes = std::min(kThreads / p.width, kMaxLanes);
  const int64_t column_blocks = ceil_div(p.num_columns, kThreads);
  const auto num_tiles = [&] { return ceil_div(append.num_rows, p.lanes * p.tokens_per_thread); };
  p.tokens_per_thread = 1;
  while (p.tokens_per_thread < kMaxTokens && num_tiles() * column_blocks > kManyCtas) {
    p.tokens_per_thread *= 2;
  }
  p.tile = p.lanes * p.tokens_per_thread;
  const dim3 grid(static_cast<unsigned>(num_tiles()), static_cast<unsigned>(column_blocks));
  return launch(by_word ? instance.by_word : instance.by_element, {grid, kThreads}, device, stream,
                p);
}

}  // namespace

Status append_paged_kv(const AppendParams& p, Device device, Stream stream) noexcept {
  const AppendSide& k = p.sides[0];
  const AppendSide& v = p.sides[1];
  if (k.dtype == v.dtype && k.cache_dtype == v.cache_dtype) return launch_sides(p, device, stream);
  AppendParams one = p;
  one.sides[1].num_heads = 0;
  FLASHPLAN_RETURN_IF_ERROR(launch_sides(one, device, stream));
  one.sides[1] = v;
  one.sides[0].num_heads = 0;
  return launch_sides(one, device, stream);
}

}  // namespace flashplan::cuda
