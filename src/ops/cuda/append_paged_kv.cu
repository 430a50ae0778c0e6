// SPDX-License-Identifier: Apache-2.0
// append_paged_kv() on CUDA: a copy whose rows land where the page table says. CTAs take tiles of
// tokens; a thread moves one column (a word of one head of k or v) of several tokens.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <span>

#include "abi/divisor.h"
#include "abi/params.h"
#include "common/error.h"
#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxTokens = 8;        // of a thread: words that are loaded before one is stored
constexpr int kMaxLanes = 32;        // threads side by side on one column
constexpr int64_t kManyCtas = 1024;  // about 8 for each SM of a large GPU: then threads do more
constexpr int kMaxTile = kMaxTokens * kMaxLanes;

/// k or v and its cache. Strides in bytes.
struct Side {
  const char* rows;
  int64_t token_stride;
  int64_t row_head_stride;
  char* cache;
  int64_t page_stride;
  int64_t row_stride;
  int64_t head_stride;
  int32_t columns_per_head = 1;
  float scale;    // stored = value / scale
  bool verbatim;  // as CPU: bits are kept, NaN and infinity too
};

struct AppendParams {
  Side sides[2];
  int32_t first_columns;  // of sides[0]
  int32_t num_columns;    // of all sides
  int32_t num_tokens;     // that they have memory for
  const int32_t* indptr;
  const int32_t* kv_lens;
  PageTable pages;
  int32_t num_pages;
  int32_t batch_size;
  int32_t width;              // threads on the columns of one token
  int32_t lanes;              // tokens side by side
  int32_t tokens_per_thread;  // one after the other
  int32_t tile;               // lanes * tokens_per_thread
};

/// Where a token goes. page < 0: nowhere.
struct Place {
  int32_t page;
  int32_t row_in_page;
};

/// Fills places[0, tile) for the tokens from `first` on; a barrier is still due.
__device__ void find_places(const AppendParams& p, int first, Place* places) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < p.tile; i += kThreads) places[i].page = -1;
  // The lengths are read from far away, so one round of loads by all threads finds the requests of
  // the tile: a binary search would be a chain of misses. A coarse round comes before it where
  // requests are more than threads.
  int base = 0;
  if (p.batch_size <= kThreads) {
    __syncthreads();
  } else {
    const int stride = (p.batch_size + kThreads - 1) / kThreads;
    const int probe = thread * stride;
    const int begun = __syncthreads_count(probe < p.batch_size && p.indptr[probe] <= first);
    base = max(begun - 1, 0) * stride;
  }
  const int num_tokens = min(p.tile, p.num_tokens - first);
  for (;; base += kThreads) {
    const int request = base + thread;
    int begin = 0;  // in the tile
    int end = 0;
    int shift = 0;    // key = shift + place in the tile
    int64_t ids = 0;  // index of the request's first page id
    if (request < p.batch_size) {
      ids = p.pages.indptr != nullptr ? p.pages.indptr[request] : request * p.pages.row_stride;
      const int end_of_request = p.indptr[request + 1];
      begin = max(p.indptr[request] - first, 0);
      end = min(end_of_request - first, num_tokens);
      shift = p.kv_lens[request] - end_of_request + first;
    }
    // A warp looks up the pages of each of its requests together.
    for (unsigned hits = __ballot_sync(~0U, begin < end); hits != 0; hits &= hits - 1) {
      const int source = __ffs(static_cast<int>(hits)) - 1;
      const int last = __shfl_sync(~0U, end, source);
      const int first_key = __shfl_sync(~0U, shift, source);
      const int64_t first_id = __shfl_sync(~0U, ids, source);
#pragma unroll 1
      for (int i = __shfl_sync(~0U, begin, source) + thread % 32; i < last; i += 32) {
        const int key = first_key + i;
        if (key < 0) continue;
        const Divisor& page_size = p.pages.page_size;
        const auto page_of_request =
            static_cast<int32_t>(quotient(static_cast<uint32_t>(key), page_size));
        const int32_t page = p.pages.ids[first_id + page_of_request];
        if (page < p.num_pages) places[i] = {page, key - page_of_request * page_size.value};
      }
    }
    if (base + kThreads >= p.batch_size || p.indptr[base + kThreads] - first >= num_tokens) return;
  }
}

template <DType kFrom, DType kTo, int kVec>
__device__ Word<kTo, kVec> convert(const Side& side, Word<kFrom, kVec> word) {
  if constexpr (kFrom == kTo) {
    if (side.verbatim) return word;
  }
  float values[kVec];
  unpack<kFrom, kVec>(word, values);
  for (float& value : values) value = __fdiv_rn(value, side.scale);
  return pack<kTo, kVec>(values);
}

template <DType kFrom, DType kTo, int kVec>
__global__ void __launch_bounds__(kThreads, 4)
    append_kernel(const __grid_constant__ AppendParams p) {
  using FromWord = Word<kFrom, kVec>;
  using ToWord = Word<kTo, kVec>;
  __shared__ Place places[kMaxTile];
  const int first = static_cast<int>(blockIdx.x) * p.tile;
  // In a CUDA graph k may have many more rows than there are tokens. Few rows are read regardless:
  // their loads and those of indptr are then under way together.
  if (p.tokens_per_thread > 1 && first >= p.indptr[p.batch_size]) return;

  const int lane = static_cast<int>(threadIdx.x) / p.width;
  const int column =
      static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x) - lane * p.width;
  const bool is_active = lane < p.lanes && column < p.num_columns;
  const bool is_second = column >= p.first_columns;
  const Side& side = p.sides[is_second];
  const int side_column = is_second ? column - p.first_columns : column;
  const int head = side_column / side.columns_per_head;
  const int word = side_column - head * side.columns_per_head;

  const char* from = side.rows + int64_t{first + lane} * side.token_stride +
                     head * side.row_head_stride + word * static_cast<int>(sizeof(FromWord));
  const int num_tokens = is_active ? p.num_tokens - first - lane : 0;
  FromWord words[kMaxTokens];
