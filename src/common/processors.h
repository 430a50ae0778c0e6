// SPDX-License-Identifier: Apache-2.0
// How many processors and threads this process may use.
#pragma once

#include <cstdint>
#include <filesystem>

namespace flashplan {

/// The number of CPUs that this process may use, at least 1: those of its affinity mask, but no
/// more than the quota of its cgroup allows, rounded up. It is found once, at the first call.
int32_t num_processors() noexcept;

/// The number in the environment variable FLASHPLAN_NUM_THREADS, else that in OMP_NUM_THREADS (of a
/// list, its first number), else num_processors(). Values that are no positive number are ignored.
/// The variables are read once.
int32_t default_num_threads() noexcept;

/// The smallest quota of this process's cgroup and of the cgroups around it, in CPUs, rounded up;
/// 0: there is no quota. Reads version 2 (cpu.max) and version 1 (cpu.cfs_quota_us) of cgroups,
/// wherever they are mounted. `root`: the folder that holds "proc" and the mounts, "/" except in
/// tests.
int32_t cgroup_quota(const std::filesystem::path& root);

}  // namespace flashplan
