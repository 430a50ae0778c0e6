// SPDX-License-Identifier: Apache-2.0
#include "cuda/tensor_maps.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <numeric>

#include "common/kv_layout.h"
#include "cuda/runtime.h"

namespace flashplan::cuda {
namespace {

constexpr int64_t kBlockDims = 64;  // 128 bytes, the widest box that the swizzle allows
constexpr int64_t kGroupRows = 8;   // rows that are swizzled together
constexpr int64_t kHalfBlocks = 4;  // blocks in a box of sm90_mla and sm90_wide: half a row

using Encode = decltype(&cuTensorMapEncodeTiled);

/// Asks the driver for its function that encodes maps, because the library does not link the
/// driver. Null if the driver has no such function. Throws the cudaError_t of a failed call.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned kSince = 12000;
  const cudaError_t code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                            kSince, cudaEnableDefault, &result);
  if (!succeeded(code)) throw code;
  return reinterpret_cast<Encode>(function);
}

/// The result of find_encode(). If the driver can not be asked, it is null, and the next call asks
/// again.
Encode encode_function() noexcept try {
  static const Encode function = find_encode();
  return function;
} catch (cudaError_t) {
  return nullptr;
}

/// One dimension of a map. The innermost dimension comes first.
struct MapDim {
  int64_t size;
  int64_t stride;  // in elements
  int64_t box;

  friend bool operator==(const MapDim&, const MapDim&) = default;
};

/// All that a map is encoded from.
struct MapKey {
  static constexpr std::size_t kMostDims = 5;

  const void* data = nullptr;
  std::array<MapDim, kMostDims> dims = {};
  int64_t num_dims = 0;
  int64_t dtype = 0;

  friend bool operator==(const MapKey&, const MapKey&) = default;
};

