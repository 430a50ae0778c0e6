// SPDX-License-Identifier: Apache-2.0
// Which kernels a plan has, and which of them a batch gets.
#include <string>
#include <vector>

#include "check.h"
#include "fake_devices.h"
#include "fake_kernels.h"
#include "plan/batch_kind.h"
#include "plan/select_kernel.h"

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
  CHECK_EQ(with([](auto& o) { o.batch_invariant = true; }), "sm80");
  // Decodes share prefixes.
  CHECK_EQ(with(decodes), "sm80, sm90");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.page_size = 0; }), "sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.page_size = 12; }), "sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.window_left = 100; }), "sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.batch_invariant = true; }), "sm80");
  // One kernel where it is compiled for the plan.
  Variant variant;
  CHECK(Variant::create({.name = "v", .logits = "return x;"}, &variant).ok());
  CHECK_EQ(with([&](auto& o) { o.variant = variant; }), "sm90");
  CHECK_EQ(with([&](auto& o) { o.rope = Rope(); }), "sm80");
  KernelChoices choices;
  CHECK(select_kernel(prompts, hopper.device, &choices).ok());
  CHECK_EQ(choices.second->num_ctas, 264);
}

TEST(the_kind_of_a_batch) {
  AttentionOptions o = llama_on_gpu();
  o.num_qo_heads = 4 * o.num_kv_heads;
  const auto kind = [&](std::vector<int32_t> qo_lens, int64_t num_shared_keys = 0) {
    std::vector<int32_t> indptr = {0};
    for (const int32_t len : qo_lens) indptr.push_back(indptr.back() + len);
    const Batch batch = {.qo_indptr = indptr.data(),
                         .batch_size = static_cast<int32_t>(qo_lens.size())};
    return kind_of(batch, o, num_shared_keys, 132) == BatchKind::kFewRows ? "few" : "many";
  };
  CHECK_EQ(kind({}), "few");
  CHECK_EQ(kind({1, 0, 4}), "few");
  CHECK_EQ(kind({1, 1, 5}), "many");
  const std::vector<int32_t> decodes(64, 1);
  const int64_t lost = 800 * 132 / o.num_kv_heads + 660 * 64;
  CHECK_EQ(kind(decodes, lost), "few");
  CHECK_EQ(kind(decodes, lost + 1), "many");
  o.page_size = 3;
  CHECK_EQ(kind(decodes, lost + 1), "few");
  o.num_qo_heads = 17 * o.num_kv_heads;
  CHECK_EQ(kind({1}), "many");
}

}  // namespace
}  // namespace flashplan::test
