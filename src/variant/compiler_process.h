// SPDX-License-Identifier: Apache-2.0
// Runs a compiler: no shell, bounded time, bounded output.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace flashplan {

/// A private folder that is deleted with what is in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  /// Empty if none could be made.
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

struct ProcessResult {
  enum class Outcome { kEnded, kNotStarted, kTimeout };
  Outcome outcome = Outcome::kNotStarted;
  bool succeeded = false;  // ended with status 0
  int error = 0;           // why it was not started, as errno
  std::string output;      // of stdout and stderr, the first 64 KB
};

/// Runs a program, by its path and with its working folder, and waits for it. Past `seconds` it and
/// all that it has started are killed.
ProcessResult run_process(const std::vector<std::string>& command,
                          const std::filesystem::path& folder, double seconds);

/// The path of a program: itself if it has a slash, else where PATH has it; empty: nowhere.
std::string find_program(const std::string& name);

/// The words of an environment variable, as options of a compiler.
std::vector<std::string> words_of(const char* environment);

/// The longest that a compilation may take: FLASHPLAN_COMPILE_SECONDS, 60.
double compile_seconds();

}  // namespace flashplan
