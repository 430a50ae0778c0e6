// SPDX-License-Identifier: Apache-2.0
#include "run/registry.h"

#include "cpu/engine.h"

namespace flashplan {

Status find_kernel(const KernelConfig& config, LaunchFunction* launch, const char** name) noexcept {
  // One family so far; further families add their lookup here.
  return cpu::find_kernel(config, launch, name);
}

}  // namespace flashplan