#pragma unroll
  for (int i = 0; i < kMaxTokens; ++i) {
    const int offset = i * p.lanes;
    if (i < p.tokens_per_thread && offset < num_tokens) {
      words[i] = __ldcs(reinterpret_cast<const FromWord*>(from + offset * side.token_stride));
    }
  }

  find_places(p, first, places);
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
        convert<kFrom, kTo, kVec>(side, words[i]);
  }
}

using Kernel = void (*)(AppendParams);

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

Side make_side(const TensorView& rows, const TensorView& cache, KvLayout layout, float scale) {
  const bool nhd = layout == KvLayout::kNHD;
  Side side{};
  side.rows = static_cast<const char*>(rows.data);
  side.token_stride = stride_bytes(rows, 0);
  side.row_head_stride = stride_bytes(rows, 1);
  side.cache = static_cast<char*>(cache.data);
  side.page_stride = stride_bytes(cache, 0);
  side.row_stride = stride_bytes(cache, nhd ? 1 : 2);
  side.head_stride = stride_bytes(cache, nhd ? 2 : 1);
  side.scale = scale;
  side.verbatim = rows.dtype == cache.dtype && scale == 1.0F;
  return side;
}

bool allows_words(const Side& side, int64_t head_dim, int elements, DType to) {
  const int to_bytes = elements * static_cast<int>(item_size(to));
  return head_dim % elements == 0 &&
         is_aligned(side.rows, 16, side.token_stride, side.row_head_stride) &&
         is_aligned(side.cache, to_bytes, side.page_stride, side.row_stride, side.head_stride);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// k or v of a call.
struct Half {
  const TensorView& rows;
  const TensorView& cache;
  float scale;
};

/// One launch for halves of the same dtypes.
Status append(const AppendTensors& t, std::span<const Half> halves, Stream stream) {
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
  const TensorView& rows = halves[0].rows;
  const TensorView& cache = halves[0].cache;
  const bool csr = t.block_table.empty();
  const Instance& instance = instance_for(rows.dtype, cache.dtype);

  AppendParams p{};
  bool by_word = true;
  int64_t num_tokens = kMaxRows;
  int64_t num_pages = kMaxRows;
  for (size_t i = 0; i < halves.size(); ++i) {
    const Half& half = halves[i];
    p.sides[i] = make_side(half.rows, half.cache, t.layout, half.scale);
    by_word = by_word &&
              allows_words(p.sides[i], half.rows.shape[2], instance.word_elements, cache.dtype);
    num_tokens = std::min(num_tokens, half.rows.shape[0]);
    num_pages = std::min(num_pages, half.cache.shape[0]);
  }
  const int64_t elements = by_word ? instance.word_elements : 1;
  for (size_t i = 0; i < halves.size(); ++i) {
    const int64_t columns_per_head = halves[i].rows.shape[2] / elements;
    const int64_t columns = rows.shape[1] * columns_per_head;
    p.sides[i].columns_per_head = std::max(static_cast<int32_t>(columns_per_head), 1);
    p.num_columns += static_cast<int32_t>(columns);
    if (i == 0) p.first_columns = p.num_columns;
  }
  p.num_tokens = static_cast<int32_t>(num_tokens);
  p.num_pages = static_cast<int32_t>(num_pages);
  p.batch_size = static_cast<int32_t>(t.kv_lens.shape[0]);
  if (p.num_tokens == 0 || p.batch_size == 0 || p.num_columns == 0) return {};
  p.indptr = static_cast<const int32_t*>(t.indptr.data);
  p.kv_lens = static_cast<const int32_t*>(t.kv_lens.data);
  p.pages.ids = static_cast<const int32_t*>(csr ? t.page_indices.data : t.block_table.data);
  p.pages.indptr = csr ? static_cast<const int32_t*>(t.page_indptr.data) : nullptr;
  p.pages.row_stride = csr ? 0 : t.block_table.stride[0];
  p.pages.page_size =
      make_divisor(static_cast<int32_t>(cache.shape[t.layout == KvLayout::kNHD ? 1 : 2]));

  p.width = std::min(p.num_columns, kThreads);
  p.lanes = std::min(kThreads / p.width, kMaxLanes);
  const int64_t column_blocks = ceil_div(p.num_columns, kThreads);
  const auto num_tiles = [&] { return ceil_div(num_tokens, p.lanes * p.tokens_per_thread); };
  p.tokens_per_thread = 1;
  while (p.tokens_per_thread < kMaxTokens && num_tiles() * column_blocks > kManyCtas) {
    p.tokens_per_thread *= 2;
  }
  p.tile = p.lanes * p.tokens_per_thread;
  const dim3 grid(static_cast<unsigned>(num_tiles()), static_cast<unsigned>(column_blocks));
  return launch(by_word ? instance.by_word : instance.by_element, {grid, kThreads}, cache.device,
                stream, p);
}

}  // namespace

Status append_paged_kv(const AppendTensors& t, Stream stream) noexcept {
  const Half halves[] = {{t.k, t.k_cache, t.k_scale}, {t.v, t.v_cache, t.v_scale}};
  if (t.k.dtype == t.v.dtype && t.k_cache.dtype == t.v_cache.dtype) {
    return append(t, halves, stream);
  }
  FLASHPLAN_RETURN_IF_ERROR(append(t, std::span(halves).first(1), stream));
  return append(t, std::span(halves).last(1), stream);
}

}  // namespace flashplan::cuda
