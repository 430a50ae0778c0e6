// SPDX-License-Identifier: Apache-2.0
// Runs a compiler without a shell, for a bounded time, and keeps a bounded part of its output.
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
  bool succeeded = false;  // it ended with status 0, or with a lost status (SIGCHLD ignored)
  int error = 0;           // the errno of a start that failed
  std::string output;      // of stdout and stderr, the first 64 KB
};

/// Runs a program in a working folder. Waits for the program, but not for processes that it leaves
/// running. After `seconds` kills it, together with all processes of its group.
ProcessResult run_process(const std::vector<std::string>& command,
                          const std::filesystem::path& folder, double seconds);

/// The absolute path of a program. A name without a slash is looked up in PATH. Empty if there is
/// no such program.
std::string find_program(const std::string& name);

/// The words of an environment variable, separated by spaces, such as options for a compiler.
std::vector<std::string> words_of(const char* environment);

/// The longest time that a compilation may take: FLASHPLAN_COMPILE_SECONDS, by default 60.
double compile_seconds();

}  // namespace flashplan
