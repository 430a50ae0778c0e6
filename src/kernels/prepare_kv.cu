// SPDX-License-Identifier: Apache-2.0
#include "kernels/prepare_kv.h"

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/error.h"
#include "cuda/device.h"
#include "cuda/launch_kernel.h"
#include "kernels/device/element.h"
#include "kernels/device/kv_loader.h"
#include "kernels/device/rotation.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerSm = 4;
constexpr int kThreadsPerRow = 8;
constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
constexpr int kChunkDims = 8;  // of 16 bytes
constexpr int kBlockChunks = 8;

/// What a thread takes of a row at once.
enum class Unit {
  kChunk,        // 8 dims that are not rotated
  kTurnedChunk,  // 8 dims that are pairs of neighbours
  kTwoChunks,    // 8 pairs of dims of both halves
  kElement       // single dims, where rows are not aligned or pairs do not divide into chunks
};

struct PrepareParams {
  PreparedKv prepared = {};
  KvView k = {};
  KvView v = {};
  PageTable pages = {};
  const Segment* segments = nullptr;
  const int32_t* kv_lens = nullptr;
  int32_t head_dim_qk = 0;
  int32_t head_dim_vo = 0;
  int32_t rotary_dim = 0;  // 0: no rotation
  bool interleaved = false;
  float gain = 1.0F;
  uint64_t turns[kMaxRotaryDim / 2] = {};  // in 2^-64 of a turn
};

/// A key or value, for the threads that prepare it.
struct Row {
  const unsigned char* from;  // of the first head
  int64_t head_stride;        // in bytes
  unsigned char* tile;        // of the first head
  int32_t tile_bytes;         // of a head
  int32_t num_dims;
  int32_t num_chunks;  // in the tile, dims of padding included
  int32_t position;
  int32_t row_in_tile;
  bool exists;  // else it becomes zeros
};

__device__ Row find_row(const PrepareParams& p, bool is_key, int32_t tile, int32_t row_in_tile) {
  const KvView& view = is_key ? p.k : p.v;
  const int32_t request = p.prepared.requests[tile];
  const Segment segment = p.segments[request];
  int32_t kv_len = segment.position + segment.qo_len;
  if (p.kv_lens != nullptr) kv_len = min(kv_len, p.kv_lens[request]);
  const int32_t position =
      (tile - p.prepared.first_tiles[request]) * p.prepared.tile_kv + row_in_tile;
  const int32_t tile_bytes = is_key ? p.prepared.key_bytes : p.prepared.value_bytes;
  unsigned char* const tiles = is_key ? p.prepared.keys : p.prepared.values;
  Row row = {nullptr,
             2 * view.head_stride,
             tiles + int64_t{tile} * p.prepared.num_kv_heads * tile_bytes,
             tile_bytes,
             is_key ? p.head_dim_qk : p.head_dim_vo,
             tile_bytes / p.prepared.tile_kv / 16,
             position,
             row_in_tile,
             position < kv_len};
  if (!row.exists) return row;
  int64_t page = 0;
  int64_t in_page = segment.kv_row + int64_t{position};
  if (p.pages.ids != nullptr) {
    const auto number =
        static_cast<int32_t>(quotient(static_cast<uint32_t>(position), p.pages.page_size));
    const int32_t id = device::page_ids(p.pages, segment.kv_row)[number];
    row.exists = 0 <= id && id < p.prepared.num_pages;
    page = id;
    in_page = position - number * p.pages.page_size.value;
  }
  row.from = static_cast<const unsigned char*>(view.data) +
             2 * (page * view.page_stride + in_page * view.token_stride);
  return row;
}

/// Where a chunk of the row is in the tile of a head: the same as WgmmaTile::offset() for blocks of
/// 8 rows.
__device__ uint32_t offset(const Row& row, int chunk) {
  const int32_t r = row.row_in_tile;
  const int32_t block = r / 8 * (row.num_chunks / kBlockChunks) + chunk / kBlockChunks;
  return static_cast<uint32_t>(block * 1024 + r % 8 * 128 + (chunk ^ r) % 8 * 16);
}

__device__ float2 turn_of(const PrepareParams& p, int pair, int32_t position) {
  return device::rotor(device::angle_of(p.turns[pair], position), p.gain);
}

