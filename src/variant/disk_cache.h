// SPDX-License-Identifier: Apache-2.0
// Compiled variants on disk. The name of a file is a hash of everything that it was made from. Many
// processes may use the cache, so a file is written under another name and then renamed, and has a
// checksum. A failure of the disk leads to another compilation, not to an error. The files are
// executed, so they and their folder must belong to this user, and nobody else may be able to write
// them.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "variant/private_file.h"

namespace flashplan {

class DiskCache {
 public:
  /// Uses the folder that FLASHPLAN_CACHE_DIR names, or else the folder flashplan in XDG_CACHE_HOME
  /// or ~/.cache. The constructor reads the environment variables.
  DiskCache();

  /// The content of a file, if it exists and is undamaged. Marks the file as used now. The name is
  /// 64 hexadecimal digits.
  std::optional<std::string> load(const std::string& name) const;

  /// Keeps a file, and deletes the least recently used files until all of them fit into
  /// FLASHPLAN_CACHE_MB megabytes (by default 256). Returns false, with a warning, if the file
  /// could not be kept.
  bool store(const std::string& name, std::string_view content) const;

  /// A lock between processes. One process compiles a variant, while the others wait here and then
  /// load what it has stored. A process stops waiting after ten times compile_seconds(), since the
  /// process that holds the lock may have been stopped. Without a usable cache folder there is no
  /// lock, and no process waits.
  class Lock {
   public:
    Lock(const DiskCache& cache, const std::string& name);
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Descriptor folder_;
    Descriptor file_;
    std::string name_;
  };

 private:
  std::filesystem::path folder_;  // empty: there is no cache
};

/// The warning about the cache in this process. The first call that finds it returns it; all other
/// calls return an empty text.
std::string take_cache_warning() noexcept;

}  // namespace flashplan
