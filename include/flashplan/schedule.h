// SPDX-License-Identifier: Apache-2.0
// The schedule of a Plan, for inspection.
#pragma once

#include <cstdint>

namespace flashplan {

/// The unit of work: packed query rows [row_tile * tile_q, (row_tile + 1) * tile_q) of one segment,
/// as far as it has these rows, against keys [kv_begin, kv_end), for num_kv_heads consecutive kv
/// heads. Its bytes are copied to the device as they are.
struct WorkTile {
  int32_t segment;  // the request; from batch_size on: a shared prefix
  int32_t row_tile;
  int32_t kv_head;       // the first of num_kv_heads
  int32_t num_kv_heads;  // if the keys are split: 1, or 2 if a kernel reads two heads at once
  int32_t kv_begin;
  int32_t kv_end;
  int32_t partial_row;  // where its partial results begin, head after head; -1: it writes o and lse
  int32_t merge;  // number of the first head's merge; those of the other heads follow; -1: no merge
};

/// Work queues: CTA c runs tiles [cta_indptr[c], cta_indptr[c + 1]) in order. Points into the Plan;
/// valid until its next plan().
struct ScheduleView {
  int32_t num_ctas = 0;
  int32_t tile_q = 0;      // packed query rows of a tile: row = qo_idx * group_size + head in group
  int32_t tile_kv = 0;     // keys that a kernel reads at once: a step
  int32_t num_tokens = 0;  // qo_indptr[batch_size]
  int32_t num_partial_rows = 0;         // rows of partial results in use
  const int32_t* cta_indptr = nullptr;  // [num_ctas + 1]
  const int64_t* cta_cost = nullptr;    // [num_ctas] predicted, in the kernel's unit
  const WorkTile* tiles = nullptr;      // [cta_indptr[num_ctas]]
};

}  // namespace flashplan
