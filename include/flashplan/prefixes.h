// SPDX-License-Identifier: Apache-2.0
// Finds the prefixes that requests of a batch share, in their page tables.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// A page table in host memory, in one of the two forms of AttentionTensors, int32. Ids may be
/// anything: they are compared with one another.
struct HostPageTable {
  TensorView block_table;   // [>= batch_size, max_pages]
  TensorView page_indptr;   // [>= batch_size + 1]
  TensorView page_indices;  // [>= page_indptr[batch_size]]
};

/// Writes Batch::shared_prefixes for requests whose page tables begin with the same pages, as they
/// stand side by side in the batch: rows {first_request, num_requests, num_tokens}, outer prefixes
/// before those inside them. A prefix ends where a request's new tokens begin. Reads qo_indptr,
/// kv_lens and batch_size of `batch`, and of each table row no more than what it shares with the
/// row before. No allocation.
///
/// `groups`: room for batch_size - 1 rows of three; `num_groups`: how many were written.
///   kInvalidArgument, kInvalidType  a length is out of range, a table is malformed or too short,
///   or
///                                   page_size < 1; nothing was written
FLASHPLAN_API Status find_shared_prefixes(const Batch& batch, int32_t page_size,
                                          const HostPageTable& table, int32_t* groups,
                                          int32_t* num_groups) noexcept;

}  // namespace flashplan
