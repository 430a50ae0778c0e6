// SPDX-License-Identifier: Apache-2.0
// The layout of the caller's workspace. One walk over the buffers both counts and places them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "flashplan/plan.h"
#include "plan/kernel/select_kernel.h"

namespace flashplan {

/// Offsets in bytes from the start of the workspace, with the shapes of the buffers there. In these
/// shapes head_dim_vo is the option on the CPU, and on a GPU the head dim that the kernel was
/// compiled for.
struct WorkspaceLayout {
  std::size_t arrivals = 0;     // [merges] Arrivals, on the CPU only
  std::size_t scratch = 0;      // [num_ctas, scratch_bytes]: a row for each CPU worker or GPU queue
  std::size_t partial_o = 0;    // [max_partial_slots, tile_q, head_dim_vo] float32
  std::size_t partial_lse = 0;  // [max_partial_slots, tile_q] float32
  // Memory for prepared keys and values:
  std::size_t prepared_keys = 0;    // [max_prepared_tiles, num_kv_heads, prepared_key_bytes]
  std::size_t prepared_values = 0;  // [max_prepared_tiles, num_kv_heads, prepared_value_bytes]
  std::size_t total = 0;
  std::size_t scratch_bytes = 0;
  int32_t max_partial_slots = 0;
  int32_t max_prepared_tiles = 0;
};

/// Lays out the workspace for the plan's bounds. If that takes more than `limit` bytes, the layout
/// has fewer prepared tiles, down to none, and then fewer partial slots, down to none. If `total`
/// is still over the limit, the fixed buffers do not fit.
WorkspaceLayout layout_workspace(const AttentionOptions& options, const KernelChoice& choice,
                                 std::optional<std::size_t> limit) noexcept;

/// The layouts of a plan's kernels.
struct WorkspaceLayouts {
  WorkspaceLayout first;
  WorkspaceLayout second;
  std::size_t total = 0;  // bytes of the workspace
};

/// Where batches are divided between two kernels, both run at the same time, and the buffers of the
/// second kernel lie behind those of the first. If there is a limit, the second kernel, whose
/// requests have few rows, gets at most a quarter of it. Other plans run one kernel at a time, and
/// all their kernels use the same memory.
WorkspaceLayouts layout_workspace(const AttentionOptions& options, const KernelChoices& choices,
                                  std::optional<std::size_t> limit) noexcept;

}  // namespace flashplan
