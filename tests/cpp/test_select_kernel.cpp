// SPDX-License-Identifier: Apache-2.0
// Golden choices: what select_kernel() gives for options that users have.
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "chosen_kernel.h"
#include "fake_devices.h"
#include "fake_kernels.h"
#include "plan/kernel/select_kernel.h"

namespace flashplan::test {
namespace {

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

TEST(golden_choices_on_a_gpu) {
  AttentionOptions o = llama_on_gpu();
  CHECK_EQ(gpu_choice(o), "bf16_d128 sm80 kv 2 tile 128x64 ctas 264 chunk 0 cost 300 0 200 1 400");
  o.batch_invariant = true;
  o.num_ctas = 7;
  CHECK_EQ(gpu_choice(o), "bf16_d128 sm80 kv 2 tile 128x64 ctas 7 chunk 4096 cost 300 0 200 1 400");
  o.kv_dtype = DType::kFloat8E4M3;
  CHECK_EQ(gpu_choice(o),
           "bf16_e4m3_d128 sm80 kv 3 tile 128x64 ctas 7 chunk 4096 cost 300 0 200 1 400");
}

/// The name of the chosen instance, or the message.
std::string instance_for(int32_t head_dim_qk, int32_t head_dim_vo, float softcap = 0.0F,
                         const DeviceLimits& device = h200()) {
  AttentionOptions o = llama_on_gpu();
  o.head_dim_qk = head_dim_qk;
  o.head_dim_vo = head_dim_vo;
  o.softcap = softcap;
  const std::string choice = gpu_choice(o, device);
  return choice.substr(0, choice.find(" sm80"));
}

TEST(the_smallest_instance_that_covers_the_head_dims) {
  CHECK_EQ(instance_for(64, 64), "bf16_d128");
  CHECK_EQ(instance_for(1, 128), "bf16_d128");
  CHECK_EQ(instance_for(129, 1), "bf16_d192x128");
  CHECK_EQ(instance_for(128, 129), "bf16_d256");
  CHECK_EQ(instance_for(192, 128, 30.0F), "bf16_d192x128_softcap");
  CHECK_EQ(instance_for(257, 64),
           "head_dim_qk, head_dim_vo: expected up to (256, 256), (192, 128), (128, 128) (compiled "
           "in for cuda), got (257, 64)");
}

TEST(code_for_heads_that_are_read_in_pairs) {
  Kernel kernel = fake_kernel("bf16_d128", {90, 'a'});
  const int codes[3] = {};
  kernel.code = {.few_rows_first = codes, .many_rows_first = codes + 1};
  kernel.code.short_rows_first = codes + 2;
  kernel.geometry.paired_dims = 80;
  DeviceLimits device = h200();
  device.kernels = {&kernel, 1};
  AttentionOptions o = llama_on_gpu();
  const auto chosen = [&](int32_t head_dim) {
    o.head_dim_qk = o.head_dim_vo = head_dim;
    KernelChoices choices;
    CHECK(select_kernel(o, device, &choices).ok());
    return choices.first.kernel.code;
  };
  CHECK(chosen(128) == kernel.code);
  CHECK(chosen(80).few_rows_first == codes + 2 && chosen(80).many_rows_first == codes + 2);
  o.custom_mask = true;
  CHECK(chosen(80) == kernel.code);
  o.custom_mask = false;
  o.batch_invariant = true;
  CHECK(chosen(80) == kernel.code);
}

TEST(costs_are_of_steps_of_64_keys) {
  const auto of_86 = of_architectures(fake_kernel("bf16_d128", {}), {{86}});
  DeviceLimits device = h200();
  device.kernels = of_86;
  device.major = 8;
  device.minor = 9;
  CHECK_EQ(gpu_choice(llama_on_gpu(), device),
           "bf16_d128 sm80 kv 2 tile 128x32 ctas 132 chunk 0 cost 600 0 200 1 800");
}

TEST(queues_on_a_gpu_fit_it) {
  AttentionOptions o = llama_on_gpu();
  const auto num_ctas = [&o](const DeviceLimits& device) {
    KernelChoices choices;
    CHECK(select_kernel(o, device, &choices).ok());
    const KernelChoice& choice = choices.first;
    return choice.num_ctas;
  };
  DeviceLimits device = h200();
  CHECK_EQ(num_ctas(device), 264);
  device.num_processors = 5000;
  CHECK_EQ(num_ctas(device), 4096);
}

TEST(what_a_gpu_is_refused_for) {
  AttentionOptions o = llama_on_gpu();
  DeviceLimits device;
  CHECK_EQ(gpu_choice(o, device), "device: expected cpu (built without CUDA), got cuda:1");
  device = h200();
  device.num_gpus = 0;
  CHECK_EQ(gpu_choice(o, device), "device: expected cpu (no GPU was found), got cuda:1");
  device.num_gpus = 1;
  CHECK_EQ(gpu_choice(o, device), "device: expected an index < 1, got cuda:1");
  o.device.index = -1;
  CHECK_EQ(gpu_choice(o, device), "device: expected an index < 1, got cuda:-1");
  o = llama_on_gpu();

  o.q_dtype = o.kv_dtype = DType::kFloat32;
  CHECK_EQ(gpu_choice(o),
           "q_dtype: expected float16, bfloat16 (compiled in for cuda), got float32");
  o.q_dtype = DType::kBFloat16;
  o.kv_dtype = DType::kFloat8E5M2;
  CHECK_EQ(gpu_choice(o),
           "kv_dtype: expected bfloat16, float8_e4m3fn (compiled in for cuda), got float8_e5m2");
  o.kv_dtype = DType::kFloat8E4M3;
  o.softcap = 30.0F;
  CHECK_EQ(gpu_choice(o), "softcap: expected 0 (compiled in for cuda), got 30");
  o.softcap = 0.0F;
  o.shared_kv = true;
  CHECK_EQ(gpu_choice(o), "num_kv_heads: expected 1 with shared_kv, got 8");
  o.num_kv_heads = 1;
  CHECK_EQ(gpu_choice(o), "softmax_scale: expected a number with shared_kv, got none");
  o.softmax_scale = 0.1F;
  CHECK_EQ(gpu_choice(o), "shared_kv: expected false (compiled in for cuda), got true");
  o = llama_on_gpu();
  o.kv_dtype = DType::kFloat8E4M3;
  o.o_dtype = DType::kFloat32;  // any output dtype is there
  CHECK_EQ(gpu_choice(o).substr(0, 14), "bf16_e4m3_d128");
}

TEST(architectures) {
  // Shared memory per SM that the chosen kernel is for; 0: refused.
  const auto smem = [](const std::vector<Architecture>& architectures, int32_t major,
                       int32_t minor) {
    const auto made = of_architectures(fake_kernel("bf16_d128", {}), architectures);
    DeviceLimits device = h200();
    device.kernels = made;
    device.major = major;
    device.minor = minor;
    KernelChoices choices;
    if (!select_kernel(llama_on_gpu(), device, &choices).ok()) return 0;
    const KernelChoice& choice = choices.first;
    const KernelGeometry& geometry = choice.kernel.geometry;
    CHECK_EQ(choice.num_ctas, geometry.queues_per_processor * device.num_processors);
    const int chosen = smem_per_sm(choice.kernel.architecture.number);
    CHECK_EQ(geometry.tile_kv, chosen == 100 ? 32 : 64);
    CHECK_EQ(geometry.tile_q, chosen == 164 ? 64 : 128);
    return chosen;
  };
  CHECK_EQ(smem({{80}, {90, 'a'}}, 8, 0), 164);
  CHECK_EQ(smem({{80}, {90, 'a'}}, 8, 7), 0);
  CHECK_EQ(smem({{80}, {87}}, 8, 7), 164);
  CHECK_EQ(smem({{86}, {87}}, 8, 9), 100);
  CHECK_EQ(smem({{80}, {90, 'a'}}, 9, 0), 228);
  CHECK_EQ(smem({{80}, {90, 'a'}}, 7, 5), 0);
  CHECK_EQ(smem({{80}, {90, 'a'}}, 10, 0), 0);
  CHECK_EQ(smem({{86}}, 8, 0), 0);
  CHECK_EQ(smem({{100, 'a'}}, 10, 3), 0);
  CHECK_EQ(smem({{100, 'f'}, {120}}, 10, 3), 228);
  CHECK_EQ(smem({{100, 'f'}, {120}}, 12, 1), 100);
  CHECK_EQ(smem({{90, 'a'}}, 9, 1), 0);
  CHECK_EQ(smem({}, 9, 0), 0);
  // The nearest code is taken.
  CHECK_EQ(smem({{80}, {86}, {90, 'a'}}, 8, 0), 164);
  CHECK_EQ(smem({{86}, {80}, {90, 'a'}}, 8, 6), 100);
  CHECK_EQ(smem({{80}, {86}}, 8, 9), 100);
  CHECK_EQ(smem({{80}, {90, 'a'}}, 8, 9), 0);  // not with less
  DeviceLimits t4 = h200();
  t4.major = 7;
  t4.minor = 5;
  CHECK_EQ(gpu_choice(llama_on_gpu(), t4),
           "device: expected a GPU of an architecture that was built for (80;90a), got cuda:1 of "
           "compute capability 7.5");
}

TEST(kernels_compare_and_print) {
  const Kernel kernel = fake_kernel("bf16_d128", {90, 'a'});
  Kernel other = kernel;
  CHECK(kernel == other);
  other.tuning.cost.split_row += 1;
  CHECK(!(kernel == other));
  other = fake_kernel("bf16_d128", {80});
  CHECK(!(kernel == other));
  CHECK_EQ(
      to_string(kernel),
      "bf16_d128 for 90a: tiles of 16/64/128 rows x 64 keys, 6/3/2 stages, 128 threads, 100 KB, "
      "2 queues per processor");
  const std::vector<Kernel> all = {other, kernel, other, fake_kernel("f16_d128", {100, 'f'})};
  CHECK_EQ(std::string(architectures_of(all).text), "80;90a;100f");
  CHECK_EQ(std::string(architectures_of({}).text), "");
  for (const Kernel& k : cpu::kernels()) {
    CHECK_EQ(to_string(k),
             std::string(k.name) + " for cpu: tiles of 128 rows x 32 keys, 4 queues per processor");
  }
}

// What the request is made of does not change how its keys are cut, or results would depend on it.
TEST(chunks_of_batch_invariance_depend_on_nothing_else) {
  AttentionOptions o = llama();
  o.batch_invariant = true;
  KernelChoices of_two;
  CHECK(select_kernel(o, cpu_of(2), &of_two).ok());
  const KernelChoice& first = of_two.first;
  for (const int32_t num_ctas : {0, 1, 300}) {
    for (const int32_t processors : {1, 64}) {
      o.num_ctas = num_ctas;
      o.max_batch_size = processors;
      KernelChoices choices;
      CHECK(select_kernel(o, cpu_of(processors), &choices).ok());
      const KernelChoice& choice = choices.first;
      CHECK_EQ(choice.chunk_kv, first.chunk_kv);
      CHECK(choice.kernel == first.kernel);
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
        KernelChoices choices;
        CHECK(select_kernel(o, cpu_of(2), &choices).ok());
        const KernelChoice& c = choices.first;
        const KernelGeometry& geometry = c.kernel.geometry;
        CHECK(geometry.tile_q > 0 && (geometry.tile_q & (geometry.tile_q - 1)) == 0);
        CHECK(geometry.tile_kv > 0 && (geometry.tile_kv & (geometry.tile_kv - 1)) == 0);
        CHECK_EQ(c.chunk_kv % geometry.tile_kv, 0);
        CHECK_EQ(c.chunk_kv > 0, batch_invariant);
        CHECK(c.num_ctas >= 1);
        CHECK(c.kernel.tuning.cost.step + c.kernel.tuning.cost.step_row > 0);
      }
    }
  }
}

TEST(pairs_of_ctas_take_latent_requests_of_more_than_64_rows) {
  Kernel plain = fake_kernel("plain", {90, 'a'});
  plain.family = &kSm90MlaFamily;
  plain.kv_dtype = DType::kFloat8E4M3;
  plain.head_dim_qk = 576;
  plain.head_dim_vo = 512;
  plain.geometry.queues_per_processor = 1;
  plain.tuning = sm90_mla_tuning();
  Kernel pairs = plain;
  pairs.name = "pairs";
  pairs.family = &kSm90MlaPairsFamily;
  pairs.geometry.ctas_of_queue = 2;
  const Kernel all[] = {plain, pairs};
  DeviceLimits device = h200();
  device.kernels = all;
  const auto kernel_for = [&](int32_t num_heads, int32_t batch_size, int32_t tokens, auto change) {
    AttentionOptions o = llama_on_gpu();
    o.kv_dtype = DType::kFloat8E4M3;
    o.num_qo_heads = num_heads;
    o.num_kv_heads = 1;
    o.head_dim_qk = 576;
    o.head_dim_vo = 512;
    o.shared_kv = true;
    o.softmax_scale = 0.1F;
    o.max_batch_size = batch_size;
    o.max_qo_tokens = tokens;
    change(o);
    KernelChoices choices;
    CHECK_EQ(select_kernel(o, device, &choices).message, std::string());
    CHECK(!choices.second);
    const int32_t num_processors = device.num_processors;
    const bool is_pairs = choices.first.kernel.name == "pairs";
    const int32_t num_ctas = is_pairs ? num_processors / 2 : num_processors;
    CHECK_EQ(choices.first.num_ctas, o.num_ctas > 0 ? o.num_ctas : num_ctas);
    return std::string(choices.first.kernel.name);
  };
  const auto as_it_is = [](auto&) {};
  using Change = void (*)(AttentionOptions&);
  const Change invariant = [](AttentionOptions& o) { o.batch_invariant = true; };
  const Change with_lists = [](AttentionOptions& o) { o.topk = 64; };
  CHECK_EQ(kernel_for(64, 16, 16, as_it_is), "plain");
  CHECK_EQ(kernel_for(64, 16, 17, as_it_is), "pairs");
  CHECK_EQ(kernel_for(16, 16, 64, as_it_is), "plain");
  CHECK_EQ(kernel_for(16, 1, 8192, as_it_is), "pairs");
  CHECK_EQ(kernel_for(128, 16, 16, as_it_is), "pairs");
  CHECK_EQ(kernel_for(128, 16, 16, [](auto& o) { o.num_ctas = 7; }), "pairs");
  for (const Change change : {invariant, with_lists}) {
    CHECK_EQ(kernel_for(64, 1, 8192, change), "plain");
    CHECK_EQ(kernel_for(128, 1, 8192, change), "pairs");
    CHECK_EQ(kernel_for(128, 16, 16, change), "pairs");
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
    std::size_t bytes = 7;
    const Status measured = workspace_bytes(options, &bytes);
    CHECK_EQ(std::string(measured.message), created.message);
    CHECK_EQ(bytes, created.ok() ? plan.workspace_bytes() : 7);
  }
}

}  // namespace
}  // namespace flashplan::test
