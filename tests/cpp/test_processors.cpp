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
  void mount_version_2(const char* top = "/") const {
    const std::string line =
        std::string("30 23 0:26 ") + top + " /sys/fs/cgroup rw - cgroup2 none rw";
    write("proc/self/mountinfo", line.c_str());
  }
  int32_t quota() const { return cgroup_quota(root_); }

 private:
  fs::path root_;
};

TEST(without_groups_there_is_no_quota) {
  const System system;
  CHECK_EQ(system.quota(), 0);
  system.write("proc/self/mountinfo", "rubbish\n\n30 23 0:26 / /sys/fs/cgroup rw -\n");
  CHECK_EQ(system.quota(), 0);
  system.mount_version_2();
  CHECK_EQ(system.quota(), 0);
  system.write("proc/self/cgroup", "0::/\n");
  CHECK_EQ(system.quota(), 0);
  system.write("proc/self/cgroup", "rubbish\n:\n\n1:cpu\n");
  CHECK_EQ(system.quota(), 0);
}

TEST(version_2_has_quota_and_period_in_one_file) {
  const System system;
  system.mount_version_2();
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
  for (const char* top : {"/", "/host/path", "/host/path/of/the/pod", "/another/pod"}) {
    system.mount_version_2(top);
    CHECK_EQ(system.quota(), 3);
  }
}

TEST(a_group_inside_a_container_is_below_what_the_container_sees) {
  const System system;
  system.mount_version_2("/docker/a");
  system.write("proc/self/cgroup", "0::/docker/a/part\n");
  system.write("sys/fs/cgroup/cpu.max", "500000 100000\n");
  system.write("sys/fs/cgroup/part/cpu.max", "200000 100000\n");
  CHECK_EQ(system.quota(), 2);
}

TEST(version_1_has_a_file_for_each_and_no_quota_below_0) {
  const System system;
  system.write("proc/self/mountinfo",
               "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
               "32 31 0:29 / /elsewhere/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
               "34 31 0:31 / /elsewhere/cpuset rw shared:11 - cgroup cgroup rw,cpuset\n");
  system.write("proc/self/cgroup", "5:cpuset:/a\n4:cpu,cpuacct:/docker/b\n3:memory:/c\n0::/d\n");
  const std::string group = "elsewhere/cpu,cpuacct/docker/b/";
  const auto set = [&](const char* name, const char* value) {
    system.write((group + name).c_str(), value);
  };
  set("cpu.cfs_quota_us", "-1\n");
  set("cpu.cfs_period_us", "100000\n");
  CHECK_EQ(system.quota(), 0);
  set("cpu.cfs_quota_us", "150000\n");
  CHECK_EQ(system.quota(), 2);
  // A quota in the hierarchy of another controller (cpuset) does not count.
  system.write("elsewhere/cpuset/docker/b/cpu.cfs_quota_us", "50000\n");
  system.write("elsewhere/cpuset/docker/b/cpu.cfs_period_us", "100000\n");
  CHECK_EQ(system.quota(), 2);
  set("cpu.cfs_period_us", "0\n");
  CHECK_EQ(system.quota(), 0);
}

}  // namespace
}  // namespace flashplan
