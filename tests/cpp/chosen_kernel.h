// SPDX-License-Identifier: Apache-2.0
// The choices of select_kernel() as text, which tests compare.
#pragma once

#include <sstream>
#include <string>

#include "fake_devices.h"
#include "plan/kernel/select_kernel.h"

namespace flashplan::test {

/// A choice without the name of its kernel.
inline std::string text(const KernelChoice& c) {
  const Kernel& k = c.kernel;
  const CostModel& cost = k.tuning.cost;
  std::ostringstream out;
  out << k.family->name << " kv " << static_cast<int>(k.kv_dtype) << " tile " << k.geometry.tile_q
      << "x" << k.geometry.tile_kv << " ctas " << c.num_ctas << " chunk " << c.chunk_kv << " cost "
      << cost.tile << " " << cost.tile_row << " " << cost.step << " " << cost.step_row << " "
      << cost.split;
  return out.str();
}

/// The choice for a CPU, or the message.
inline std::string choice(const AttentionOptions& options, int32_t num_processors = 2) {
  KernelChoices choices;
  const Status status = select_kernel(options, cpu_of(num_processors), &choices);
  return status.ok() ? text(choices.first) : status.message;
}

/// The choice for a GPU with the name of the kernel, or the message.
inline std::string gpu_choice(const AttentionOptions& options,
                              const DeviceLimits& device = h200()) {
  KernelChoices choices;
  const Status status = select_kernel(options, device, &choices);
  if (!status.ok()) return status.message;
  return std::string(choices.first.kernel.name) + " " + text(choices.first);
}

}  // namespace flashplan::test
