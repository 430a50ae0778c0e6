// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule/schedule_shape.h"

#include "flashplan/plan.h"
#include "plan/kernel/kernel.h"
#include "plan/workspace_layout.h"

namespace flashplan {

bool may_share_prefixes(const AttentionOptions& options) noexcept {
  return !options.batch_invariant && options.window_left < 0 && options.variant.empty() &&
         !options.rope && options.topk == 0;
}

int32_t most_requests(const AttentionOptions& options) noexcept {
  return options.topk > 0 ? options.max_qo_tokens : options.max_batch_size;
}

bool shares_prefixes(const AttentionOptions& options, const KernelChoice& choice) noexcept {
  return choice.kernel.family->shares_prefixes && may_share_prefixes(options);
}

ScheduleShape schedule_shape(const AttentionOptions& options, const KernelChoice& choice,
                             const WorkspaceLayout& layout) {
  ScheduleShape shape;
  shape.num_kv_heads = options.num_kv_heads;
  shape.group_size = options.num_qo_heads / options.num_kv_heads;
  shape.paged = options.page_size > 0;
  shape.mask = {options.causal, options.window_left};
  shape.tile_q = choice.kernel.geometry.tile_q;
  shape.tile_kv = choice.kernel.geometry.tile_kv;
  shape.heads_at_once = pairs_heads(choice.kernel, options) ? 2 : 1;
  shape.num_ctas = choice.num_ctas;
  shape.max_partial_slots = layout.max_partial_slots;
  shape.shares_prefixes = shares_prefixes(options, choice);
  shape.merges_readers_last = choice.kernel.family->merges_readers_last;
  shape.chunk_kv = choice.chunk_kv;
  shape.cuts = !options.batch_invariant || choice.chunk_kv > 0;
  shape.item_steps = choice.kernel.tuning.item_steps;
  shape.uncut_part = choice.kernel.tuning.uncut_part;
  shape.prepare_reads = choice.kernel.tuning.prepare_reads;
  shape.prepares_some = choice.kernel.geometry.prepares_some;
  shape.cost = choice.kernel.tuning.cost;
  return shape;
}

}  // namespace flashplan