/// One dim of a row, rotated.
template <DType kDType>
__device__ float element(const PrepareParams& p, const uint16_t* row, int dim, int rotary_dim,
                         int32_t position) {
  const auto load = [&](int d) { return device::Element<kDType>::unpack(row[d]).x; };
  if (dim >= rotary_dim) return load(dim);
  const int half = rotary_dim / 2;
  const int pair = p.interleaved ? dim / 2 : dim % half;
  const bool is_second = p.interleaved ? dim % 2 != 0 : dim >= half;
  float first = load(p.interleaved ? 2 * pair : pair);
  float second = load(p.interleaved ? 2 * pair + 1 : pair + half);
  device::rotate(first, second, turn_of(p, pair, position));
  return is_second ? second : first;
}

/// Two chunks, of which units of one chunk use the first.
struct Chunks {
  uint4 first;
  uint4 second;
};

template <DType kDType, Unit kUnit>
__device__ void turn(Chunks& x, const float2* turns) {
  uint4& a = x.first;
  uint4& b = x.second;
  if constexpr (kUnit == Unit::kTurnedChunk) {
    a = {device::rotated_pair<kDType>(a.x, turns[0]), device::rotated_pair<kDType>(a.y, turns[1]),
         device::rotated_pair<kDType>(a.z, turns[2]), device::rotated_pair<kDType>(a.w, turns[3])};
  } else if constexpr (kUnit == Unit::kTwoChunks) {
    device::rotate_words<kDType>(a.x, b.x, turns[0], turns[1]);
    device::rotate_words<kDType>(a.y, b.y, turns[2], turns[3]);
    device::rotate_words<kDType>(a.z, b.z, turns[4], turns[5]);
    device::rotate_words<kDType>(a.w, b.w, turns[6], turns[7]);
  }
}

/// Prepares unit `number` of a key for all heads. Several heads are loaded before the first of them
/// is stored.
template <DType kDType, Unit kUnit>
__device__ void prepare(const PrepareParams& p, const Row& row, int number) {
  constexpr bool kIsTwo = kUnit == Unit::kTwoChunks;
  constexpr int kPairs = kIsTwo ? 8 : 4;
  constexpr int kHeadsAtOnce = kIsTwo ? 2 : 4;
  const int second = number + p.rotary_dim / 2 / kChunkDims;
  float2 turns[kPairs];
  if constexpr (kUnit != Unit::kChunk) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) turns[i] = turn_of(p, number * kPairs + i, row.position);
  }
  const uint32_t first_to = offset(row, number);
  const uint32_t second_to = offset(row, second);
  const bool exists = row.exists && number * kChunkDims < row.num_dims;
  const int32_t num_heads = p.prepared.num_kv_heads;
#pragma unroll 1
  for (int32_t head = 0; head < num_heads; head += kHeadsAtOnce) {
    Chunks chunks[kHeadsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce; ++i) {
      if (!exists || head + i >= num_heads) continue;
      const auto* from = reinterpret_cast<const uint4*>(row.from + (head + i) * row.head_stride);
      chunks[i].first = __ldcs(from + number);
      if constexpr (kIsTwo) chunks[i].second = __ldcs(from + second);
    }
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce; ++i) {
      if (head + i >= num_heads) continue;
      turn<kDType, kUnit>(chunks[i], turns);
      unsigned char* tile = row.tile + int64_t{head + i} * row.tile_bytes;
      *reinterpret_cast<uint4*>(tile + first_to) = chunks[i].first;
      if constexpr (kIsTwo) *reinterpret_cast<uint4*>(tile + second_to) = chunks[i].second;
    }
  }
}

/// The same for a chunk of single dims.
template <DType kDType>
__device__ void prepare_elements(const PrepareParams& p, const Row& row, int chunk,
                                 int rotary_dim) {
  const uint32_t to = offset(row, chunk);
#pragma unroll 1
  for (int32_t head = 0; head < p.prepared.num_kv_heads; ++head) {
    const auto* dims = reinterpret_cast<const uint16_t*>(row.from + head * row.head_stride);
    auto* words = reinterpret_cast<uint32_t*>(row.tile + int64_t{head} * row.tile_bytes + to);
#pragma unroll 1
    for (int i = 0; i < kChunkDims / 2; ++i) {
      const int dim = chunk * kChunkDims + 2 * i;
      const auto of = [&](int d) {
        const bool has_dim = row.exists && d < row.num_dims;
        return has_dim ? element<kDType>(p, dims, d, rotary_dim, row.position) : 0.0F;
      };
      words[i] = device::Element<kDType>::pack(of(dim), of(dim + 1));
    }
  }
}

