// SPDX-License-Identifier: Apache-2.0
#include "checks/tensor_checks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "common/error.h"

namespace flashplan {
namespace {

/// Text of a shape, for messages.
class ShapeText {
 public:
  explicit ShapeText(const TensorView& view) {
    const int32_t known = view.rank < kMaxRank ? view.rank : kMaxRank;
    for (int32_t d = 0; d < known; ++d) append("%lld", static_cast<long long>(view.shape[d]));
    if (view.rank > kMaxRank) append("... of rank %lld", view.rank);
    close();
  }
  /// Text of an expected shape. A limit of INT32_MAX is left out unless `got` exceeds it.
  ShapeText(std::span<const Dim> shape, const TensorView& got) {
    const bool has_rank = got.rank == static_cast<int32_t>(shape.size());
    for (size_t d = 0; d < shape.size(); ++d) {
      const Dim& dim = shape[d];
      const bool is_limited =
          dim.most < INT32_MAX || (dim.most == INT32_MAX && has_rank && got.shape[d] > dim.most);
      if (dim.least == dim.most) {
        append("%lld", static_cast<long long>(dim.least));
      } else if (is_limited) {
        append("<=%lld", static_cast<long long>(dim.most));
      } else {
        append(dim.least == 0 ? "*" : ">=%lld", static_cast<long long>(dim.least));
      }
    }
    close();
  }
  const char* c_str() const { return text_; }

 private:
  void append(const char* format, long long value) {
    const char* separator = used_ == 0 ? "(" : ", ";
    used_ +=
        std::snprintf(text_ + used_, sizeof(text_) - static_cast<size_t>(used_), "%s", separator);
    used_ +=
        std::snprintf(text_ + used_, sizeof(text_) - static_cast<size_t>(used_), format, value);
  }
  void close() {
    std::snprintf(text_ + used_, sizeof(text_) - static_cast<size_t>(used_),
                  used_ == 0 ? "()" : ")");
  }

  char text_[112] = {};  // kMaxRank numbers of at most 22 characters
  int used_ = 0;
};

int64_t num_pages_of(int32_t kv_len, int32_t page_size) {
  return (int64_t{kv_len} + page_size - 1) / page_size;
}

Status check_strides(const TensorArgument& argument) {
  const TensorView& view = argument.view;
  for (int32_t d = 0; d < view.rank; ++d) {
    if (view.shape[d] > 1 && view.stride[d] < 0) {
      return error(StatusCode::kInvalidArgument, "%s: expected strides >= 0, got %lld in dim %d",
                   argument.name, static_cast<long long>(view.stride[d]), d);
    }
  }
  const int32_t last = view.rank - 1;
  if (view.shape[last] > 1 && view.stride[last] != 1) {
    return error(StatusCode::kInvalidArgument,
                 "%s: expected a contiguous last dimension, got stride %lld", argument.name,
                 static_cast<long long>(view.stride[last]));
  }
  return {};
}

}  // namespace

Status check_shape(const TensorArgument& argument, std::span<const Dim> shape) noexcept {
  const TensorView& view = argument.view;
  bool fits = view.rank == static_cast<int32_t>(shape.size());
  for (int32_t d = 0; fits && d < view.rank; ++d) {
    const Dim& dim = shape[static_cast<size_t>(d)];
    fits = view.shape[d] >= dim.least && view.shape[d] <= dim.most;
  }
  if (!fits) {
    return error(StatusCode::kInvalidArgument, "%s: expected shape %s, got %s", argument.name,
                 ShapeText(shape, view).c_str(), ShapeText(view).c_str());
  }
  if (is_plain(argument)) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_memory(argument));
  return has_elements(view) ? check_strides(argument) : Status();
}

Status check_dtype(const TensorArgument& argument, DType expected, const char* why) noexcept {
  if (argument.view.dtype == expected) return {};
  return error(StatusCode::kInvalidType, "%s: expected dtype %s%s, got %s", argument.name,
               to_string(expected), why, to_string(argument.view.dtype));
}

