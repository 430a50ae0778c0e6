// SPDX-License-Identifier: Apache-2.0
// Checks of the caller's tensors, shared by run(), append_paged_kv() and merge_states().
#pragma once

#include <cstdint>
#include <initializer_list>

#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// What one dimension must be.
struct Dim {
  enum Kind : int32_t { kAny, kExactly, kAtLeast } kind;
  int64_t value;

  static Dim any() { return {kAny, 0}; }
  static Dim exactly(int64_t value) { return {kExactly, value}; }
  static Dim at_least(int64_t value) { return {kAtLeast, value}; }
};

/// A named argument and how it is used.
struct TensorArgument {
  const char* name;
  const TensorView& view;
  bool written = false;
};

/// Rank, shape, contiguous last dimension, alignment, a non-null pointer where there are elements,
/// no negative stride, and writable where it is written.
Status check_shape(const TensorArgument& argument, std::initializer_list<Dim> shape) noexcept;
Status check_dtype(const TensorArgument& argument, DType expected, const char* why) noexcept;
Status check_device(const TensorArgument& argument, Device expected) noexcept;

/// Refuses an `output` whose bytes overlap those of `input`.
Status check_no_overlap(const TensorArgument& output, const TensorArgument& input) noexcept;

/// Whether all rows of a tensor, that is its last dimension, begin at a multiple of 16 bytes and
/// end there.
bool is_vectorized(const TensorView& view) noexcept;

/// Finite and > 0.
Status check_scale(const char* name, float scale) noexcept;

/// The page table that the tensors describe; see AttentionTensors.
struct PageTableTensors {
  const TensorView& block_table;
  const TensorView& page_indptr;
  const TensorView& page_indices;
};

/// Shapes and dtypes of a page table for `batch_size` requests.
Status check_page_table(const PageTableTensors& tables, int32_t batch_size, Device device) noexcept;

/// A block table on any device: its columns are enough for `kv_len` tokens of `request`.
Status check_columns(const TensorView& block_table, int32_t request, int32_t kv_len,
                     int32_t page_size) noexcept;

/// Ids of the pages that `kv_len` tokens of `request` use; host tables only.
///   kInvalidArgument  the table is too short, or an id is outside [0, num_pages)
Status check_page_ids(const PageTableTensors& tables, int32_t request, int32_t kv_len,
                      int32_t page_size, int64_t num_pages) noexcept;

}  // namespace flashplan
