// SPDX-License-Identifier: Apache-2.0
// The layout of the workspace: it holds what the bounds ask for, and keeps any limit.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>

#include "abi/work_queue.h"
#include "check.h"
#include "fake_devices.h"
#include "plan/kernel/select_kernel.h"
#include "plan/workspace_layout.h"

namespace flashplan::test {
namespace {

TEST(workspace_bytes_needs_a_place) {
  const Status status = workspace_bytes(llama(), nullptr);
  CHECK_EQ(static_cast<int>(status.code), static_cast<int>(StatusCode::kInvalidArgument));
  CHECK_EQ(std::string(status.message), "bytes: expected a pointer, got null");
}

TEST(workspace_layout) {
  for (const bool batch_invariant : {false, true}) {
    AttentionOptions o = llama();
    o.num_ctas = 132;
    o.batch_invariant = batch_invariant;
    KernelChoices choices;
    CHECK(select_kernel(o, cpu_of(2), &choices).ok());
    const KernelChoice& c = choices.first;
    const WorkspaceLayout all = layout_workspace(o, c, std::nullopt);
    CHECK(all.max_partial_slots >= 2 * c.num_ctas);
    for (const size_t offset : {all.arrivals, all.scratch, all.partial_o, all.partial_lse}) {
      CHECK_EQ(offset % kWorkspaceAlignment, 0U);
    }
    const auto rows = static_cast<size_t>(all.max_partial_slots * c.kernel.geometry.tile_q);
    CHECK(all.scratch >= all.arrivals + 132 * sizeof(Arrivals));
    CHECK(all.partial_o >= all.scratch + 132 * all.scratch_bytes);
    CHECK(all.partial_lse >= all.partial_o + rows * 128 * sizeof(float));
    CHECK(all.total >= all.partial_lse + rows * sizeof(float));
    // Any limit is kept, down to the least there can be, and as many slots as fit are there.
    int32_t slots = all.max_partial_slots;
    for (size_t limit = all.total; slots > 0; limit -= std::min<size_t>(limit, 100000)) {
      const WorkspaceLayout less = layout_workspace(o, c, limit);
      CHECK(less.total <= limit || less.max_partial_slots == 0);
      CHECK(less.max_partial_slots <= slots);
      slots = less.max_partial_slots;
    }
    CHECK(layout_workspace(o, c, 0).total > 0);
    CHECK_EQ(layout_workspace(o, c, 0).max_partial_slots, 0);
    CHECK_EQ(layout_workspace(o, c, all.total).max_partial_slots, all.max_partial_slots);
  }
}

TEST(workspace_layout_on_a_gpu) {
  AttentionOptions o = llama_on_gpu();
  o.head_dim_qk = o.head_dim_vo = 100;  // rows are as long as the kernel's, 128
  KernelChoices choices;
  CHECK(select_kernel(o, h200(), &choices).ok());
  const KernelChoice& c = choices.first;
  WorkspaceLayout layout = layout_workspace(o, c, std::nullopt);
  // For cuts of requests and of prefixes, and for four partial results of a decode's rows.
  const int32_t slots = 3 * 264 + 4 * o.max_batch_size * o.num_qo_heads / 128;
  const size_t rows = static_cast<size_t>(slots) * 128;
  CHECK_EQ(layout.max_partial_slots, slots);
  CHECK_EQ(layout.scratch_bytes, 0U);
  CHECK_EQ(layout.total, rows * (128 + 1) * sizeof(float));
  CHECK_EQ(layout_workspace(o, c, 0).total, 0U);  // nothing is needed but partial results

  o.batch_invariant = true;
  CHECK(select_kernel(o, h200(), &choices).ok());
  layout = layout_workspace(o, c, std::nullopt);
  CHECK_EQ(layout.scratch_bytes, size_t{128} * 128 * 6);  // 4 floats of o and 2 for each 4 dims
  CHECK_EQ(layout.partial_o - layout.scratch, 264 * layout.scratch_bytes);
  CHECK_EQ(layout_workspace(o, c, 0).total, 264 * layout.scratch_bytes);
}

}  // namespace
}  // namespace flashplan::test
