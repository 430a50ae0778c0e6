// SPDX-License-Identifier: Apache-2.0
// What was built and what it runs on, and the CPU engine's threads.
#pragma once

#include <cstdint>
#include <string>

#include "flashplan/export.h"
#include "flashplan/status.h"

namespace flashplan {

/// Sets how many threads the CPU engine uses for all runs of this process, the calling thread
/// included. The default is FLASHPLAN_NUM_THREADS, else OMP_NUM_THREADS, else one for each CPU that
/// the process may use (its affinity mask and the quota of its cgroup). Results do not depend on
/// it. It takes effect at the next run().
///   kInvalidArgument  num_threads < 1
FLASHPLAN_API Status set_num_threads(int32_t num_threads) noexcept;
/// Returns how many threads the CPU engine uses.
FLASHPLAN_API int32_t num_threads() noexcept;

/// The version of the library that is loaded, such as "0.1.0".
FLASHPLAN_API const char* version() noexcept;

/// Describes the build and the machine: the version, the CPU's kernels and threads, and for CUDA
/// the compiled architectures and kernels and the devices found. One `key: value` per line.
FLASHPLAN_API std::string show_config() noexcept;

}  // namespace flashplan
