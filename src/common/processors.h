// SPDX-License-Identifier: Apache-2.0
// How many processors and threads this process may use.
#pragma once

#include <cstdint>
#include <filesystem>

namespace flashplan {

/// CPUs that this process may use, at least 1: those of its affinity mask, and no more than the
/// quota of its cgroup is worth, rounded up. Asked once.
int32_t num_processors() noexcept;

/// FLASHPLAN_NUM_THREADS, else OMP_NUM_THREADS, if they are positive numbers (of a list, its first
/// one), else num_processors(). A value that is no such number counts as none. Asked once.
int32_t default_num_threads() noexcept;

/// The CPUs that the smallest quota of this process's cgroup and of those around it allows, rounded
/// up; 0: there is no quota. Reads version 2 (cpu.max) and version 1 (cpu.cfs_quota_us) of cgroups,
/// wherever they are mounted. `root`: the folder that holds "proc" and the mounts, "/" except in
/// tests.
int32_t cgroup_quota(const std::filesystem::path& root);

}  // namespace flashplan
