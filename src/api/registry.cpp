// SPDX-License-Identifier: Apache-2.0
#include "api/registry.h"

#include "cpu/engine.h"
#include "kernels/instances.h"

namespace flashplan {

Status find_kernel(const KernelConfig& config, LaunchFunction* launch, const char** name) noexcept {
  if (config.family == KernelFamily::kCpu) return cpu::find_kernel(config, launch, name);
  *launch = config.tiling->launch;
  *name = config.instance->name;
  return {};
}

}  // namespace flashplan