Status check_device(const TensorArgument& argument, Device expected) noexcept {
  if (argument.view.device == expected) return {};
  return error(StatusCode::kInvalidType, "%s: expected a tensor on %s, got one on %s",
               argument.name, to_string(expected).text, to_string(argument.view.device).text);
}

Status check_device_exists(const TensorArgument& argument) noexcept {
  const Device device = argument.view.device;
  const bool exists = device.type == DeviceType::kCpu
                          ? device.index == 0
                          : device.type == DeviceType::kCuda && device.index >= 0;
  if (exists) return {};
  return error(StatusCode::kInvalidType,
               "%s: expected a tensor on cpu or cuda:<index>, got one on %s", argument.name,
               to_string(device).text);
}

bool is_vectorized(const TensorView& view) noexcept {
  constexpr int64_t kBytes = 16;
  const int64_t item = item_size(view.dtype);
  const int32_t last = view.rank - 1;
  bool is_multiple =
      reinterpret_cast<uintptr_t>(view.data) % kBytes == 0 && view.shape[last] * item % kBytes == 0;
  for (int32_t d = 0; d < last; ++d) {
    // A dimension of size 1 may have any stride.
    is_multiple = is_multiple && (view.shape[d] <= 1 || view.stride[d] * item % kBytes == 0);
  }
  return is_multiple;
}

Status check_scale(const char* name, float scale) noexcept {
  if (std::isnormal(scale) && scale > 0.0F) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected a normal float32 > 0, got %g", name,
               static_cast<double>(scale));
}

Status check_head_scales(const TensorArgument& scales, int64_t num_kv_heads,
                         Device device) noexcept {
  if (scales.view.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(scales, DType::kFloat32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(scales, device));
  const bool is_one = scales.view.rank == 1 && scales.view.shape[0] == 1;
  return check_shape(scales, {Dim::exactly(is_one ? 1 : num_kv_heads)});
}

Status check_scales(const char* name, float scale, const TensorView& scales) noexcept {
  return check_entries(name, scales, [&](const char* entry, float of_head) {
    return check_scale(entry, scale * of_head);
  });
}

Status check_page_table(const PageTableTensors& tables, int32_t batch_size,
                        Device device) noexcept {
  const bool has_csr = !tables.page_indptr.empty() && !tables.page_indices.empty();
  const bool has_half_csr = tables.page_indptr.empty() != tables.page_indices.empty();
  if (has_half_csr || tables.block_table.empty() != has_csr) {
    return error(StatusCode::kInvalidArgument,
                 "block_table: expected it or both page_indptr and page_indices, got %s",
                 tables.block_table.empty() ? (has_half_csr ? "one of the two" : "none")
                                            : "more than one form");
  }
  const auto check = [&](const TensorArgument& argument,
                         std::initializer_list<Dim> shape) noexcept -> Status {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, DType::kInt32, ""));
    FLASHPLAN_RETURN_IF_ERROR(check_device(argument, device));
    return check_shape(argument, shape);
  };
  if (!has_csr) {
    return check({"block_table", tables.block_table}, {Dim::at_least(batch_size), Dim::any()});
  }
  FLASHPLAN_RETURN_IF_ERROR(
      check({"page_indptr", tables.page_indptr}, {Dim::at_least(int64_t{batch_size} + 1)}));
  return check({"page_indices", tables.page_indices}, {Dim::any()});
}

Status check_columns(const TensorView& block_table, int32_t request, int32_t kv_len,
                     int32_t page_size) noexcept {
  const int64_t needed = num_pages_of(kv_len, page_size);
  if (block_table.shape[1] >= needed) return {};
  return error(StatusCode::kInvalidArgument,
               "block_table: expected >= %lld columns for kv_lens[%d] = %d, got %lld",
               static_cast<long long>(needed), request, kv_len,
               static_cast<long long>(block_table.shape[1]));
}

