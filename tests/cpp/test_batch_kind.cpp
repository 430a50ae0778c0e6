// SPDX-License-Identifier: Apache-2.0
// Which kernels a plan has, and which of them a batch gets.
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "fake_devices.h"
#include "fake_kernels.h"
#include "plan/kernel/batch_kind.h"
#include "plan/kernel/select_kernel.h"
#include "plan/schedule/schedule_shape.h"
#include "plan/workspace_layout.h"

namespace flashplan::test {
namespace {

/// Kernels of both families for Hopper, and a GPU that has them.
struct Hopper {
  std::vector<Kernel> kernels = {fake_kernel("sm80_bf16_d128", {90, 'a'}),
                                 fake_kernel("sm90_bf16_d128", {90, 'a'}),
                                 fake_kernel("sm90_gather_bf16_d128", {90, 'a'})};
  DeviceLimits device = h200();

  Hopper() {
    kernels[1].family = &kSm90Family;
    kernels[2].family = &kSm90GatherFamily;
    for (Kernel* kernel : {&kernels[1], &kernels[2]}) kernel->tuning = sm90_tuning(64);
    device.kernels = kernels;
  }
  /// "first" or "first, second".
  std::string choices(const AttentionOptions& options) const {
    KernelChoices choices;
    const Status status = select_kernel(options, device, &choices);
    if (!status.ok()) return status.message;
    const std::string first = choices.first.kernel.family->name;
    return choices.second ? first + ", " + choices.second->kernel.family->name : first;
  }
};

TEST(plans_have_a_kernel_for_each_kind_of_batches) {
  const Hopper hopper;
  AttentionOptions prompts = llama_on_gpu();
  prompts.max_batch_size = 16;
  prompts.max_qo_tokens = 16 * 512;
  const auto with = [&](auto change) {
    AttentionOptions o = prompts;
    change(o);
    return hopper.choices(o);
  };
  const auto decodes = [](auto& o) { o.max_qo_tokens = o.max_batch_size; };
  CHECK_EQ(hopper.choices(prompts), "sm90, sm80");
  CHECK_EQ(with([](auto& o) { o.page_size = 0; }), "sm90, sm80");
  CHECK_EQ(with([](auto& o) { o.page_size = 3; }), "sm90_gather, sm80");
  CHECK_EQ(with([](auto& o) { o.num_qo_heads = 17 * o.num_kv_heads; }), "sm90");
  CHECK_EQ(with([](auto& o) { o.batch_invariant = true; }), "sm90, sm80");
  // Decodes share prefixes.
  CHECK_EQ(with(decodes), "sm80, sm90");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.page_size = 0; }), "sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.page_size = 12; }), "sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.window_left = 100; }), "sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.batch_invariant = true; }), "sm80");
  const auto general = [](auto& o) { o.kernels = KernelGroup::kGeneral, o.batch_invariant = true; };
  CHECK_EQ(with(general), "sm80, sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), general(o); }), "sm80");
  const auto large_groups = [](auto& o) { o.num_qo_heads = 100 * o.num_kv_heads; };
  CHECK_EQ(with([&](auto& o) { large_groups(o), o.batch_invariant = true; }), "sm90, sm80");
  CHECK_EQ(with([&](auto& o) { large_groups(o), decodes(o), o.batch_invariant = true; }), "sm80");
  // With a variant or a rotation they do not. A second kernel of one family is not compiled.
  Variant variant;
  CHECK(Variant::create({.name = "v", .logits = "return x;"}, &variant).ok());
  CHECK_EQ(with([&](auto& o) { o.variant = variant; }), "sm90, sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.variant = variant; }), "sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.rope = Rope(); }), "sm80");
  CHECK_EQ(with([&](auto& o) { o.rope = Rope(); }), "sm80");
  CHECK(Variant::create({.name = "v", .key = "return x;"}, &variant).ok());
  CHECK_EQ(with([&](auto& o) { o.variant = variant; }), "sm80");
  CHECK_EQ(with([&](auto& o) { o.variant = variant, o.batch_invariant = true; }), "sm80");
  KernelChoices choices;
  CHECK(select_kernel(prompts, hopper.device, &choices).ok());
  CHECK_EQ(choices.second->num_ctas, 264);
}

TEST(chunks_of_few_and_of_many_rows) {
  Hopper hopper;
  AttentionOptions o = llama_on_gpu();
  KernelChoices choices;
  const auto chunks = [&] {
    CHECK(select_kernel(o, hopper.device, &choices).ok());
    const std::string first = std::to_string(choices.first.chunk_kv);
    return choices.second ? first + ", " + std::to_string(choices.second->chunk_kv) : first;
  };
  CHECK_EQ(chunks(), "0, 0");
  o.batch_invariant = true;
  CHECK_EQ(chunks(), "0, 512");
  o.kernels = KernelGroup::kGeneral;
  CHECK_EQ(chunks(), "4096, 512");
  o.max_qo_tokens = o.max_batch_size;
  CHECK_EQ(chunks(), "512");
  // Kernels with one size of chunks are one kernel for both kinds.
  o.max_qo_tokens = 2 * o.max_batch_size;
  for (Kernel& kernel : hopper.kernels) kernel.tuning.few_rows_chunk_kv = 0;
  CHECK_EQ(chunks(), "4096");
  o.max_qo_tokens = o.max_batch_size;
  CHECK_EQ(chunks(), "4096");
}

