// SPDX-License-Identifier: Apache-2.0
// Checks of the caller's tensors, shared by run() and the operators.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <span>

#include "abi/head_scales.h"
#include "abi/kv_view.h"
#include "checks/memory_checks.h"
#include "common/error.h"
#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// The sizes that a dimension may have: [least, most].
struct Dim {
  int64_t least;
  int64_t most;

  static Dim any() { return {0, INT64_MAX}; }
  static Dim exactly(int64_t value) { return {value, value}; }
  static Dim at_least(int64_t value) { return {value, INT64_MAX}; }
  /// The sizes that kernels can count in 32 bits.
  static Dim int32(int64_t least = 0) { return {least, INT32_MAX}; }
};

/// Checks rank, shape and memory (check_memory), that the last dimension is contiguous, and that no
/// stride is negative.
Status check_shape(const TensorArgument& argument, std::span<const Dim> shape) noexcept;
inline Status check_shape(const TensorArgument& argument,
                          std::initializer_list<Dim> shape) noexcept {
  return check_shape(argument, std::span(shape.begin(), shape.size()));
}
Status check_dtype(const TensorArgument& argument, DType expected, const char* why) noexcept;
Status check_device(const TensorArgument& argument, Device expected) noexcept;

/// Checks that a tensor is on the CPU or on cuda:<index>. Callers check this for the tensor whose
/// device decides where the call runs. Whether the machine has that GPU is checked later.
Status check_device_exists(const TensorArgument& argument) noexcept;

/// Whether all rows of a tensor (its last dimension) begin and end at multiples of 16 bytes.
bool is_vectorized(const TensorView& view) noexcept;

/// Checks that a scale is a normal float32 (finite, not subnormal) and > 0.
Status check_scale(const char* name, float scale) noexcept;

/// Calls check("name[i]", value) for each value of a contiguous float32 tensor in host memory.
/// Stops at the first error and returns it. A tensor that was not given has no values.
template <typename Check>
Status check_entries(const char* name, const TensorView& tensor, Check check) {
  const int64_t count = tensor.empty() ? 0 : tensor.shape[0];
  for (int64_t i = 0; i < count; ++i) {
    char entry[40];
    std::snprintf(entry, sizeof(entry), "%s[%lld]", name, static_cast<long long>(i));
    FLASHPLAN_RETURN_IF_ERROR(check(entry, static_cast<const float*>(tensor.data)[i]));
  }
  return {};
}

/// Checks shape, dtype and device of the scales of kv heads, not their values. There is one scale
/// for all heads, or one for each.
Status check_head_scales(const TensorArgument& scales, int64_t num_kv_heads,
                         Device device) noexcept;

/// The scales that a checked tensor holds.
inline HeadScales head_scales(const TensorView& scales) {
  if (scales.empty()) return {};
  return {static_cast<const float*>(scales.data), scales.shape[0] > 1 ? 1 : 0};
}

/// Checks `scale` times each of `scales`, the scales of kv heads in host memory.
Status check_scales(const char* name, float scale, const TensorView& scales) noexcept;

/// The caller's tensors that form a page table: block_table alone, or page_indptr with
/// page_indices.
struct PageTableTensors {
  const TensorView& block_table;
  const TensorView& page_indptr;
  const TensorView& page_indices;
};

/// The page table in the form that kernels read. The tensors have passed check_page_table().
PageTable make_page_table(const PageTableTensors& tables, int32_t page_size,
                          int32_t num_pages) noexcept;

/// Checks shapes and dtypes of a page table for `batch_size` requests.
Status check_page_table(const PageTableTensors& tables, int32_t batch_size, Device device) noexcept;

/// Checks that a block table, on any device, has enough columns for `kv_len` tokens of `request`.
Status check_columns(const TensorView& block_table, int32_t request, int32_t kv_len,
                     int32_t page_size) noexcept;

/// The page ids of a request.
struct PageIds {
  const int32_t* ids = nullptr;
  int64_t first = 0;  // index of ids[0] in page_indices
};

/// Finds the page ids of `request`, which has `kv_len` tokens; for tables in host memory.
///   kInvalidArgument  the table is too short
Status find_page_ids(const PageTableTensors& tables, int32_t request, int32_t kv_len,
                     int32_t page_size, PageIds* ids) noexcept;

/// The number of pages of a cache, but at most as many as int32 page ids can name.
int32_t num_pages_of(const TensorView& k_cache, const TensorView& v_cache) noexcept;

/// Checks the ids of the pages of keys [first_key, kv_len) of `request`; for tables in host memory.
///   kInvalidArgument  the table is too short, or an id is outside [0, num_pages)
Status check_page_ids(const PageTableTensors& tables, int32_t request, int32_t first_key,
                      int32_t kv_len, int32_t page_size, int64_t num_pages) noexcept;

/// Checks slots, an int64 tensor in host memory: each is -1, or a slot of `num_pages` pages of
/// `page_size` slots.
Status check_slots(const TensorView& slots, int64_t page_size, int32_t num_pages) noexcept;

}  // namespace flashplan
