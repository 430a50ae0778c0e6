// SPDX-License-Identifier: Apache-2.0
#include "variant/disk_cache.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "common/sha256.h"

namespace flashplan {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".variant";
constexpr std::string_view kMagic = "flashplan cache 1";  // before the checksum, at the end
constexpr std::size_t kTrailerSize = kMagic.size() + sizeof(Sha256::Digest);

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

fs::path cache_folder() {
  if (const char* own = environment("FLASHPLAN_CACHE_DIR"); *own != '\0') return own;
  // The specification of these folders ignores relative paths.
  if (const char* caches = environment("XDG_CACHE_HOME"); *caches == '/') {
    return fs::path(caches) / "flashplan";
  }
  if (const char* home = environment("HOME"); *home != '\0') {
    return fs::path(home) / ".cache" / "flashplan";
  }
  return {};
}

uintmax_t most_bytes() {
  constexpr uintmax_t kMegabyte = 1 << 20;
  const char* text = environment("FLASHPLAN_CACHE_MB");
  char* end = nullptr;
  const unsigned long megabytes = std::strtoul(text, &end, 10);
  const bool is_number = *text >= '0' && *text <= '9' && *end == '\0';
  return (is_number ? megabytes : 256) * kMegabyte;
}

struct Warning {
  std::mutex mutex;
  std::string text;
  bool was_given = false;
};

Warning& warning() {
  static auto* const one = new Warning;  // outlives threads that run at exit
  return *one;
}

void warn(const fs::path& folder, const char* reason) {
  const std::scoped_lock lock(warning().mutex);
  if (warning().was_given) return;
  warning().was_given = true;
  warning().text = "flashplan compiles variants in every process, because its folder for them \"" +
                   folder.string() + "\" can not be used (" + reason +
                   "). FLASHPLAN_CACHE_DIR names another one.";
}

std::string checksum(std::string_view content) {
  Sha256 hash;
  hash.add(content.data(), content.size());
  const Sha256::Digest digest = hash.digest();
  return std::string(kMagic) + std::string(digest.begin(), digest.end());
}

struct CachedFile {
  fs::file_time_type used;
  uintmax_t size;
  fs::path path;
};

/// Deletes those used longest ago, and what a process that ended early has left behind.
void evict(const fs::path& folder) {
  std::error_code error;
  const auto old = fs::file_time_type::clock::now() - std::chrono::hours(1);
  std::vector<CachedFile> files;
  uintmax_t total = 0;
  for (fs::directory_iterator i(folder, error), end; !error && i != end; i.increment(error)) {
    std::error_code gone;  // another process may delete files at the same time
    const fs::path path = i->path();
    const auto used = i->last_write_time(gone);
    const auto size = i->file_size(gone);
    if (gone) continue;
    if (path.extension() == kSuffix) {
      files.push_back({used, size, path});
      total += size;
    } else if (path.filename().string().find(".variant.") != std::string::npos && used < old) {
      fs::remove(path, gone);
    }
  }
  std::sort(files.begin(), files.end(),
            [](const CachedFile& a, const CachedFile& b) { return a.used < b.used; });
  for (const CachedFile& file : files) {
    if (total <= most_bytes()) return;
    std::error_code gone;
    fs::remove(file.path, gone);
    total -= file.size;
  }
}

}  // namespace

DiskCache::DiskCache() : folder_(cache_folder()) {}

fs::path DiskCache::path(const std::string& name) const {
  return folder_.empty() ? fs::path() : folder_ / (name + std::string(kSuffix));
}

std::optional<std::string> DiskCache::load(const std::string& name) const {
  if (folder_.empty()) return {};
  std::ifstream file(path(name), std::ios::binary);
  if (!file) return {};
  std::string content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (content.size() < kTrailerSize) return {};
  const std::size_t size = content.size() - kTrailerSize;
  if (content.compare(size, kTrailerSize, checksum({content.data(), size})) != 0) return {};
  content.resize(size);
  std::error_code ignored;  // a folder that can not be written serves all the same
  fs::last_write_time(path(name), fs::file_time_type::clock::now(), ignored);
  return content;
}

bool DiskCache::store(const std::string& name, std::string_view content) const {
  static std::atomic<uint32_t> count{0};
  if (folder_.empty()) {
    warn(folder_, "HOME is not set");
    return false;
  }
  std::error_code error;
  if (!fs::exists(folder_, error)) {
    fs::create_directories(folder_, error);
    if (error) {
      warn(folder_, error.message().c_str());
      return false;
    }
    fs::permissions(folder_, fs::perms::owner_all, error);
  }
  const fs::path to = path(name);
  const fs::path beside = to.string() + "." + std::to_string(::getpid()) + "." +
                          std::to_string(count.fetch_add(1, std::memory_order_relaxed));
  errno = 0;
  {
    std::ofstream file(beside, std::ios::binary);
    file << content << checksum(content);
    file.close();
    if (!file) {
      warn(folder_, errno != 0 ? std::strerror(errno) : "writing failed");
      fs::remove(beside, error);
      return false;
    }
  }
  fs::rename(beside, to, error);
  if (error) {
    warn(folder_, error.message().c_str());
    fs::remove(beside, error);
    return false;
  }
  evict(folder_);
  return true;
}

std::string take_cache_warning() noexcept try {
  const std::scoped_lock lock(warning().mutex);
  return std::exchange(warning().text, {});
} catch (...) {
  return {};
}

}  // namespace flashplan
