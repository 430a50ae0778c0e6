// SPDX-License-Identifier: Apache-2.0
// What is taken from the cache of variants is run. So it must be this user's own.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "variant/compiler_process.h"
#include "variant/disk_cache.h"
#include "variant/gpu_code.h"
#include "variant_compiler.h"
#include "variant_process.h"

namespace flashplan::test {
namespace {

namespace fs = std::filesystem;

const std::string kKey(64, 'a');

/// A cache of its own, as long as it lives.
struct OwnCache {
  TemporaryFolder above;
  fs::path folder = above.path() / "not" / "yet";
  OwnCache() { ::setenv("FLASHPLAN_CACHE_DIR", folder.c_str(), 1); }
  ~OwnCache() { ::setenv("FLASHPLAN_CACHE_DIR", fresh_variants.cache.path().c_str(), 1); }
  fs::path file(const std::string& key = kKey) const { return folder / (key + ".variant"); }
};

mode_t mode_of(const fs::path& path) {
  struct stat facts = {};
  CHECK(::lstat(path.c_str(), &facts) == 0);
  return facts.st_mode & 0777;
}

TEST(files_are_for_one_user) {
  const OwnCache cache;
  const mode_t before = ::umask(0);
  CHECK(!DiskCache().load(kKey));
  CHECK(!fs::exists(cache.folder));
  CHECK(DiskCache().store(kKey, "content"));
  ::umask(before);
  CHECK_EQ(DiskCache().load(kKey).value_or(""), "content");
  CHECK_EQ(mode_of(cache.folder.parent_path()), mode_t{0700});
  CHECK_EQ(mode_of(cache.folder), mode_t{0700});
  CHECK_EQ(mode_of(cache.file()), mode_t{0600});
  CHECK_EQ(names_in(cache.folder).size(), std::size_t{1});
}

TEST(files_that_others_may_have_written_are_not_loaded) {
  const OwnCache cache;
  const auto refused = [&](auto change) {
    fs::remove_all(cache.folder);
    CHECK(DiskCache().store(kKey, "content"));
    CHECK(DiskCache().load(kKey).has_value());
    change();
    CHECK(!DiskCache().load(kKey));
  };
  const std::string file = cache.file().string();
  refused([&] { ::chmod(file.c_str(), 0620); });
  refused([&] { ::chmod(file.c_str(), 0602); });
  refused([&] { ::chmod(cache.folder.c_str(), 0770); });
  refused([&] { ::chmod(cache.folder.c_str(), 0707); });
  refused([&] {
    fs::rename(file, cache.folder / "elsewhere");
    fs::create_symlink("elsewhere", file);
  });
  if (::geteuid() != 0) return;  // who else can give files away
  refused([&] { CHECK(::chown(file.c_str(), 65534, 0) == 0); });
  refused([&] { CHECK(::chown(cache.folder.c_str(), 65534, 0) == 0); });
}

TEST(what_is_no_file_is_no_entry) {
  const OwnCache cache;
  CHECK(DiskCache().store(kKey, "content"));
  const fs::path file = cache.file();
  fs::resize_file(file, 30);
  CHECK(!DiskCache().load(kKey));
  fs::resize_file(file, uintmax_t{16} << 30);  // sparse
  CHECK(!DiskCache().load(kKey));
  fs::remove(file);
  CHECK(::mkfifo(file.c_str(), 0600) == 0);
  CHECK(!DiskCache().load(kKey));
  fs::remove(file);
  fs::create_directory(file);
  CHECK(!DiskCache().load(kKey));
}

TEST(a_folder_of_others_is_a_warning) {
  const OwnCache cache;
  fs::create_directories(cache.folder);
  ::chmod(cache.folder.c_str(), 0777);
  take_cache_warning();
  CHECK(!DiskCache().store(kKey, "content"));
  CHECK(fs::is_empty(cache.folder));
  const std::string warning = take_cache_warning();
  // One warning for each process: it may have been given already.
  CHECK(warning.empty() || warning.find("other users may write to it") != std::string::npos);
}

TEST(a_full_disk_leaves_nothing) {
  const OwnCache cache;
  CHECK(DiskCache().store(kKey, "content"));
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small = {20, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const bool stored = DiskCache().store(std::string(64, 'b'), "content");
  ::setrlimit(RLIMIT_FSIZE, &before);
  CHECK(!stored);
  CHECK_EQ(names_in(cache.folder).size(), std::size_t{1});
}

TEST(only_own_files_are_deleted) {
  const OwnCache cache;
  CHECK(DiskCache().store(kKey, "content"));
  const std::vector<std::string> foreign = {"sample7.variant.vcf",
                                            "big.variant",
                                            std::string(63, 'c') + ".variant",
                                            std::string(63, 'c') + "G.variant",
                                            std::string(64, 'c') + ".variants",
                                            std::string(64, 'c') + ".variant.old",
                                            std::string(64, 'c') + ".variant.0123456789abcde",
                                            std::string(64, 'c') + ".variant.locked",
                                            std::string(64, 'c') + "d.variant.0123456789abcdef"};
  const std::string left_behind = std::string(64, 'c') + ".variant.0123456789abcdef";
  const std::string old_lock = std::string(64, 'c') + ".variant.lock";
  const std::string being_written = std::string(64, 'd') + ".variant.0123456789abcdef";
  const auto write = [&](const std::string& name, int hours) {
    std::ofstream(cache.folder / name) << "x";
    fs::resize_file(cache.folder / name, 2 << 20);
    fs::last_write_time(cache.folder / name,
                        fs::file_time_type::clock::now() - std::chrono::hours(hours));
  };
  for (const std::string& name : foreign) write(name, 2);
  write(left_behind, 2);
  write(old_lock, 2);
  write(being_written, 0);
  ::setenv("FLASHPLAN_CACHE_MB", "1", 1);
  const std::string old(64, 'e');
  write(old + ".variant", 1);
  CHECK(DiskCache().store(kKey, "content"));
  ::unsetenv("FLASHPLAN_CACHE_MB");
  for (const std::string& name : foreign) CHECK(fs::exists(cache.folder / name));
  CHECK(fs::exists(cache.folder / being_written));
  CHECK(!fs::exists(cache.folder / left_behind));
  CHECK(!fs::exists(cache.folder / old_lock));
  CHECK(!fs::exists(cache.file(old)));
  CHECK(fs::exists(cache.file()));
}

TEST(a_limit_beyond_all_numbers_keeps_files) {
  const OwnCache cache;
  for (const char* limit : {"17592186044416", "99999999999999999999999"}) {
    ::setenv("FLASHPLAN_CACHE_MB", limit, 1);
    CHECK(DiskCache().store(kKey, "content"));
    CHECK(DiskCache().load(kKey).has_value());
  }
  ::unsetenv("FLASHPLAN_CACHE_MB");
}

TEST(an_entry_that_does_not_load_is_compiled_anew) {
  const OwnCache cache;
  const Variant variant = shifted("reloaded");
  CHECK_EQ(in_a_child([&] { return compiles(variant); }), 0);
  const std::vector<std::string> names = names_in(cache.folder);
  CHECK_EQ(names.size(), std::size_t{1});
  const std::string key = names.at(0).substr(0, 64);
  const std::string good = DiskCache().load(key).value_or("");
  CHECK(!good.empty());
  CHECK(DiskCache().store(key, "no library"));
  CHECK_EQ(in_a_child([&] { return compiles(variant); }), 0);
  CHECK_EQ(DiskCache().load(key).value_or("").size(), good.size());
  // From the cache, without a compiler that works. In one process, several: none is mistaken for
  // another.
  const Variant second = shifted("second", "return x + 2.0f;");
  CHECK(compiles(second));
  CHECK_EQ(in_a_child([&] {
             Plan one, two;
             ::setenv("FLASHPLAN_COMPILE_SECONDS", "0.000001", 1);
             return Plan::create(options_with(variant), &one).ok() &&
                    Plan::create(options_with(second), &two).ok() && value_of(one) == 3.0F &&
                    value_of(two) == 4.0F;
           }),
           0);
}

/// A compiler that writes a line to `started` each time, and then takes at least `seconds`.
void use_slow_compiler(const fs::path& path, const fs::path& started, const char* seconds) {
  std::ofstream(path) << "#!/bin/sh\necho >> " << started << "\nsleep " << seconds
                      << "\nexec c++ \"$@\"\n";
  ::chmod(path.c_str(), 0700);
  ::setenv("CXX", path.c_str(), 1);
}

int lines_of(const fs::path& path) {
  std::ifstream file(path);
  int lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  return lines;
}

TEST(one_process_compiles_and_the_others_wait) {
  const OwnCache cache;
  const fs::path started = cache.above.path() / "started";
  use_slow_compiler(cache.above.path() / "slow", started, "1");
  const Variant variant = shifted("waited_for");
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) children.push_back(start_child([&] { return compiles(variant); }));
  for (const pid_t child : children) CHECK_EQ(end_of(child), 0);
  CHECK_EQ(lines_of(started), 1);
  CHECK_EQ(names_in(cache.folder).size(), std::size_t{1});  // no lock is left
  ::unsetenv("CXX");
}

TEST(a_compiler_behind_a_launcher_is_noticed) {
  const OwnCache cache;
  const fs::path folder = cache.above.path();
  const fs::path launcher = folder / "launcher";
  std::ofstream(launcher) << "#!/bin/sh\nexec \"$@\"\n";
  ::chmod(launcher.c_str(), 0700);
  const Variant variant = shifted("launched");
  const auto compile_by = [&](const char* seconds) {
    use_slow_compiler(folder / "compiler", folder / "started", seconds);
    ::setenv("CXX", (launcher.string() + " " + (folder / "compiler").string()).c_str(), 1);
    CHECK_EQ(end_of(start_child([&] { return compiles(variant); })), 0);
    return lines_of(folder / "started");
  };
  CHECK_EQ(compile_by("0"), 1);
  CHECK_EQ(compile_by("0.0"), 2);  // of another size
  ::unsetenv("CXX");
}

/// Starts a child that holds the lock until it is killed, and waits until it does.
pid_t start_holder(const OwnCache& cache) {
  const pid_t child = start_child([] {
    const DiskCache::Lock lock(DiskCache(), kKey);
    ::pause();
    return true;
  });
  while (!fs::exists(cache.folder / (kKey + ".variant.lock"))) ::usleep(1000);
  ::usleep(50000);  // the file is there before it is locked
  return child;
}

TEST(a_killed_process_holds_no_lock) {
  const OwnCache cache;
  const pid_t child = start_holder(cache);
  ::kill(child, SIGKILL);
  end_of(child);
  const auto start = std::chrono::steady_clock::now();
  const DiskCache::Lock lock(DiskCache(), kKey);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
}

TEST(only_a_positive_number_of_seconds_limits_a_compilation) {
  for (const char* given : {"", "0", "-3", "1e7", "nan", "soon", "30s"}) {
    ::setenv("FLASHPLAN_COMPILE_SECONDS", given, 1);
    CHECK_EQ(compile_seconds(), 60.0);
  }
  ::setenv("FLASHPLAN_COMPILE_SECONDS", "1.5", 1);
  CHECK_EQ(compile_seconds(), 1.5);
  ::unsetenv("FLASHPLAN_COMPILE_SECONDS");
  CHECK_EQ(compile_seconds(), 60.0);
}

TEST(a_stopped_process_is_not_waited_for) {
  const OwnCache cache;
  const pid_t child = start_holder(cache);
  ::setenv("FLASHPLAN_COMPILE_SECONDS", "0.02", 1);
  const auto start = std::chrono::steady_clock::now();
  {
    const DiskCache::Lock lock(DiskCache(), kKey);
  }
  const auto waited = std::chrono::steady_clock::now() - start;
  ::unsetenv("FLASHPLAN_COMPILE_SECONDS");
  CHECK(waited >= std::chrono::milliseconds(200) && waited < std::chrono::seconds(10));
  CHECK(fs::exists(cache.folder / (kKey + ".variant.lock")));  // it is the other's
  ::kill(child, SIGKILL);
  end_of(child);
}

// The child has no thread that would finish the compilation and unlock what it holds.
TEST(a_child_that_is_forked_while_a_thread_compiles) {
  const OwnCache cache;
  const fs::path started = cache.above.path() / "started";
  use_slow_compiler(cache.above.path() / "slow", started, "1");
  const Variant variant = shifted("forked");
  std::thread compiling([&] { CHECK(compiles(variant)); });
  while (!fs::exists(started)) ::usleep(1000);
  const pid_t child = start_child([&] {
    ::alarm(60);
    return compiles(variant);
  });
  CHECK_EQ(end_of(child), 0);
  compiling.join();
  CHECK_EQ(lines_of(started), 1);
  ::unsetenv("CXX");
}

// In place of NVRTC. Each compilation gives another cubin: "a", "b", ...
constexpr const char* kFakeNvrtc = R"(
#include <cstddef>
#define API(name) extern "C" int nvrtc##name
static char cubin_text = 'a' - 1;
API(Version)(int* major, int* minor) { return *major = 13, *minor = 0; }
API(CreateProgram)(void**, const char*, const char*, int, const char* const*,
                   const char* const*) { return 0; }
API(DestroyProgram)(void**) { return 0; }
API(AddNameExpression)(void*, const char*) { return 0; }
API(CompileProgram)(void*, int, const char* const*) { return ++cubin_text, 0; }
API(GetProgramLogSize)(void*, size_t* size) { return *size = 0, 0; }
API(GetProgramLog)(void*, char*) { return 0; }
API(GetCUBINSize)(void*, size_t* size) { return *size = 1, 0; }
API(GetCUBIN)(void*, char* cubin) { return *cubin = cubin_text, 0; }
API(GetLoweredName)(void*, const char*, const char** name) { return *name = "kernel", 0; }
)";

TEST(a_cubin_that_is_refused_is_compiled_anew) {
  const OwnCache cache;
  const fs::path& folder = cache.above.path();
  std::ofstream(folder / "nvrtc.cpp") << kFakeNvrtc;
  CHECK(run_process({find_program("c++"), "-shared", "-fPIC", "-o", "nvrtc.so", "nvrtc.cpp"},
                    folder, 60)
            .succeeded);
  ::setenv("FLASHPLAN_NVRTC", (folder / "nvrtc.so").c_str(), 1);
  const Variant variant = shifted("refused");
  GpuKernelTraits traits;
  traits.program = kSm80Program;
  std::string key;
  CHECK(gpu_code_key(*variant.impl(), traits, &key).ok());
  const auto make = [&](const GpuCode* refused) {
    GpuCode code;
    CHECK(make_gpu_code(*variant.impl(), traits, key, &code, refused).ok());
    CHECK_EQ(code.kernel, "kernel");
    return code;
  };
  CHECK(!make(nullptr).was_cached);
  const GpuCode first = make(nullptr);
  CHECK(first.was_cached);
  CHECK_EQ(first.cubin, "a");
  const GpuCode second = make(&first);
  CHECK(!second.was_cached);
  CHECK_EQ(second.cubin, "b");
  CHECK(make(nullptr).was_cached);
  CHECK_EQ(make(&first).cubin, "b");  // what another process has stored
  CHECK_EQ(names_in(cache.folder).size(), std::size_t{1});
}

}  // namespace
}  // namespace flashplan::test
