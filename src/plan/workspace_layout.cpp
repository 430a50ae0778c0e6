// SPDX-License-Identifier: Apache-2.0
#include "plan/workspace_layout.h"

#include <algorithm>

#include "cpu/scratch.h"

namespace flashplan {
namespace {

WorkspaceLayout place(const AttentionOptions& options, const KernelConfig& config,
                      int32_t num_slots) {
  WorkspaceLayout layout;
  const auto add = [&](std::size_t bytes) {
    const std::size_t offset = layout.total;
    layout.total += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return offset;
  };
  const auto num_ctas = static_cast<std::size_t>(config.num_ctas);
  const auto rows = static_cast<std::size_t>(num_slots) * static_cast<std::size_t>(config.tile_q);
  const auto head_dim = static_cast<std::size_t>(options.head_dim_vo);
  layout.scratch_bytes =
      cpu::scratch_bytes(config.tile_q, config.tile_kv, options.head_dim_qk, options.head_dim_vo);
  layout.max_partial_slots = num_slots;
  layout.arrivals = add(num_ctas * sizeof(int32_t));
  layout.scratch = add(num_ctas * layout.scratch_bytes);
  layout.partial_o = add(rows * head_dim * sizeof(float));
  layout.partial_lse = add(rows * sizeof(float));
  return layout;
}

// The paper's bound: each queue ends at most one cut, and each cut makes two partial results
// (Appendix D.3). Batch-invariant states are per chunk instead, so long requests want more.
int32_t wanted_slots(const KernelConfig& config) {
  constexpr int32_t kSlotsPerCta = 2;
  constexpr int32_t kChunkSlotsPerCta = 16;
  return config.num_ctas * (config.chunk_kv > 0 ? kChunkSlotsPerCta : kSlotsPerCta);
}

}  // namespace

WorkspaceLayout layout_workspace(const AttentionOptions& options, const KernelConfig& config,
                                 std::optional<std::size_t> limit) noexcept {
  const int32_t wanted = wanted_slots(config);
  WorkspaceLayout layout = place(options, config, wanted);
  if (!limit || layout.total <= *limit) return layout;

  const std::size_t without_slots = place(options, config, 0).total;
  const std::size_t with_one = place(options, config, 1).total;
  const std::size_t per_slot = with_one - without_slots;  // rounded up, so a safe estimate
  const std::size_t room = *limit > without_slots ? *limit - without_slots : 0;
  return place(options, config,
               static_cast<int32_t>(
                   std::min<std::size_t>(room / per_slot, static_cast<std::size_t>(wanted))));
}

}  // namespace flashplan