/// Encodes a map of 16-bit elements. False if the driver refuses it.
bool encode(TensorMap* map, const MapKey& key) {
  const Encode function = encode_function();
  if (function == nullptr) return false;
  std::array<cuuint64_t, MapKey::kMostDims> sizes;
  std::array<cuuint64_t, MapKey::kMostDims> strides;
  std::array<cuuint32_t, MapKey::kMostDims> boxes;
  std::array<cuuint32_t, MapKey::kMostDims> ones;
  for (std::size_t i = 0; i < MapKey::kMostDims; ++i) {
    sizes[i] = static_cast<cuuint64_t>(key.dims[i].size);
    strides[i] = static_cast<cuuint64_t>(2 * key.dims[i].stride);
    boxes[i] = static_cast<cuuint32_t>(key.dims[i].box);
    ones[i] = 1;
  }
  const auto type = static_cast<DType>(key.dtype) == DType::kFloat16
                        ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                        : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  return function(reinterpret_cast<CUtensorMap*>(map), type, static_cast<cuuint32_t>(key.num_dims),
                  const_cast<void*>(key.data), sizes.data(), strides.data() + 1, boxes.data(),
                  ones.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// The maps that a thread encoded last. They are kept because the layers of a model have the same
/// tensors in every step, and the driver takes 200 ns for a map.
class KeptMaps {
 public:
  bool find_or_encode(TensorMap* map, const MapKey& key) {
    Entry& entry = entries_[place_of(key)];
    if (entry.key != key) {
      entry.key = {};
      if (!encode(&entry.map, key)) return false;
      entry.key = key;
    }
    *map = entry.map;
    return true;
  }

 private:
  struct Entry {
    MapKey key;
    TensorMap map;
  };
  static constexpr std::size_t kEntries = 256;

  /// The entry of a map. The caches of a model's layers are often a large power of two apart, so
  /// the low bits of their addresses are equal: the index depends on all bits.
  static std::size_t place_of(const MapKey& key) {
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
    const auto box = static_cast<uint64_t>(key.dims[2].box);
    const uint64_t mixed = (reinterpret_cast<uintptr_t>(key.data) + box) * kGolden;
    return mixed >> 56;
  }
  static_assert(kEntries == std::size_t{1} << 8);

  std::array<Entry, kEntries> entries_;
};

template <std::size_t kDims>
bool encode(TensorMap* map, const TensorView& tensor, const std::array<MapDim, kDims>& dims) {
  MapKey key = {.data = tensor.data,
                .num_dims = static_cast<int64_t>(kDims),
                .dtype = static_cast<int64_t>(tensor.dtype)};
  std::copy(dims.begin(), dims.end(), key.dims.begin());
  thread_local const std::unique_ptr<KeptMaps> kept(new (std::nothrow) KeptMaps);
  return kept != nullptr ? kept->find_or_encode(map, key) : encode(map, key);
}

/// The stride of a dimension. A dimension of size 1 may have any stride, which is never used. It
/// is replaced by a stride of 16 bytes, because a map needs multiples of 16 bytes.
int64_t stride_of(const TensorView& view, int32_t dim) {
  constexpr int64_t kUnused = 8;
  return view.shape[dim] > 1 ? view.stride[dim] : kUnused;
}

/// Whether a map can describe the strides: positive multiples of 16 bytes, from an aligned address.
bool is_mappable(const TensorView& view) {
  constexpr int64_t kAlignment = 16;
  bool is_mappable = reinterpret_cast<uintptr_t>(view.data) % kAlignment == 0;
  for (int32_t d = 0; d + 1 < view.rank; ++d) {
    if (view.shape[d] <= 1) continue;
    const int64_t stride = item_size(view.dtype) * view.stride[d];
    is_mappable = is_mappable && stride > 0 && stride % kAlignment == 0;
  }
  return is_mappable;
}

/// Encodes queries or outputs in boxes of `rows` packed rows and 64 dims.
bool encode_tokens(TensorMap* map, const TensorView& view, int64_t group, int64_t rows) {
  if (!is_mappable(view)) return false;
  return encode<3>(map, view,
                   {{{view.shape[2], 1, kBlockDims},
                     {view.shape[1], stride_of(view, 1), group},
                     {view.shape[0], stride_of(view, 0), rows / group}}});
}

/// Which dimensions of the tensors of keys and values count tokens and heads.
struct KvDims {
  int32_t token;
  int32_t head;
};
KvDims kv_dims(const AttentionOptions& options) {
  if (options.page_size == 0) return {0, 1};
  return options.kv_layout == KvLayout::kNHD ? KvDims{1, 2} : KvDims{2, 1};
}

/// How many blocks of 64 dims a box of keys or values has. A box of half a row may reach beyond the
/// row's last block, and has zeros there.
enum class BoxBlocks { kOne, kAll, kHalf };

/// Encodes keys or values in boxes of `rows` rows of one head. The map has a dimension of rows and
/// one of groups of 8 rows: for pages, the 8 rows of a group and the groups of a page. A box of a
/// ragged tensor may begin at any row, so there the first of these dimensions has all rows of the
/// tensor, and the second has only the groups of one box.
bool encode_kv(TensorMap* map, int32_t* slabs_per_page, const TensorView& view,
               const AttentionOptions& options, int64_t rows, BoxBlocks box) {
  if (!is_mappable(view)) return false;
  const bool paged = options.page_size > 0;
  const KvDims kv = kv_dims(options);
  const int32_t last = view.rank - 1;
  const int64_t token_stride = stride_of(view, kv.token);
  const int64_t num_heads = view.shape[kv.head];
  const int64_t num_pages = paged ? view.shape[0] : 1;
  int64_t slab_stride = stride_of(view, kv.head);
  int64_t per_page = num_heads;
  if (num_pages > 1) {
    const int64_t page_stride = view.stride[0];
    if (num_heads == 1) slab_stride = page_stride;
    if (page_stride % slab_stride != 0) return false;
    per_page = page_stride / slab_stride;
    if (per_page < num_heads || num_pages * per_page > INT32_MAX) return false;
  }
  *slabs_per_page = static_cast<int32_t>(per_page);
  const int64_t groups = paged ? options.page_size / kGroupRows : rows / kGroupRows;
  const bool has_one = box == BoxBlocks::kOne;
  const int64_t blocks = has_one ? 1 : view.shape[last] / kBlockDims;
  return encode<5>(map, view,
                   {{{has_one ? view.shape[last] : kBlockDims, 1, kBlockDims},
                     {paged ? kGroupRows : view.shape[0], token_stride, kGroupRows},
                     {blocks, kBlockDims, box == BoxBlocks::kHalf ? kHalfBlocks : blocks},
                     {groups, kGroupRows * token_stride, rows / kGroupRows},
                     {(num_pages - 1) * per_page + num_heads, slab_stride, 1}}});
}

/// Encodes one of the two tensors that hold the first and the last dims of ragged keys, in boxes of
/// `rows` rows and 64 dims of one head.
bool encode_key_part(TensorMap* map, const TensorView& view, int64_t rows) {
  if (!is_mappable(view)) return false;
  const bool has_heads = view.rank == 3;
  constexpr int64_t kUnused = 8;
  return encode<5>(
      map, view,
      {{{view.shape[view.rank - 1], 1, kBlockDims},
        {view.shape[0], stride_of(view, 0), rows},
        {1, kUnused, 1},
        {1, kUnused, 1},
        {has_heads ? view.shape[1] : 1, has_heads ? stride_of(view, 1) : kUnused, 1}}});
}

/// Encodes keys whose last dims are in a tensor of their own. A box can not have dims of both
/// tensors, so the first tensor must consist of whole blocks of 64 dims.
bool encode_key_parts(TensorMaps* maps, const AttentionTensors& t, int64_t rows) {
  return t.k.shape[t.k.rank - 1] % kBlockDims == 0 && encode_key_part(&maps->k, t.k, rows) &&
         encode_key_part(&maps->k_tail, t.k_tail, rows);
}

RowUnits row_units(const TensorView& view, const AttentionOptions& options) {
  constexpr int64_t kElements = 8;  // elements in the 16 bytes that a kernel copies at once
  if (!is_mappable(view) || view.shape[view.rank - 1] % kElements != 0) return {};
  const KvDims dims = kv_dims(options);
  const auto stride = [&view](int32_t d) { return 2 * stride_of(view, d); };
  const int64_t page = options.page_size > 0 ? stride(0) : 0;
  const int64_t token = stride(dims.token);
  const int64_t head = stride(dims.head);
  const int64_t all = page | token | head;
  const int64_t bytes = std::min(all & -all, int64_t{1} << 30);
  int64_t last = 0;  // where the last row begins, in bytes
  for (int32_t d = 0; d + 1 < view.rank; ++d) last += (view.shape[d] - 1) * stride(d);
  if (last / bytes >= RowUnits::kNoRow) return {};
  return {static_cast<uint32_t>(bytes), static_cast<uint32_t>(page / bytes),
          static_cast<uint32_t>(token / bytes), static_cast<uint32_t>(head / bytes)};
}

/// Dims [first, last) of a tensor.
TensorView dims_of(TensorView view, int64_t first, int64_t last) {
  view.data = static_cast<std::byte*>(view.data) + 2 * first;
  view.shape[view.rank - 1] = last - first;
  return view;
}

/// Encodes paged keys of one kv head in boxes of `rows` rows and `blocks` blocks of 64 dims. Their
/// tensor may leave out the dimension of heads.
bool encode_shared_kv(TensorMap* map, const TensorView& view, const AttentionOptions& options,
                      int64_t rows, int64_t blocks) {
  if (!is_mappable(view)) return false;
  const int64_t token_stride = stride_of(view, view.rank == 3 ? 1 : kv_dims(options).token);
  return encode<5>(map, view,
                   {{{kBlockDims, 1, kBlockDims},
                     {kGroupRows, token_stride, kGroupRows},
                     {view.shape[view.rank - 1] / kBlockDims, kBlockDims, blocks},
                     {options.page_size / kGroupRows, kGroupRows * token_stride, rows / kGroupRows},
                     {view.shape[0], stride_of(view, 0), 1}}});
}

/// The maps of kernels whose values are the first dims of keys. The other dims have maps of their
/// own, even if they are in the same tensor.
TensorMaps encode_shared_kv_maps(const Kernel& kernel, const AttentionOptions& options,
                                 const AttentionTensors& t) {
  TensorMaps maps;
  const int64_t num_values = options.head_dim_vo;
  const int64_t num_dims = options.head_dim_qk;
  const bool has_tail = num_dims > num_values;
  const TensorView q_tail = t.q_tail.empty() ? dims_of(t.q, num_values, num_dims) : t.q_tail;
  constexpr int32_t kRowsOfCta = 64;
  const int64_t heads = std::gcd(options.num_qo_heads, kRowsOfCta);
  maps.q_box_rows = static_cast<int32_t>(heads);
  maps.has_q = encode_tokens(&maps.q, dims_of(t.q, 0, num_values), heads, heads) &&
               (!has_tail || encode_tokens(&maps.q_tail, q_tail, heads, heads));
  if (options.kv_dtype != options.q_dtype) return maps;  // the kernel widens keys: no map
  const TensorView k_tail = t.k_tail.empty() ? dims_of(t.k, num_values, num_dims) : t.k_tail;
  const int64_t tile_kv = kernel.geometry.tile_kv;
  const int64_t divisor = options.page_size | tile_kv;
  const int64_t rows = divisor & -divisor;  // the largest power of two that divides both
  // Listed keys lie anywhere, and are copied row by row.
  if (options.page_size == 0 || rows < kGroupRows || options.topk > 0) return maps;
  maps.box_rows = static_cast<int32_t>(rows);
  maps.boxes_of_step = static_cast<int32_t>(tile_kv / rows);
  maps.has_kv =
      encode_shared_kv(&maps.k, dims_of(t.k, 0, num_values), options, rows, kHalfBlocks) &&
      (!has_tail || encode_shared_kv(&maps.k_tail, k_tail, options, rows, 1));
  return maps;
}

}  // namespace

TensorMaps encode_tensor_maps(const Kernel& kernel, const AttentionOptions& options,
                              const AttentionTensors& t) noexcept {
  if (options.shared_kv) return encode_shared_kv_maps(kernel, options, t);
  TensorMaps maps;
  const int64_t group = options.num_qo_heads / options.num_kv_heads;
  const int64_t tile_q = kernel.geometry.tile_q;
  constexpr int64_t kWarpgroupRows = 64;
  const bool copies_q = options.q_dtype == kernel.q_dtype;  // else q is widened, without a map
  maps.has_q = copies_q && tile_q % group == 0 && encode_tokens(&maps.q, t.q, group, tile_q);
  maps.has_q_tokens =
      copies_q && group <= kWarpgroupRows && encode_tokens(&maps.q_tokens, t.q, group, group);
  maps.has_o = kWarpgroupRows % group == 0 && options.o_dtype == kernel.q_dtype &&
               encode_tokens(&maps.o, t.o, group, kWarpgroupRows);
  if (kernel.geometry.gathers) {
    maps.k_units = row_units(t.k, options);
    maps.v_units = row_units(t.v, options);
    return maps;
  }
  // Boxes of half a row need head dims that are multiples of a block, and keys in one tensor. Boxes
  // of whole rows need tensors with all dims of the kernel. If the tensors have fewer dims, a box
  // has one block of 64 dims, and 8 rows.
  const bool has_halves = kernel.head_dim_qk > kHalfBlocks * kBlockDims;
  const bool has_whole_blocks =
      options.head_dim_qk % kBlockDims == 0 && options.head_dim_vo % kBlockDims == 0;
  if (has_halves && (!has_whole_blocks || !t.k_tail.empty())) return maps;
  const bool has_all_blocks = has_halves || (options.head_dim_qk == kernel.head_dim_qk &&
                                             options.head_dim_vo == kernel.head_dim_vo);
  const BoxBlocks box = has_halves       ? BoxBlocks::kHalf
                        : has_all_blocks ? BoxBlocks::kAll
                                         : BoxBlocks::kOne;
  const int64_t tile_kv = kernel.geometry.tile_kv;
  const int64_t divisor = options.page_size | tile_kv;
  // A page and a step must consist of whole boxes, so a box has as many rows as the largest power
  // of two that divides both.
  const int64_t most_rows = options.page_size == 0 ? tile_kv : divisor & -divisor;
  const int64_t rows = has_all_blocks ? most_rows : std::min(most_rows, kGroupRows);
  maps.box_rows = static_cast<int32_t>(rows);
  maps.has_all_blocks = has_all_blocks;
  int64_t num_kv_tokens = std::min<int64_t>(std::min(t.k.shape[0], t.v.shape[0]), INT32_MAX);
  if (!t.k_tail.empty()) num_kv_tokens = std::min(num_kv_tokens, t.k_tail.shape[0]);
  maps.num_kv_tokens = options.page_size == 0 ? static_cast<int32_t>(num_kv_tokens) : 0;
  const bool has_k = t.k_tail.empty()
                         ? encode_kv(&maps.k, &maps.k_slabs_per_page, t.k, options, rows, box)
                         : encode_key_parts(&maps, t, tile_kv);
  maps.has_kv = rows >= kGroupRows && has_k &&
                encode_kv(&maps.v, &maps.v_slabs_per_page, t.v, options, rows, box);
  if (maps.has_kv && options.page_size > 0) {
    maps.boxes_of_step = static_cast<int32_t>(tile_kv / rows);
    maps.steps_of_batch = 32 / maps.boxes_of_step;
  }
  return maps;
}

}  // namespace flashplan::cuda
