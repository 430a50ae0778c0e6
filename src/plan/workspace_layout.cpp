// SPDX-License-Identifier: Apache-2.0
#include "plan/workspace_layout.h"

#include <algorithm>

#include "abi/work_queue.h"
#include "plan/kernel/batch_kind.h"
#include "plan/prepared_kv.h"
#include "plan/schedule/division.h"
#include "plan/schedule/schedule_shape.h"
#include "plan/workspace_tuning.h"

namespace flashplan {
namespace {

/// The largest number of merges that sharing prefixes can need.
std::size_t sharing_merges(const AttentionOptions& options, const KernelChoice& choice) {
  if (!shares_prefixes(options, choice)) return 0;
  return static_cast<std::size_t>(most_sharing(options.max_batch_size, options.num_kv_heads)) *
         static_cast<std::size_t>(options.num_kv_heads);
}

WorkspaceLayout place(const AttentionOptions& options, const KernelChoice& choice,
                      int32_t num_slots, int32_t num_prepared_tiles) {
  const Kernel& kernel = choice.kernel;
  WorkspaceLayout layout;
  const auto add = [&](std::size_t bytes) {
    const std::size_t offset = layout.total;
    layout.total += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return offset;
  };
  const auto num_ctas = static_cast<std::size_t>(choice.num_ctas);
  const auto rows =
      static_cast<std::size_t>(num_slots) * static_cast<std::size_t>(kernel.geometry.tile_q);
  const bool on_cpu = kernel.family->device == DeviceType::kCpu;
  const auto head_dim = static_cast<std::size_t>(on_cpu ? options.head_dim_vo : kernel.head_dim_vo);
  layout.scratch_bytes = kernel.family->scratch_bytes(kernel, options);
  layout.max_partial_slots = num_slots;
  layout.max_prepared_tiles = num_prepared_tiles;
  layout.arrivals =
      add(on_cpu ? (num_ctas + sharing_merges(options, choice)) * sizeof(Arrivals) : 0);
  layout.scratch = add(num_ctas * layout.scratch_bytes);
  layout.partial_o = add(rows * head_dim * sizeof(float));
  layout.partial_lse = add(rows * sizeof(float));
  const std::size_t prepared_heads =
      static_cast<std::size_t>(num_prepared_tiles) * static_cast<std::size_t>(options.num_kv_heads);
  const auto bytes_of = [](int32_t bytes) { return static_cast<std::size_t>(bytes); };
  layout.prepared_keys = add(prepared_heads * bytes_of(kernel.geometry.prepared_key_bytes));
  layout.prepared_values = add(prepared_heads * bytes_of(kernel.geometry.prepared_value_bytes));
  return layout;
}

/// How many slots for partial results the workspace should have. Batch-invariant plans may write
/// one partial result for each chunk of a request, so their long requests need more.
int32_t wanted_slots(const AttentionOptions& options, const KernelChoice& choice) {
  constexpr WorkspaceTuning kTuning = kWorkspaceTuning;
  if (choice.chunk_kv == 0) {
    if (options.batch_invariant) return 0;  // nothing is cut
    int32_t for_cuts = choice.num_ctas * kTuning.slots_per_queue;
    if (!shares_prefixes(options, choice)) return for_cuts;
    // Prefixes that come first in the queues are cut into about one piece for each queue, and each
    // piece takes a slot.
    if (choice.kernel.tuning.item_steps > 0) for_cuts += choice.num_ctas;
    const int64_t rows = kTuning.states_of_row * options.max_batch_size * options.num_qo_heads;
    return for_cuts + ceil_divide(static_cast<int32_t>(std::min(rows, kTuning.most_state_rows)),
                                  choice.kernel.geometry.tile_q);
  }
  const int32_t chunk_kv = std::max(choice.chunk_kv, choice.kernel.tuning.chunk_kv);
  return choice.num_ctas *
         std::max(kTuning.slots_per_queue, kTuning.chunked_keys_per_queue / chunk_kv);
}

}  // namespace

WorkspaceLayout layout_workspace(const AttentionOptions& options, const KernelChoice& choice,
                                 std::optional<std::size_t> limit) noexcept {
  const int32_t wanted = wanted_slots(options, choice);
  const int32_t wanted_tiles = most_prepared_tiles(options, choice.kernel);
  const WorkspaceLayout layout = place(options, choice, wanted, wanted_tiles);
  if (!limit || layout.total <= *limit) return layout;

  const std::size_t without_tiles = place(options, choice, wanted, 0).total;
  if (without_tiles <= *limit) {
    const std::size_t with_one = place(options, choice, wanted, 1).total;
    const std::size_t num_tiles = (*limit - without_tiles) / (with_one - without_tiles);
    return place(options, choice, wanted,
                 static_cast<int32_t>(std::min(num_tiles, static_cast<std::size_t>(wanted_tiles))));
  }
  const std::size_t without_slots = place(options, choice, 0, 0).total;
  const std::size_t with_one = place(options, choice, 1, 0).total;
  // Only the two buffers of partial results grow with the slots. Their sizes are rounded up, so n
  // slots take at most n * per_slot bytes.
  const std::size_t per_slot = with_one - without_slots;
  const std::size_t room = *limit > without_slots ? *limit - without_slots : 0;
  return place(options, choice,
               static_cast<int32_t>(
                   std::min<std::size_t>(room / per_slot, static_cast<std::size_t>(wanted))),
               0);
}

WorkspaceLayouts layout_workspace(const AttentionOptions& options, const KernelChoices& choices,
                                  std::optional<std::size_t> limit) noexcept {
  const auto& [first, second] = choices;
  WorkspaceLayouts layouts;
  if (!second || !divides_batches(options)) {
    layouts.first = layout_workspace(options, first, limit);
    if (second) layouts.second = layout_workspace(options, *second, limit);
    layouts.total = std::max(layouts.first.total, layouts.second.total);
    return layouts;
  }
  constexpr std::size_t kSecondPart = 4;
  const auto part = limit ? std::optional(*limit / kSecondPart) : std::nullopt;
  layouts.second = layout_workspace(options, *second, part);
  const std::size_t taken = layouts.second.total;
  if (limit) limit = *limit - std::min(*limit, taken);
  layouts.first = layout_workspace(options, first, limit);
  WorkspaceLayout& behind = layouts.second;
  for (std::size_t* offset :
       {&behind.arrivals, &behind.scratch, &behind.partial_o, &behind.partial_lse,
        &behind.prepared_keys, &behind.prepared_values, &behind.total}) {
    *offset += layouts.first.total;
  }
  layouts.total = behind.total;
  return layouts;
}

}  // namespace flashplan
