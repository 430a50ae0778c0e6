// SPDX-License-Identifier: Apache-2.0
// What the scheduler knows of the problem and of the kernel.
#pragma once

#include <cstdint>

#include "abi/mask.h"

namespace flashplan {

struct AttentionOptions;
struct KernelChoice;
struct WorkspaceLayout;

/// Predicted time, in arbitrary units, of a tile of `rows` query rows over `steps` key tiles:
///   of_tile(rows) + steps * of_step(rows)
/// the paper's alpha * l_q + beta * l_kv with the terms a kernel family measured.
struct CostModel {
  int32_t tile = 0;
  int32_t tile_row = 0;
  int32_t step = 1;
  int32_t step_row = 0;
  int32_t split = 0;
  int32_t split_row = 0;

  friend bool operator==(const CostModel&, const CostModel&) = default;

  int64_t of_tile(int32_t rows) const noexcept { return tile + int64_t{tile_row} * rows; }
  int64_t of_step(int32_t rows) const noexcept { return step + int64_t{step_row} * rows; }
  /// Of writing one partial result and merging it. A smaller gain is no reason to split.
  int64_t of_split(int32_t rows) const noexcept { return split + int64_t{split_row} * rows; }
};

/// Fixed for the life of a Plan.
struct ScheduleShape {
  int32_t num_kv_heads = 1;
  int32_t group_size = 1;  // query heads per kv head, packed: row = qo_idx * group_size + head
  Mask mask = {.causal = true};
  bool paged = false;
  int32_t tile_q = 64;   // packed query rows of a tile
  int32_t tile_kv = 64;  // keys of a step
  int32_t num_ctas = 1;
  int32_t max_partial_slots = 0;  // of tile_q partial rows
  /// Whether prefixes that requests share may be computed once for all of them.
  bool shares_prefixes = false;
  /// > 0: batch-invariant, states are formed per chunk of so many keys: tile_kv times a power of
  /// two.
  int32_t chunk_kv = 0;
  /// > 0: the row tiles of a request are dealt next to each other, head after head, in items of
  /// about so many steps: CTAs that run at the same time then read the same keys from a cache that
  /// they share. 0: all heads of a row tile stay together.
  int32_t item_steps = 0;
  /// > 0: before a row tile of such a request is cut, a queue may exceed its share by one part in
  /// so many. Pieces of row tiles do not read the same keys at the same time.
  int32_t uncut_part = 0;
  CostModel cost;

  /// Steps between possible cuts: a power of two.
  int32_t granule() const noexcept { return chunk_kv > 0 ? chunk_kv / tile_kv : 1; }
};

/// Whether plans of `choice` compute shared prefixes once. Not where rows must not depend on their
/// neighbours, nor with a window, which most prefixes are outside of.
bool shares_prefixes(const AttentionOptions& options, const KernelChoice& choice) noexcept;

/// How many requests and shared prefixes of a batch may take part in sharing: a request has fewer
/// than two of them, and they have up to 65536 merges, which bounds the memory of large batches.
inline int32_t most_sharing(int32_t max_batch_size, int32_t num_kv_heads) noexcept {
  constexpr int32_t kMostMerges = 1 << 16;
  const int32_t most = kMostMerges / num_kv_heads;
  return max_batch_size < most / 2 ? 2 * max_batch_size : most;
}

/// What the scheduler knows of a plan.
ScheduleShape schedule_shape(const AttentionOptions& options, const KernelChoice& choice,
                             const WorkspaceLayout& layout);

}  // namespace flashplan
