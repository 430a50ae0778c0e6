// SPDX-License-Identifier: Apache-2.0
// The kernel family that select_kernel() chooses.
#include <string>
#include <vector>

#include "check.h"
#include "chosen_kernel.h"
#include "fake_devices.h"
#include "fake_kernels.h"
#include "plan/kernel/select_kernel.h"

namespace flashplan::test {
namespace {

TEST(the_preferred_family_and_the_one_that_is_named) {
  KernelFamily newer = kSm80Family;
  newer.name = "sm90";
  newer.preference = [](const AttentionOptions&, BatchKind) noexcept { return 1; };
  std::vector<Kernel> both = kernels();
  for (const int32_t head_dim : {128, 256}) {  // the first one is the smallest that serves
    Kernel kernel = fake_kernel("new_d128", {90, 'a'});
    kernel.family = &newer;
    kernel.head_dim_qk = kernel.head_dim_vo = head_dim;
    both.push_back(kernel);
  }
  DeviceLimits device = h200();
  device.kernels = both;
  const AttentionOptions o = llama_on_gpu();
  CHECK_EQ(gpu_choice(o, device).substr(0, 13), "new_d128 sm90");
  device.family = "sm80";
  CHECK_EQ(gpu_choice(o, device).substr(0, 14), "bf16_d128 sm80");
  device.family = "sm90";
  AttentionOptions softcap = o;
  softcap.softcap = 30.0F;
  CHECK_EQ(gpu_choice(softcap, device), "softcap: expected 0 (compiled in for cuda), got 30");
  device.family = "sm70";
  CHECK_EQ(gpu_choice(o, device), "FLASHPLAN_KERNEL_FAMILY: expected sm80, sm90, got sm70");
  // Another family is chosen for options or GPUs that the preferred one does not support.
  device.family = {};
  CHECK_EQ(gpu_choice(softcap, device).substr(0, 22), "bf16_d128_softcap sm80");
  device.major = 8;
  CHECK_EQ(gpu_choice(o, device).substr(0, 14), "bf16_d128 sm80");
}

TEST(each_family_that_the_device_runs_is_asked) {
  std::vector<Kernel> all = kernels();
  Kernel hopper = fake_kernel("sm90_bf16_d128", {90, 'a'});
  hopper.family = &kSm90Family;
  all.push_back(hopper);
  hopper.softcap = true;
  all.push_back(hopper);
  DeviceLimits device = h200();
  device.kernels = all;
  const auto answers = [&](const AttentionOptions& options) {
    std::string text;
    for (const FamilyAnswer& answer : ask_families(options, device)) {
      text += std::string(answer.family->name) + ": " + answer.status.message + "\n";
    }
    return text;
  };
  AttentionOptions options = llama_on_gpu();
  CHECK_EQ(answers(options), "sm80: \nsm90: \n");
  options.batch_invariant = true;
  CHECK_EQ(answers(options), "sm80: \nsm90: \n");
  options.batch_invariant = false;
  options.head_dim_qk = 256;
  CHECK_EQ(answers(options),
           "sm80: \nsm90: head_dim_qk, head_dim_vo: expected up to (128, 128) (compiled in for "
           "cuda), got (256, 128)\n");
  device.family = "sm80";
  CHECK_EQ(answers(options), "sm80: \n");
  device.family = {};
  device.major = 8;
  CHECK_EQ(answers(options), "sm80: \n");
}

TEST(the_hopper_family_is_for_more_than_few_rows) {
  std::vector<Kernel> all = kernels();
  Kernel hopper = fake_kernel("sm90_bf16_d128", {90, 'a'});
  hopper.family = &kSm90Family;
  hopper.rotating_geometry = hopper.geometry;
  hopper.rotating_geometry->threads += 128;
  all.push_back(hopper);
  hopper.head_dim_qk = 192;  // serves 128 dims, too, with zeros
  all.push_back(hopper);
  Kernel gathers = fake_kernel("sm90_gather_bf16_d128", {90, 'a'});
  gathers.family = &kSm90GatherFamily;
  all.push_back(gathers);
  Kernel widens = fake_kernel("sm90_widen_bf16_e4m3_d128", {90, 'a'});
  widens.family = &kSm90WidenFamily;
  widens.kv_dtype = DType::kFloat8E4M3;
  all.push_back(widens);
  widens.head_dim_qk = widens.head_dim_vo = 256;
  all.push_back(widens);
  widens.family = &kSm80Family;
  all.push_back(widens);
  DeviceLimits device = h200();
  device.kernels = all;
  AttentionOptions prompts = llama_on_gpu();
  prompts.max_batch_size = 16;
  prompts.max_qo_tokens = 16 * 512;
  const auto family = [&](const AttentionOptions& o) {
    const std::string choice = gpu_choice(o, device);
    const auto begin = choice.find(' ') + 1;
    return choice.substr(begin, choice.find_first_of(" ,:", begin) - begin);
  };
  const auto with = [&](auto change) {
    AttentionOptions o = prompts;
    change(o);
    return family(o);
  };
  CHECK_EQ(family(prompts), "sm90");
  CHECK_EQ(with([](auto& o) { o.page_size = 0; }), "sm90");
  CHECK_EQ(with([](auto& o) { o.page_size = 24; }), "sm90");
  const auto small_pages = [](auto& o) { o.page_size = 4; };
  CHECK_EQ(with(small_pages), "sm90_gather");
  CHECK_EQ(with([](auto& o) { o.page_size = 12; }), "sm90_gather");
  const auto small_cache = [](auto& o) { o.kv_dtype = DType::kFloat8E4M3; };
  CHECK_EQ(with(small_cache), "sm90_widen");
  CHECK_EQ(with([&](auto& o) { small_pages(o), small_cache(o); }), "sm90_widen");
  CHECK_EQ(with([&](auto& o) { small_cache(o), o.page_size = 0; }), "sm90_widen");
  CHECK_EQ(with([&](auto& o) { small_cache(o), o.batch_invariant = true; }), "sm90_widen");
  const auto wide_heads = [](auto& o) { o.head_dim_qk = o.head_dim_vo = 256; };
  CHECK_EQ(with([&](auto& o) { small_cache(o), wide_heads(o); }), "sm90_widen");
  CHECK_EQ(with([&](auto& o) { small_cache(o), wide_heads(o), o.page_size = 0; }), "sm80");
  CHECK_EQ(with([&](auto& o) { small_pages(o), o.batch_invariant = true; }), "sm90_gather");
  CHECK_EQ(with([&](auto& o) { small_pages(o), o.rope = Rope(); }), "sm80");
  Variant variant;
  CHECK(Variant::create({.name = "v", .logits = "return x;"}, &variant).ok());
  CHECK_EQ(with([&](auto& o) { small_pages(o), o.variant = variant; }), "sm80");
  const auto decodes = [](auto& o) { o.max_qo_tokens = o.max_batch_size; };
  CHECK_EQ(with(decodes), "sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), small_pages(o); }), "sm80");
  CHECK_EQ(with([&](auto& o) { decodes(o), small_cache(o); }), "sm80");
  CHECK_EQ(with([](auto& o) { o.max_qo_tokens = o.max_batch_size + 1; }), "sm90");
  const auto of_group = [&](int32_t group) {
    return with([&](auto& o) {
      decodes(o);
      o.num_qo_heads = group * o.num_kv_heads;
    });
  };
  CHECK_EQ(of_group(16), "sm80");
  CHECK_EQ(of_group(17), "sm90");
  CHECK_EQ(with([](auto& o) { o.batch_invariant = true; }), "sm90");
  CHECK_EQ(with([&](auto& o) { decodes(o), o.batch_invariant = true; }), "sm80");
  CHECK_EQ(with([](auto& o) { o.custom_mask = true; }), "sm90");
  CHECK_EQ(with([](auto& o) { o.head_dim_qk = o.head_dim_vo = 100; }), "sm80");
  const auto fewer_dims = [](auto& o) { o.head_dim_qk = o.head_dim_vo = 96; };
  CHECK_EQ(with(fewer_dims), "sm90");
  CHECK_EQ(with([&](auto& o) { decodes(o), fewer_dims(o); }), "sm80");
  AttentionOptions rotated = prompts;
  rotated.rope = Rope();
  CHECK_EQ(family(rotated), "sm90");
  KernelChoices choices;
  CHECK(select_kernel(rotated, device, &choices).ok());
  const KernelChoice& chosen = choices.first;
  CHECK_EQ(chosen.kernel.geometry.threads, hopper.geometry.threads + 128);
  CHECK_EQ(with([&](auto& o) { decodes(o), o.rope = Rope(); }), "sm80");
  for (Kernel& kernel : all) kernel.rotating_geometry.reset();
  CHECK_EQ(family(rotated), "sm80");
  rotated.kv_dtype = DType::kFloat8E4M3;
  CHECK_EQ(gpu_choice(rotated, device),
           "rope: expected none (compiled in for cuda), got theta 10000");
  device.family = "sm90";
  CHECK_EQ(with(small_pages), "sm90");
}

TEST(wide_heads_are_for_whole_blocks_of_dims_and_more_than_few_rows) {
  Kernel general = fake_kernel("sm80_bf16_d512", {90, 'a'});
  general.head_dim_qk = general.head_dim_vo = 512;
  Kernel hopper = general;
  hopper.name = "sm90_wide_bf16_d512";
  hopper.family = &kSm90WideFamily;
  const std::vector<Kernel> all = {general, hopper};
  DeviceLimits device = h200();
  device.kernels = all;
  const auto name = [&](auto change) {
    AttentionOptions o = llama_on_gpu();
    o.head_dim_qk = o.head_dim_vo = 512;
    o.max_batch_size = 16;
    o.max_qo_tokens = 16 * 512;
    change(o);
    const std::string choice = gpu_choice(o, device);
    return choice.substr(0, choice.find(' '));
  };
  CHECK_EQ(name([](auto&) {}), "sm90_wide_bf16_d512");
  CHECK_EQ(name([](auto& o) { o.page_size = 0; }), "sm90_wide_bf16_d512");
  CHECK_EQ(name([](auto& o) { o.batch_invariant = true; }), "sm90_wide_bf16_d512");
  CHECK_EQ(name([](auto& o) { o.head_dim_vo = 320; }), "sm90_wide_bf16_d512");
  CHECK_EQ(name([](auto& o) { o.head_dim_vo = 328; }), "sm80_bf16_d512");
  CHECK_EQ(name([](auto& o) { o.page_size = 4; }), "sm80_bf16_d512");
  CHECK_EQ(name([](auto& o) { o.rope = Rope(); }), "sm80_bf16_d512");
  CHECK_EQ(name([](auto& o) { o.max_qo_tokens = o.max_batch_size; }), "sm80_bf16_d512");
}

TEST(narrow_queries_are_widened_by_the_kernel_that_widens_keys) {
  Kernel general = fake_kernel("sm80_e4m3_d128", {90, 'a'});
  general.q_dtype = general.kv_dtype = DType::kFloat8E4M3;
  Kernel hopper = general;
  hopper.name = "sm90_widen_bf16_e4m3_d128";
  hopper.family = &kSm90WidenFamily;
  hopper.q_dtype = DType::kBFloat16;
  hopper.narrow_q_dtype = DType::kFloat8E4M3;
  const std::vector<Kernel> all = {general, hopper};
  DeviceLimits device = h200();
  device.kernels = all;
  const auto name = [&](auto change) {
    AttentionOptions o = llama_on_gpu();
    o.q_dtype = o.kv_dtype = DType::kFloat8E4M3;
    o.max_batch_size = 16;
    o.max_qo_tokens = 16 * 512;
    change(o);
    const std::string choice = gpu_choice(o, device);
    return choice.substr(0, choice.find(' '));
  };
  const auto decodes = [](auto& o) { o.max_qo_tokens = o.max_batch_size; };
  const auto on_hopper = [](auto& o) { o.kernels = KernelGroup::kHopper; };
  CHECK_EQ(name([](auto&) {}), "sm90_widen_bf16_e4m3_d128");
  CHECK_EQ(name([](auto& o) { o.q_dtype = DType::kBFloat16; }), "sm90_widen_bf16_e4m3_d128");
  CHECK_EQ(name([](auto& o) { o.page_size = 4; }), "sm90_widen_bf16_e4m3_d128");
  CHECK_EQ(name([](auto& o) { o.batch_invariant = true; }), "sm90_widen_bf16_e4m3_d128");
  CHECK_EQ(name(decodes), "sm80_e4m3_d128");
  CHECK_EQ(name([&](auto& o) { decodes(o), on_hopper(o); }), "sm90_widen_bf16_e4m3_d128");
  CHECK_EQ(name([](auto& o) { o.kernels = KernelGroup::kGeneral; }), "sm80_e4m3_d128");
  Variant variant;
  CHECK(Variant::create({.name = "v", .logits = "return x;"}, &variant).ok());
  CHECK_EQ(name([&](auto& o) { o.variant = variant; }), "sm80_e4m3_d128");
  CHECK_EQ(name([](auto& o) { o.rope = Rope(); }), "rope:");
  CHECK_EQ(name([](auto& o) { o.q_dtype = DType::kFloat16; }), "q_dtype:");
  CHECK_EQ(name([](auto& o) { o.q_dtype = DType::kFloat8E5M2; }), "q_dtype:");
}

TEST(keys_that_are_values_have_a_family_of_their_own) {
  std::vector<Kernel> all = kernels();
  Kernel mla = fake_kernel("sm90_mla_bf16_d576x512", {90, 'a'});
  mla.family = &kSm90MlaFamily;
  mla.head_dim_qk = 576;
  mla.head_dim_vo = 512;
  all.push_back(mla);
  DeviceLimits device = h200();
  device.kernels = all;
  const auto with = [&](auto change) {
    AttentionOptions o = llama_on_gpu();
    o.num_kv_heads = 1;
    o.head_dim_qk = 576;
    o.head_dim_vo = 512;
    o.shared_kv = true;
    o.softmax_scale = 0.1F;
    change(o);
    const std::string choice = gpu_choice(o, device);
    return choice.substr(0, choice.find(" kv "));
  };
  CHECK_EQ(with([](auto&) {}), "sm90_mla_bf16_d576x512 sm90_mla");
  CHECK_EQ(with([](auto& o) { o.page_size = 1; }), "sm90_mla_bf16_d576x512 sm90_mla");
  CHECK_EQ(with([](auto& o) { o.head_dim_qk = 512; }),
           "head_dim_qk, head_dim_vo: expected (576, 512) (compiled in for cuda), got (512, 512)");
  CHECK_EQ(with([](auto& o) { o.topk = 64; }), "sm90_mla_bf16_d576x512 sm90_mla");
  CHECK_EQ(with([](auto& o) { o.kv_dtype = DType::kFloat8E4M3; }),
           "kv_dtype: expected bfloat16 (compiled in for cuda), got float8_e4m3fn");
  CHECK_EQ(with([](auto& o) { o.softcap = 20.0F; }),
           "softcap: expected 0 (compiled in for cuda), got 20");
  CHECK_EQ(with([](auto& o) { o.batch_invariant = true; }), "sm90_mla_bf16_d576x512 sm90_mla");
  CHECK_EQ(with([](auto& o) { o.kernels = KernelGroup::kGeneral; }),
           "shared_kv: expected false (compiled in for cuda), got true");
  device.kernels = {&all.back(), 1};
  CHECK_EQ(with([](auto& o) { o.shared_kv = false; }),
           "shared_kv: expected true (compiled in for cuda), got false");
  device.kernels = all;
  device.major = 8;
  CHECK_EQ(with([](auto&) {}), "shared_kv: expected false (compiled in for cuda), got true");
}

TEST(batch_invariant_latent_attention_has_one_kernel_with_chunks) {
  Kernel mla = fake_kernel("sm90_mla_bf16_d576x512", {90, 'a'});
  mla.family = &kSm90MlaFamily;
  mla.head_dim_qk = 576;
  mla.head_dim_vo = 512;
  mla.tuning = sm90_mla_tuning();
  DeviceLimits device = h200();
  device.kernels = {&mla, 1};
  AttentionOptions o = llama_on_gpu();
  o.num_kv_heads = 1;
  o.head_dim_qk = 576;
  o.head_dim_vo = 512;
  o.shared_kv = true;
  o.batch_invariant = true;
  o.softmax_scale = 0.1F;
  for (const int32_t num_heads : {16, 128}) {
    for (const int32_t max_qo_tokens : {16, 5000}) {
      o.num_qo_heads = num_heads;
      o.max_batch_size = 16;
      o.max_qo_tokens = max_qo_tokens;
      KernelChoices choices;
      CHECK_EQ(select_kernel(o, device, &choices).message, std::string());
      CHECK_EQ(choices.first.chunk_kv, 2048);
      CHECK(!choices.second);
    }
  }
}

TEST(options_name_the_group_of_kernels) {
  std::vector<Kernel> all = kernels();
  Kernel hopper = fake_kernel("sm90_bf16_d128", {90, 'a'});
  hopper.family = &kSm90Family;
  all.push_back(hopper);
  Kernel gathers = fake_kernel("sm90_gather_bf16_d128", {90, 'a'});
  gathers.family = &kSm90GatherFamily;
  all.push_back(gathers);
  DeviceLimits device = h200();
  device.kernels = all;
  for (const int32_t max_qo_tokens : {16, 16 * 512}) {
    for (const int32_t page_size : {0, 4, 16}) {
      AttentionOptions o = llama_on_gpu();
      o.max_batch_size = 16;
      o.max_qo_tokens = max_qo_tokens;
      o.page_size = page_size;
      for (const KernelGroup group : {KernelGroup::kGeneral, KernelGroup::kHopper}) {
        o.kernels = group;
        KernelChoices choices;
        CHECK(select_kernel(o, device, &choices).ok());
        CHECK(choices.first.kernel.family->group == group);
        CHECK(!choices.second || choices.second->kernel.family->group == group);
        for (const FamilyAnswer& answer : ask_families(o, device)) {
          CHECK_EQ(answer.status.ok(), answer.family->group == group);
        }
      }
    }
  }
  AttentionOptions o = llama_on_gpu();
  o.kernels = KernelGroup::kHopper;
  o.batch_invariant = true;
  CHECK_EQ(gpu_choice(o, device).substr(0, 14), "sm90_bf16_d128");
  o.batch_invariant = false;
  device.major = 8;
  device.minor = 0;
  CHECK_EQ(gpu_choice(o, device), "kernels: expected general (compiled in for cuda), got hopper");
  o.kernels = static_cast<KernelGroup>(3);
  CHECK_EQ(gpu_choice(o, device), "kernels: expected a KernelGroup, got 3");
}

TEST(decodes_with_a_variant_have_the_geometry_of_few_rows) {
  std::vector<Kernel> all = kernels();
  for (Kernel& kernel : all) {
    kernel.few_rows_geometry = kernel.geometry;
    kernel.few_rows_geometry->tile_q = 16;
  }
  DeviceLimits device = h200();
  device.kernels = all;
  AttentionOptions o = llama_on_gpu();
  o.max_qo_tokens = o.max_batch_size;
  const auto tile_q = [&] {
    KernelChoices choices;
    CHECK(select_kernel(o, device, &choices).ok());
    CHECK(!choices.second || o.variant.empty());
    return choices.first.kernel.geometry.tile_q;
  };
  const int32_t every_row = tile_q();
  CHECK(every_row > 16);
  CHECK(Variant::create({.name = "v", .logits = "return x;"}, &o.variant).ok());
  CHECK_EQ(tile_q(), 16);
  o.max_qo_tokens += 1;
  CHECK_EQ(tile_q(), every_row);
  o.max_qo_tokens -= 1;
  o.variant = {};
  o.rope = Rope();
  CHECK_EQ(tile_q(), 16);
  o.num_qo_heads = 17 * o.num_kv_heads;
  CHECK_EQ(tile_q(), every_row);
}

}  // namespace
}  // namespace flashplan::test
