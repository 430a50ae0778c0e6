// SPDX-License-Identifier: Apache-2.0
// Finds the prefixes that requests of a batch share, in their page tables.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// A page table in host memory, in one of the two forms of AttentionTensors, int32. Any ids are
/// valid, as they are only compared with one another.
struct HostPageTable {
  TensorView block_table;   // [>= batch_size, max_pages]
  TensorView page_indptr;   // [>= batch_size + 1]
  TensorView page_indices;  // [>= page_indptr[batch_size]]
};

/// Finds neighbouring requests whose page tables begin with the same pages, and writes a row
/// {first_request, num_requests, num_tokens} of Batch::shared_prefixes for each such prefix, outer
/// prefixes before those inside them. A prefix ends at the latest where the new tokens of one of
/// its requests begin. Reads qo_indptr, kv_lens and batch_size of `batch`. Of each row of the table
/// it reads only the ids that it has in common with the row before, and one more. No allocation.
///
/// `groups`: room for batch_size - 1 rows of three; `num_groups`: how many rows were written.
///   kInvalidArgument, kInvalidType  a length is out of range, page_size < 1, or a table is
///                                   malformed or too short; nothing was written
FLASHPLAN_API Status find_shared_prefixes(const Batch& batch, int32_t page_size,
                                          const HostPageTable& table, int32_t* groups,
                                          int32_t* num_groups) noexcept;

}  // namespace flashplan
