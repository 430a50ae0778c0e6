// SPDX-License-Identifier: Apache-2.0
#include "variant/compiler_process.h"

#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <system_error>
#include <thread>

#include "variant/private_file.h"

namespace flashplan {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostOutput = 64 << 10;

/// Reads from a pipe once, and appends the bytes to `output`. Returns false at the end of the pipe.
bool read_some(int pipe, std::string* output) {
  std::array<char, 4096> buffer;
  const ssize_t count = ::read(pipe, buffer.data(), buffer.size());
  if (count < 0) return errno == EINTR;
  output->append(buffer.data(),
                 std::min(static_cast<std::size_t>(count), kMostOutput - output->size()));
  return count > 0;
}

bool is_readable(int pipe, int milliseconds) {
  pollfd waiting = {pipe, POLLIN, 0};
  return ::poll(&waiting, 1, milliseconds) > 0;
}

/// Returns whether a process has ended, and if so sets `status`.
bool has_ended(pid_t process, int* status) {
  const pid_t ended = ::waitpid(process, status, WNOHANG);
  if (ended == process) return true;
  // If this process ignores SIGCHLD, or waits for all its children elsewhere, the status is lost,
  // and counts as 0.
  if (ended < 0 && errno == ECHILD) return *status = 0, true;
  return false;
}

/// Reads the output of a process until the process ends, and keeps the first kMostOutput bytes. It
/// does not wait for the end of the pipe, because processes that the compiler has started may keep
/// the pipe open. Returns whether the process ended before the deadline.
bool follow(pid_t process, int pipe, Clock::time_point deadline, std::string* output, int* status) {
  bool is_open = true;
  while (!has_ended(process, status)) {
    if (Clock::now() >= deadline) return false;
    if (!is_open) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    } else if (is_readable(pipe, 10)) {
      is_open = read_some(pipe, output);
    }
  }
  // Reads the last output, but no more than the 64 KB that a pipe holds, so that other processes
  // that still write can not keep this loop going.
  for (std::size_t i = 0; is_open && i < kMostOutput / 4096 && is_readable(pipe, 0); ++i) {
    is_open = read_some(pipe, output);
  }
  return true;
}

/// Kills a process and its group at the end of the scope, unless it has ended.
class Killer {
 public:
  explicit Killer(pid_t process) noexcept : process_(process) {}
  ~Killer() {
    if (has_ended) return;
    ::kill(-process_, SIGKILL);
    int status = 0;
    while (::waitpid(process_, &status, 0) < 0 && errno == EINTR) {
    }
  }
  Killer(const Killer&) = delete;
  Killer& operator=(const Killer&) = delete;

  bool has_ended = false;

 private:
  pid_t process_;
};

/// A stream over a text, which may be null. The stream throws when memory runs out. By default it
/// would behave as at the end of the text.
std::istringstream stream_of(const char* text) {
  std::istringstream stream(text != nullptr ? text : "");
  stream.exceptions(std::ios::badbit);
  return stream;
}

/// Starts `command` in a process group of its own, with stdout and stderr going to `output_end`.
/// Returns 0 or an errno.
int start(const std::vector<std::string>& command, const fs::path& folder, int output_end,
          pid_t* process) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  // In the locale C compilers write their messages in English, the language in which errors are
  // searched for. Other settings of the locale are left out.
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::string(*entry).rfind("LC_", 0) != 0) environment.push_back(*entry);
  }
  char locale[] = "LC_ALL=C";
  environment.push_back(locale);
  environment.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, output_end, 1);
  posix_spawn_file_actions_adddup2(&actions, output_end, 2);
  posix_spawn_file_actions_addchdir_np(&actions, folder.c_str());
  // The compiler gets the default handling of signals, whatever handling this process has set.
  sigset_t none, defaults;
  sigemptyset(&none);
  sigemptyset(&defaults);
  for (const int signal : {SIGPIPE, SIGCHLD, SIGINT, SIGTERM}) sigaddset(&defaults, signal);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(
      &attributes,
      static_cast<short>(POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF));
  const int error =
      posix_spawn(process, argv[0], &actions, &attributes, argv.data(), environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return error;
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  std::error_code error;
  const fs::path base = fs::temp_directory_path(error);
  if (error) return;
  std::string name = (base / "flashplan-XXXXXX").string();
  if (::mkdtemp(name.data()) != nullptr) path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  // fs::remove_all() would end the process if there is no memory to list a folder, so this uses
  // nftw().
  const auto remove_one = [](const char* path, const struct stat*, int, struct FTW*) {
    std::remove(path);
    return 0;
  };
  constexpr int kMostOpen = 8;
  if (!path_.empty()) ::nftw(path_.c_str(), remove_one, kMostOpen, FTW_DEPTH | FTW_PHYS);
}

ProcessResult run_process(const std::vector<std::string>& command, const fs::path& folder,
                          double seconds) {
  ProcessResult result;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(seconds));
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    result.error = errno;
    return result;
  }
  const Descriptor output(ends[0]);
  Descriptor input(ends[1]);
  pid_t process = 0;
  result.error = start(command, folder, input.number(), &process);
  input = Descriptor();
  if (result.error != 0) return result;
  Killer killer(process);
  int status = 0;
  const bool ended = follow(process, output.number(), deadline, &result.output, &status);
  killer.has_ended = ended;
  result.outcome = ended ? ProcessResult::Outcome::kEnded : ProcessResult::Outcome::kTimeout;
  result.succeeded = ended && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  return result;
}

std::string find_program(const std::string& name) {
  const auto is_program = [](const std::string& path) {
    std::error_code error;
    return fs::is_regular_file(path, error) && ::access(path.c_str(), X_OK) == 0;
  };
  // The program is started in another working folder, where a relative path would be wrong.
  const auto absolute = [](const std::string& path) {
    std::error_code error;
    const std::string whole = fs::absolute(path, error).string();
    return error ? std::string() : whole;
  };
  if (name.find('/') != std::string::npos) return is_program(name) ? absolute(name) : "";
  const char* folders = std::getenv("PATH");
  std::istringstream list = stream_of(folders);
  for (std::string folder; std::getline(list, folder, ':');) {
    const std::string path = folder + "/" + name;
    if (!folder.empty() && is_program(path)) return absolute(path);
  }
  return "";
}

std::vector<std::string> words_of(const char* environment) {
  const char* text = std::getenv(environment);
  std::istringstream words = stream_of(text);
  return {std::istream_iterator<std::string>(words), {}};
}

double compile_seconds() {
  const char* text = std::getenv("FLASHPLAN_COMPILE_SECONDS");
  char* end = nullptr;
  const double seconds = text != nullptr ? std::strtod(text, &end) : 0.0;
  return seconds > 0.0 && seconds < 1e6 && *end == '\0' ? seconds : 60.0;
}

}  // namespace flashplan
