// SPDX-License-Identifier: Apache-2.0
// Runs a compiler: no shell, bounded time, bounded output.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace flashplan {

/// A private folder, which is deleted together with its contents.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  /// Empty if the folder could not be made.
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

struct ProcessResult {
  enum class Outcome { kEnded, kNotStarted, kTimeout };
  Outcome outcome = Outcome::kNotStarted;
  bool succeeded = false;  // ended with status 0; if the status is lost (SIGCHLD ignored), ended
  int error = 0;           // why it was not started, as errno
  std::string output;      // of stdout and stderr, the first 64 KB
};

/// Runs a program in a working folder, and waits for it, but not for what it leaves running. After
/// `seconds` it is killed, together with all processes that it has started.
ProcessResult run_process(const std::vector<std::string>& command,
                          const std::filesystem::path& folder, double seconds);

/// The absolute path of a program. A name without a slash is looked up in PATH. Empty if there is
/// no such program.
std::string find_program(const std::string& name);

/// The words of an environment variable, as options of a compiler.
std::vector<std::string> words_of(const char* environment);

/// The longest that a compilation may take: FLASHPLAN_COMPILE_SECONDS, 60.
double compile_seconds();

}  // namespace flashplan
