// SPDX-License-Identifier: Apache-2.0
#include "common/processors.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace flashplan {
namespace {

namespace fs = std::filesystem;

int32_t processors_of(double quota, double period) {
  if (!(quota > 0 && period > 0)) return 0;  // -1 and "max" stand for no quota
  const double most = std::numeric_limits<int32_t>::max();
  return static_cast<int32_t>(std::min(std::ceil(quota / period), most));
}

/// The smaller of two quotas; 0 means that there is no quota.
int32_t tighter(int32_t a, int32_t b) { return a == 0 || b == 0 ? a + b : std::min(a, b); }

/// The path of a file in a folder. This does not use `folder / name`: when memory runs out, that
/// operator of libstdc++ 12 destroys a path that it has not made, instead of throwing
/// std::bad_alloc.
std::string file_in(const fs::path& folder, const std::string& name) {
  return folder.string() + "/" + name;
}

/// The CPUs that the quota of one cgroup allows, rounded up, read from its files; 0: no quota.
int32_t quota_of(const std::string& group) {
  double quota = 0;
  double period = 0;
  std::ifstream both(file_in(group, "cpu.max"));
  if (both >> quota >> period) return processors_of(quota, period);
  std::ifstream quota_file(file_in(group, "cpu.cfs_quota_us"));
  std::ifstream period_file(file_in(group, "cpu.cfs_period_us"));
  if (quota_file >> quota && period_file >> period) return processors_of(quota, period);
  return 0;
}

bool has_name(const std::string& names, std::string_view name) {
  std::istringstream list(names);
  for (std::string each; std::getline(list, each, ',');) {
    if (each == name) return true;
  }
  return false;
}

int32_t count_processors() noexcept {
  auto count = static_cast<int32_t>(std::max(std::thread::hardware_concurrency(), 1U));
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) count = std::max(CPU_COUNT(&set), 1);
  try {
    count = tighter(count, cgroup_quota("/"));
  } catch (const std::exception&) {  // for example, out of memory: as if there were no quota
  }
#endif
  return count;
}

/// The positive number that an environment variable holds. If it holds a list, as OMP_NUM_THREADS
/// may, this is the first number. Returns 0 if the variable is not set or has another value.
int32_t positive_number(const char* environment) {
  const char* text = std::getenv(environment);
  if (text == nullptr) return 0;
  char* end = nullptr;
  const long number = std::strtol(text, &end, 10);
  end += std::strspn(end, " ");
  if (*end != '\0' && *end != ',') return 0;
  return number > 0 && number <= std::numeric_limits<int32_t>::max() ? static_cast<int32_t>(number)
                                                                     : 0;
}

/// A hierarchy of cgroups that can limit processors, and where it is mounted.
struct Hierarchy {
  bool is_version_2 = false;
  fs::path top;  // the group whose files are in `folder`, mostly "/"
  fs::path folder;
};

/// Reads a line of mountinfo; returns none if the mount is no such hierarchy. A line has three
/// numbers, the mount's group, folder and options, "-", and the file system's type, source and
/// options.
std::optional<Hierarchy> read_mount(const std::string& line) {
  std::istringstream fields(line);
  std::string skipped;
  std::string top;
  std::string folder;
  std::string type;
  std::string options;
  fields >> skipped >> skipped >> skipped >> top >> folder;
  while (fields >> skipped && skipped != "-") {
  }
  fields >> type >> skipped >> options;
  const bool is_version_2 = type == "cgroup2";
  if (!is_version_2 && !(type == "cgroup" && has_name(options, "cpu"))) return {};
  return Hierarchy{is_version_2, top, folder};
}

/// The group of this process in a hierarchy.
std::optional<fs::path> own_group(const fs::path& root, bool is_version_2) {
  std::ifstream groups(file_in(root, "proc/self/cgroup"));
  for (std::string line; std::getline(groups, line);) {  // number:controllers:/path
    const std::size_t controllers = line.find(':') + 1;
    const std::size_t path = line.find(':', controllers) + 1;
    if (controllers == 0 || path == 0) continue;
    const std::string names = line.substr(controllers, path - 1 - controllers);
    if (is_version_2 ? names.empty() : has_name(names, "cpu")) return line.substr(path);
  }
  return {};
}

}  // namespace

int32_t cgroup_quota(const fs::path& root) {
  int32_t quota = 0;
  std::ifstream mounts(file_in(root, "proc/self/mountinfo"));
  for (std::string line; std::getline(mounts, line);) {
    const std::optional<Hierarchy> hierarchy = read_mount(line);
    if (!hierarchy) continue;
    const std::optional<fs::path> own = own_group(root, hierarchy->is_version_2);
    if (!own) continue;
    // In a container the mounted folder may show the process's own group, while `own` is the
    // group's path on the host, outside of `top`. Then only files of the folder itself are read.
    fs::path group = own->lexically_relative(hierarchy->top);
    if (group.empty() || *group.begin() == "." || *group.begin() == "..") group.clear();
    const std::string folder = file_in(root, hierarchy->folder.relative_path());
    for (;; group = group.parent_path()) {  // quotas of the groups above limit this group, too
      quota = tighter(quota, quota_of(file_in(folder, group)));
      if (group.empty()) break;
    }
  }
  return quota;
}

int32_t num_processors() noexcept {
  static const int32_t count = count_processors();
  return count;
}

int32_t default_num_threads() noexcept {
  static const int32_t count = [] {
    for (const char* name : {"FLASHPLAN_NUM_THREADS", "OMP_NUM_THREADS"}) {
      if (const int32_t number = positive_number(name); number > 0) return number;
    }
    return num_processors();
  }();
  return count;
}

}  // namespace flashplan
