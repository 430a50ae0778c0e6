// SPDX-License-Identifier: Apache-2.0
// A common model, and devices to choose a kernel for it on.
#pragma once

#include <string_view>
#include <vector>

#include "cpu/engine.h"
#include "fake_kernels.h"
#include "plan/kernel/select_kernel.h"

namespace flashplan::test {

inline AttentionOptions llama() {
  AttentionOptions o;
  o.num_qo_heads = 32;
  o.num_kv_heads = 8;
  o.head_dim_qk = o.head_dim_vo = 128;
  o.page_size = 16;
  return o;
}

inline DeviceLimits cpu_of(int32_t num_processors) {
  return {.kernels = cpu::kernels(), .num_processors = num_processors};
}

/// The kernels of one instance for several architectures. Their tiles show the architecture: 32
/// keys for 100 KB of shared memory, 64 rows for 8.0.
inline std::vector<Kernel> of_architectures(const Kernel& kernel,
                                            const std::vector<Architecture>& architectures) {
  std::vector<Kernel> kernels;
  for (const Architecture architecture : architectures) {
    Kernel copy = kernel;
    copy.architecture = architecture;
    const int smem = smem_per_sm(architecture.number);
    if (smem == 100) {
      copy.geometry.tile_kv = 32;
      copy.geometry.queues_per_processor = 1;
    } else if (smem == 164) {
      copy.geometry.tile_q = 64;
    }
    copy.tuning = sm80_tuning(copy.geometry.tile_kv);
    kernels.push_back(copy);
  }
  return kernels;
}

/// Kernels as they might be compiled in, in the order of the generated list except for head dims.
inline const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all = [] {
    std::vector<Kernel> made;
    const auto add = [&](const char* name, DType q, DType kv, int32_t qk, int32_t vo,
                         bool softcap) {
      Kernel kernel = fake_kernel(name, {});
      kernel.q_dtype = q;
      kernel.kv_dtype = kv;
      kernel.head_dim_qk = qk;
      kernel.head_dim_vo = vo;
      kernel.softcap = softcap;
      for (const Kernel& k : of_architectures(kernel, {{80}, {90, 'a'}})) made.push_back(k);
    };
    const DType bf16 = DType::kBFloat16;
    add("f16_d64", DType::kFloat16, DType::kFloat16, 64, 64, false);
    add("bf16_d256", bf16, bf16, 256, 256, false);
    add("bf16_d256_softcap", bf16, bf16, 256, 256, true);
    add("bf16_d192x128", bf16, bf16, 192, 128, false);
    add("bf16_d192x128_softcap", bf16, bf16, 192, 128, true);
    add("bf16_d128", bf16, bf16, 128, 128, false);
    add("bf16_d128_softcap", bf16, bf16, 128, 128, true);
    add("bf16_e4m3_d128", bf16, DType::kFloat8E4M3, 128, 128, false);
    return made;
  }();
  return all;
}

inline DeviceLimits h200() {
  DeviceLimits device;
  device.kernels = kernels();
  device.num_processors = 132;
  device.num_gpus = 2;
  device.major = 9;
  device.minor = 0;
  return device;
}

inline AttentionOptions llama_on_gpu() {
  AttentionOptions o = llama();
  o.device = {DeviceType::kCuda, 1};
  return o;
}

}  // namespace flashplan::test
