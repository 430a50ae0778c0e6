// SPDX-License-Identifier: Apache-2.0
// Compiled variants on disk, named by all that they were made from. Safe for many processes: a file
// is written beside its place and renamed, and carries a checksum. Whatever goes wrong on disk
// costs a compilation, not an error.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace flashplan {

class DiskCache {
 public:
  /// FLASHPLAN_CACHE_DIR, else flashplan in XDG_CACHE_HOME or ~/.cache. The environment is read
  /// now.
  DiskCache();

  /// Where the file of this name is, or would be; empty if there is no folder for it.
  std::filesystem::path path(const std::string& name) const;

  /// The content of a file, if it is there and undamaged; it then counts as used now.
  std::optional<std::string> load(const std::string& name) const;

  /// Keeps a file, and deletes those used longest ago while all are larger than
  /// FLASHPLAN_CACHE_MB (256). What can not be kept is a warning; returns whether it was.
  bool store(const std::string& name, std::string_view content) const;

 private:
  std::filesystem::path folder_;  // empty: none
};

/// What went wrong with the cache in this process, once; empty: nothing, or it was taken before.
std::string take_cache_warning() noexcept;

}  // namespace flashplan
