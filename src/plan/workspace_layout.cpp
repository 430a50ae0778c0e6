// SPDX-License-Identifier: Apache-2.0
#include "plan/workspace_layout.h"

#include <algorithm>

#include "cpu/scratch.h"
#include "kernels/instances.h"

namespace flashplan {
namespace {

/// What one worker keeps for itself.
std::size_t scratch_bytes(const AttentionOptions& options, const KernelConfig& config) {
  if (config.family == KernelFamily::kCpu) {
    return cpu::scratch_bytes(config.tile_q, config.tile_kv, options.head_dim_qk,
                              options.head_dim_vo);
  }
  // Batch-invariant: the state that those of the chunks are merged into. The thread that has four
  // dims of a row merges them alone: it keeps them, and the row's maximum and sum beside them. Any
  // other state stays in registers.
  if (config.chunk_kv == 0) return 0;
  const auto quads = static_cast<std::size_t>(config.tile_q) *
                     static_cast<std::size_t>(config.instance->head_dim_vo) / 4;
  const std::size_t bytes = quads * (4 + 2) * sizeof(float);
  return (bytes + 15) / 16 * 16;
}

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
  const bool on_cpu = config.family == KernelFamily::kCpu;
  const auto head_dim =
      static_cast<std::size_t>(on_cpu ? options.head_dim_vo : config.instance->head_dim_vo);
  layout.scratch_bytes = scratch_bytes(options, config);
  layout.max_partial_slots = num_slots;
  layout.arrivals = add(on_cpu ? num_ctas * sizeof(int32_t) : 0);
  layout.scratch = add(num_ctas * layout.scratch_bytes);
  layout.partial_o = add(rows * head_dim * sizeof(float));
  layout.partial_lse = add(rows * sizeof(float));
  return layout;
}

// The paper's bound: each queue ends at most one cut, and each cut makes two partial results
// (Appendix D.3). Batch-invariant states are per chunk instead, so long requests want more.
int32_t wanted_slots(const KernelConfig& config) {
  constexpr int32_t kSlotsPerCta = 2;
  if (config.chunk_kv == 0) return config.num_ctas * kSlotsPerCta;
  constexpr int32_t kKeysPerCta = 16384;  // of one head, whose chunks all have a slot
  return config.num_ctas * std::max(kSlotsPerCta, kKeysPerCta / config.chunk_kv);
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