Status find_page_ids(const PageTableTensors& tables, int32_t request, int32_t kv_len,
                     int32_t page_size, PageIds* ids) noexcept {
  if (!tables.block_table.empty()) {
    const TensorView& table = tables.block_table;
    FLASHPLAN_RETURN_IF_ERROR(check_columns(table, request, kv_len, page_size));
    *ids = {static_cast<const int32_t*>(table.data) + request * table.stride[0], 0};
    return {};
  }
  const int64_t needed = num_pages_of(kv_len, page_size);
  const auto* indptr = static_cast<const int32_t*>(tables.page_indptr.data);
  const int64_t first = indptr[request];
  const int64_t end = indptr[request + 1];
  if (first < 0 || end < first || end > tables.page_indices.shape[0]) {
    return error(StatusCode::kInvalidArgument,
                 "page_indptr[%d]: expected ascending within [0, %lld], got %lld after %lld",
                 request + 1, static_cast<long long>(tables.page_indices.shape[0]),
                 static_cast<long long>(end), static_cast<long long>(first));
  }
  if (end - first < needed) {
    return error(StatusCode::kInvalidArgument,
                 "page_indptr[%d]: expected >= %lld pages for kv_lens[%d] = %d, got %lld",
                 request + 1, static_cast<long long>(needed), request, kv_len,
                 static_cast<long long>(end - first));
  }
  *ids = {static_cast<const int32_t*>(tables.page_indices.data) + first, first};
  return {};
}

PageTable make_page_table(const PageTableTensors& tables, int32_t page_size,
                          int32_t num_pages) noexcept {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  PageTable pages;
  const bool csr = tables.block_table.empty();
  const TensorView& ids = csr ? tables.page_indices : tables.block_table;
  pages.ids = static_cast<const int32_t*>(ids.data);
  pages.num_ids = static_cast<int32_t>(std::min(ids.shape[csr ? 0 : 1], kMost));
  if (csr) {
    pages.indptr = static_cast<const int32_t*>(tables.page_indptr.data);
  } else {
    pages.row_stride = ids.stride[0];
  }
  pages.page_size = make_divisor(page_size);
  pages.num_pages = num_pages;
  return pages;
}

int32_t num_pages_of(const TensorView& k_cache, const TensorView& v_cache) noexcept {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return static_cast<int32_t>(std::min({k_cache.shape[0], v_cache.shape[0], kMost}));
}

Status check_page_ids(const PageTableTensors& tables, int32_t request, int32_t first_key,
                      int32_t kv_len, int32_t page_size, int64_t num_pages) noexcept {
  PageIds found;
  FLASHPLAN_RETURN_IF_ERROR(find_page_ids(tables, request, kv_len, page_size, &found));
  const int32_t* const ids = found.ids;
  const int64_t first = found.first;
  const int64_t end = first_key < kv_len ? num_pages_of(kv_len, page_size) : 0;
  for (int64_t p = first_key / page_size; p < end; ++p) {
    if (ids[p] >= 0 && ids[p] < num_pages) continue;
    if (tables.block_table.empty()) {
      return error(StatusCode::kInvalidArgument,
                   "page_indices[%lld]: expected a page in [0, %lld), got %d",
                   static_cast<long long>(first + p), static_cast<long long>(num_pages), ids[p]);
    }
    return error(StatusCode::kInvalidArgument,
                 "block_table[%d, %lld]: expected a page in [0, %lld), got %d", request,
                 static_cast<long long>(p), static_cast<long long>(num_pages), ids[p]);
  }
  return {};
}

Status check_slots(const TensorView& slots, int64_t page_size, int32_t num_pages) noexcept {
  const auto* data = static_cast<const int64_t*>(slots.data);
  for (int64_t i = 0; i < slots.shape[0]; ++i) {
    if (data[i] == -1 || (data[i] >= 0 && data[i] / page_size < num_pages)) continue;
    return error(StatusCode::kInvalidArgument,
                 "slot_mapping[%lld]: expected -1 or a slot of %d pages of %lld, got %lld",
                 static_cast<long long>(i), num_pages, static_cast<long long>(page_size),
                 static_cast<long long>(data[i]));
  }
  return {};
}

}  // namespace flashplan