TEST(batch_invariant_plans_cut_only_at_chunks) {
  const Hopper hopper;
  AttentionOptions o = llama_on_gpu();
  const auto cuts = [&](const KernelChoice& choice) {
    const WorkspaceLayout layout = layout_workspace(o, choice, std::nullopt);
    return schedule_shape(o, choice, layout).cuts;
  };
  for (const bool batch_invariant : {false, true}) {
    o.batch_invariant = batch_invariant;
    KernelChoices choices;
    CHECK(select_kernel(o, hopper.device, &choices).ok());
    CHECK_EQ(cuts(choices.first), !batch_invariant);
    CHECK_EQ(layout_workspace(o, choices.first, std::nullopt).total == 0, batch_invariant);
    CHECK(cuts(*choices.second));
  }
}

Batch batch_of(const std::vector<int32_t>& qo_indptr, const std::vector<int32_t>& kv_lens) {
  return {.qo_indptr = qo_indptr.data(),
          .kv_lens = kv_lens.data(),
          .batch_size = static_cast<int32_t>(kv_lens.size())};
}

TEST(the_kind_of_a_batch) {
  AttentionOptions o = llama_on_gpu();
  o.num_qo_heads = 4 * o.num_kv_heads;
  const auto has_few_rows = [&](const std::vector<int32_t>& qo_indptr) {
    const std::vector<int32_t> kv_lens(qo_indptr.size() - 1, 100);
    return kind_of(batch_of(qo_indptr, kv_lens), o) == BatchKind::kFewRows;
  };
  CHECK(has_few_rows({0}));
  CHECK(has_few_rows({0, 1, 1, 5}));
  CHECK(!has_few_rows({0, 1, 2, 7}));
  o.num_qo_heads = 16 * o.num_kv_heads;
  CHECK(has_few_rows({0, 1}));
  o.num_qo_heads = 17 * o.num_kv_heads;
  CHECK(!has_few_rows({0, 1}));
}

TEST(the_kinds_of_the_requests_of_a_batch) {
  AttentionOptions o = llama_on_gpu();
  o.num_qo_heads = 4 * o.num_kv_heads;
  const auto kinds = [&](const std::vector<int32_t>& qo_indptr) {
    const std::vector<int32_t> kv_lens(qo_indptr.size() - 1, 100);
    const RequestKinds of = kinds_of_requests(batch_of(qo_indptr, kv_lens), o);
    return std::string(of.few_rows ? "few " : "") + (of.many_rows ? "many" : "");
  };
  CHECK_EQ(kinds({0, 0}), "");
  CHECK_EQ(kinds({0, 4}), "few ");
  CHECK_EQ(kinds({0, 5, 5}), "many");
  CHECK_EQ(kinds({0, 5, 6}), "few many");
  CHECK(!divides_batches(o));
  o.batch_invariant = true;
  CHECK(divides_batches(o));
  CHECK_EQ(kinds({0, 16}), "few ");
  CHECK_EQ(kinds({0, 17, 17}), "many");
  o.batch_invariant = false;
  o.kv_dtype = DType::kFloat8E5M2;
  CHECK(divides_batches(o));
  CHECK_EQ(kinds({0, 5, 6}), "few many");
  o.max_qo_tokens = o.max_batch_size;  // a graph keeps one of the two kernels
  CHECK(!divides_batches(o));
  o.batch_invariant = true;
  // A single query has few rows, whatever its group of heads is.
  o.num_qo_heads = 100 * o.num_kv_heads;
  CHECK_EQ(kinds({0, 1, 3}), "few many");
}

TEST(prefixes_that_may_be_worth_the_kernel_for_many_rows) {
  AttentionOptions o = llama_on_gpu();
  const std::vector<int32_t> qo_indptr = {0, 1, 2};
  const auto may_gain = [&](int32_t kv_len, int64_t num_shared_keys) {
    const std::vector<int32_t> kv_lens(2, kv_len);
    return may_gain_by_prefixes(batch_of(qo_indptr, kv_lens), o, num_shared_keys, 132);
  };
  const int32_t least = 1500 * 132 / o.num_kv_heads;
  CHECK(may_gain(least, least));
  CHECK(!may_gain(least, least - 1));
  CHECK(may_gain(4 * least, least));
  CHECK(!may_gain(4 * least + 1, least));
  o.page_size = 3;
  CHECK(!may_gain(least, least));
  o.page_size = 24;
  CHECK(may_gain(least, least));
  o.window_left = 5;
  CHECK(!may_gain(least, least));
}

}  // namespace
}  // namespace flashplan::test