/// `kTurned`: what threads take of rotated dims. Of others they take chunks.
template <DType kDType, Unit kTurned>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    prepare_kv_kernel(const __grid_constant__ PrepareParams p) {
  device::wait_for_last_kernel();
  device::allow_next_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  const int first = thread % kThreadsPerRow;
  const int parts_of_tile = (p.prepared.tile_kv + kRowsAtOnce - 1) / kRowsAtOnce;
  const int32_t parts_of_keys = *p.prepared.num_tiles * parts_of_tile;
  const int32_t num_parts = p.prepared.values != nullptr ? 2 * parts_of_keys : parts_of_keys;
  for (auto i = static_cast<int32_t>(blockIdx.x); i < num_parts;
       i += static_cast<int32_t>(gridDim.x)) {
    const bool is_key = i < parts_of_keys;
    const int32_t part = is_key ? i : i - parts_of_keys;
    const int row_in_tile = part % parts_of_tile * kRowsAtOnce + thread / kThreadsPerRow;
    if (row_in_tile >= p.prepared.tile_kv) continue;
    const Row row = find_row(p, is_key, part / parts_of_tile, row_in_tile);
    if constexpr (kTurned == Unit::kElement) {
      for (int c = first; c < row.num_chunks; c += kThreadsPerRow)
        prepare_elements<kDType>(p, row, c, is_key ? p.rotary_dim : 0);
    } else {
      const int turned_chunks = p.rotary_dim / kChunkDims;
      const int turned_units = kTurned == Unit::kTwoChunks ? turned_chunks / 2 : turned_chunks;
      for (int u = first; u < turned_units; u += kThreadsPerRow)
        prepare<kDType, kTurned>(p, row, u);
      for (int c = turned_chunks + first; c < row.num_chunks; c += kThreadsPerRow) {
        prepare<kDType, Unit::kChunk>(p, row, c);
      }
    }
  }
}

/// The kernels of a dtype.
template <DType kDType>
const void* code_of(Unit turned) {
  void (*code)(PrepareParams) = prepare_kv_kernel<kDType, Unit::kElement>;
  if (turned == Unit::kChunk) code = prepare_kv_kernel<kDType, Unit::kChunk>;
  if (turned == Unit::kTurnedChunk) code = prepare_kv_kernel<kDType, Unit::kTurnedChunk>;
  if (turned == Unit::kTwoChunks) code = prepare_kv_kernel<kDType, Unit::kTwoChunks>;
  return reinterpret_cast<const void*>(code);
}
const void* code_of(DType dtype, Unit turned) {
  return dtype == DType::kFloat16 ? code_of<DType::kFloat16>(turned)
                                  : code_of<DType::kBFloat16>(turned);
}

Unit unit_for(const PrepareParams& p, bool is_vectorized) {
  const int32_t turned = p.interleaved ? p.rotary_dim : p.rotary_dim / 2;
  if (!is_vectorized || (p.head_dim_qk | p.head_dim_vo) % kChunkDims != 0 ||
      turned % kChunkDims != 0) {
    return Unit::kElement;
  }
  if (turned == 0) return Unit::kChunk;
  return p.interleaved ? Unit::kTurnedChunk : Unit::kTwoChunks;
}

}  // namespace

Status load_kv_preparation(DType dtype) noexcept {
  for (const Unit unit : {Unit::kChunk, Unit::kTurnedChunk, Unit::kTwoChunks, Unit::kElement}) {
    cudaFuncAttributes attributes;
    FLASHPLAN_CUDA_CALL(cudaFuncGetAttributes, &attributes, code_of(dtype, unit));
  }
  return {};
}

Status prepare_kv(const AttentionParams& params, int32_t num_sms, Stream stream) noexcept {
  PrepareParams p;
  static_assert(sizeof(p) <= 4096);  // what a kernel may take
  p.prepared = params.prepared;
  p.k = params.tensors.k;
  p.v = params.tensors.v;
  p.pages = params.tensors.pages;
  p.segments = params.schedule.segments;
  p.kv_lens = params.tensors.kv_lens;
  p.head_dim_qk = params.tensors.head_dim_qk;
  p.head_dim_vo = params.tensors.head_dim_vo;
  if (const RopeTurns* rope = params.host.rope) {
    p.rotary_dim = rope->rotary_dim;
    p.interleaved = rope->interleaved;
    p.gain = rope->gain;
    for (int32_t i = 0; i < rope->rotary_dim / 2; ++i) p.turns[i] = rope->part_of_turn(i);
  }
  const void* code = code_of(params.tensors.q_dtype, unit_for(p, params.tensors.vectorized));
  return launch_code(code,
                     {.ctas = num_sms * kCtasPerSm, .threads = kThreads, .pdl = params.host.pdl},
                     &p, stream);
}

}  // namespace flashplan::cuda
