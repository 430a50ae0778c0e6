// SPDX-License-Identifier: Apache-2.0
// Golden choices: what select_kernel() gives for options that users have.
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "plan/select_kernel.h"
#include "plan/workspace_layout.h"

namespace flashplan::test {
namespace {

AttentionOptions llama() {
  AttentionOptions o;
  o.num_qo_heads = 32;
  o.num_kv_heads = 8;
  o.head_dim_qk = o.head_dim_vo = 128;
  o.page_size = 16;
  return o;
}

std::string text(const KernelConfig& c) {
  std::ostringstream out;
  out << (c.family == KernelFamily::kCpu ? "cpu" : "?") << " kv " << static_cast<int>(c.kv_dtype)
      << " tile " << c.tile_q << "x" << c.tile_kv << " ctas " << c.num_ctas << " chunk "
      << c.chunk_kv << " cost " << c.cost.tile << " " << c.cost.tile_row << " " << c.cost.step
      << " " << c.cost.step_row << " " << c.cost.split;
  return out.str();
}

std::string choice(const AttentionOptions& options, int32_t num_processors = 2) {
  KernelConfig config;
  const Status status = select_kernel(options, {.num_processors = num_processors}, &config);
  return status.ok() ? text(config) : status.message;
}

TEST(golden_choices) {
  AttentionOptions o = llama();
  CHECK_EQ(choice(o), "cpu kv 2 tile 128x32 ctas 8 chunk 0 cost 8 1 8 1 16");
  CHECK_EQ(choice(o, 16), "cpu kv 2 tile 128x32 ctas 64 chunk 0 cost 8 1 8 1 16");
  o.kv_dtype = DType::kFloat8E4M3;
  CHECK_EQ(choice(o), "cpu kv 3 tile 128x32 ctas 8 chunk 0 cost 8 1 8 1 16");
  o.num_ctas = 132;
  CHECK_EQ(choice(o), "cpu kv 3 tile 128x32 ctas 132 chunk 0 cost 8 1 8 1 16");
  o.batch_invariant = true;
  CHECK_EQ(choice(o), "cpu kv 3 tile 128x32 ctas 132 chunk 1024 cost 8 1 8 1 16");
}

// What the request is made of does not change how its keys are cut, or results would depend on it.
TEST(chunks_of_batch_invariance_depend_on_nothing_else) {
  AttentionOptions o = llama();
  o.batch_invariant = true;
  KernelConfig first;
  CHECK(select_kernel(o, {.num_processors = 2}, &first).ok());
  for (const int32_t num_ctas : {0, 1, 300}) {
    for (const int32_t processors : {1, 64}) {
      o.num_ctas = num_ctas;
      o.max_batch_size = processors;
      KernelConfig config;
      CHECK(select_kernel(o, {.num_processors = processors}, &config).ok());
      CHECK_EQ(config.chunk_kv, first.chunk_kv);
      CHECK_EQ(config.tile_q, first.tile_q);
      CHECK_EQ(config.tile_kv, first.tile_kv);
    }
  }
}

TEST(what_the_scheduler_assumes_of_every_choice) {
  for (const int32_t head_dim : {1, 64, 128, 576, 4096}) {
    for (const int32_t group_size : {1, 3, 128}) {
      for (const bool batch_invariant : {false, true}) {
        AttentionOptions o = llama();
        o.head_dim_qk = o.head_dim_vo = head_dim;
        o.num_qo_heads = group_size * o.num_kv_heads;
        o.batch_invariant = batch_invariant;
        KernelConfig c;
        CHECK(select_kernel(o, {.num_processors = 2}, &c).ok());
        CHECK(c.tile_q > 0 && (c.tile_q & (c.tile_q - 1)) == 0);
        CHECK(c.tile_kv > 0 && (c.tile_kv & (c.tile_kv - 1)) == 0);
        CHECK_EQ(c.chunk_kv % c.tile_kv, 0);
        CHECK_EQ(c.chunk_kv > 0, batch_invariant);
        CHECK(c.num_ctas >= 1);
        CHECK(c.cost.step + c.cost.step_row > 0);
      }
    }
  }
}

TEST(same_answer_from_is_supported_and_create) {
  AttentionOptions good = llama();
  AttentionOptions bad_dtype = llama();
  bad_dtype.q_dtype = DType::kInt32;
  AttentionOptions bad_device = llama();
  bad_device.device = {DeviceType::kCuda, 1};
  AttentionOptions bad_heads = llama();
  bad_heads.num_kv_heads = 5;
  for (const AttentionOptions& options : {good, bad_dtype, bad_device, bad_heads}) {
    Plan plan;
    const Status asked = is_supported(options);
    const Status created = Plan::create(options, &plan);
    CHECK_EQ(static_cast<int>(asked.code), static_cast<int>(created.code));
    CHECK_EQ(std::string(asked.message), created.message);
  }
}

TEST(workspace_layout) {
  for (const bool batch_invariant : {false, true}) {
    AttentionOptions o = llama();
    o.num_ctas = 132;
    o.batch_invariant = batch_invariant;
    KernelConfig c;
    CHECK(select_kernel(o, {.num_processors = 2}, &c).ok());
    const WorkspaceLayout all = layout_workspace(o, c, std::nullopt);
    CHECK(all.max_partial_slots >= 2 * c.num_ctas);
    for (const size_t offset : {all.arrivals, all.scratch, all.partial_o, all.partial_lse}) {
      CHECK_EQ(offset % kWorkspaceAlignment, 0U);
    }
    const auto rows = static_cast<size_t>(all.max_partial_slots * c.tile_q);
    CHECK(all.scratch >= all.arrivals + 132 * sizeof(int32_t));
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

}  // namespace
}  // namespace flashplan::test
