// SPDX-License-Identifier: Apache-2.0
// Quotas of cgroups, as they lie in the files of a system.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"
#include "common/processors.h"

namespace flashplan {
namespace {

namespace fs = std::filesystem;

/// A folder with the files of a system.
class System {
 public:
  System() {
    std::string name = (fs::temp_directory_path() / "flashplan-cgroup-XXXXXX").string();
    root_ = ::mkdtemp(name.data());
  }
  ~System() { fs::remove_all(root_); }
  System(const System&) = delete;
  System& operator=(const System&) = delete;

  void write(const char* path, const char* text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  int32_t quota() const { return cgroup_quota(root_); }

 private:
  fs::path root_;
};

TEST(without_groups_there_is_no_quota) {
  const System system;
  CHECK_EQ(system.quota(), 0);
  system.write("proc/self/cgroup", "0::/\n");
  CHECK_EQ(system.quota(), 0);
  system.write("proc/self/cgroup", "rubbish\n:\n\n1:cpu\n");
  CHECK_EQ(system.quota(), 0);
}

TEST(version_2_has_quota_and_period_in_one_file) {
  const System system;
  system.write("proc/self/cgroup", "0::/pods/one\n");
  system.write("sys/fs/cgroup/pods/one/cpu.max", "max 100000\n");
  CHECK_EQ(system.quota(), 0);
  system.write("sys/fs/cgroup/pods/one/cpu.max", "765000 100000\n");
  CHECK_EQ(system.quota(), 8);  // rounded up
  system.write("sys/fs/cgroup/pods/cpu.max", "200000 100000\n");
  CHECK_EQ(system.quota(), 2);  // of the group around it
  system.write("sys/fs/cgroup/pods/one/cpu.max", "50000 100000\n");
  CHECK_EQ(system.quota(), 1);
}

TEST(a_container_sees_its_own_group_as_the_root) {
  const System system;
  system.write("proc/self/cgroup", "0::/host/path/of/the/pod\n");
  system.write("sys/fs/cgroup/cpu.max", "300000 100000\n");
  CHECK_EQ(system.quota(), 3);
}

TEST(version_1_has_a_file_for_each_and_no_quota_below_0) {
  const System system;
  system.write("proc/self/cgroup", "5:cpuset:/a\n4:cpu,cpuacct:/docker/b\n3:memory:/c\n");
  system.write("sys/fs/cgroup/cpu/docker/b/cpu.cfs_quota_us", "-1\n");
  system.write("sys/fs/cgroup/cpu/docker/b/cpu.cfs_period_us", "100000\n");
  CHECK_EQ(system.quota(), 0);
  system.write("sys/fs/cgroup/cpu/docker/b/cpu.cfs_quota_us", "150000\n");
  CHECK_EQ(system.quota(), 2);
  system.write("sys/fs/cgroup/cpu/docker/b/cpu.cfs_period_us", "0\n");
  CHECK_EQ(system.quota(), 0);
}

}  // namespace
}  // namespace flashplan
