// SPDX-License-Identifier: Apache-2.0
#include "api/kernels.h"

#include "cpu/engine.h"
#include "cuda/launch_kernel.h"
#include "kernels/kernel_list.h"

namespace flashplan {

std::span<const Kernel> kernels_for(DeviceType device) noexcept {
  return device == DeviceType::kCpu ? cpu::kernels() : cuda::kernels();
}

Status launch(const Kernel& kernel, const AttentionParams& params, Stream stream) noexcept {
  if (kernel.family->device == DeviceType::kCuda) return cuda::launch(kernel, params, stream);
  cpu::launch(kernel, params);
  return {};
}

}  // namespace flashplan
