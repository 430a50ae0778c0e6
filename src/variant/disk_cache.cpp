// SPDX-License-Identifier: Apache-2.0
#include "variant/disk_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/forks.h"
#include "common/sha256.h"
#include "variant/compiler_process.h"

namespace flashplan {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".variant";
constexpr std::string_view kLockSuffix = ".variant.lock";
constexpr std::size_t kKeySize = 64;
constexpr std::string_view kMagic = "flashplan cache 1";  // a file ends with kMagic and a checksum
// The largest file that is read. No compiled variant is so large.
constexpr std::size_t kMostFileBytes = 256 << 20;
constexpr std::size_t kTrailerSize = kMagic.size() + sizeof(Sha256::Digest);

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

fs::path cache_folder() {
  if (const char* own = environment("FLASHPLAN_CACHE_DIR"); *own != '\0') return own;
  // The XDG specification says that relative paths are ignored.
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
  constexpr uintmax_t kMost = std::numeric_limits<uintmax_t>::max() / kMegabyte;
  const char* text = environment("FLASHPLAN_CACHE_MB");
  char* end = nullptr;
  const unsigned long megabytes = std::strtoul(text, &end, 10);
  const bool is_number = *text >= '0' && *text <= '9' && *end == '\0';
  return std::min<uintmax_t>(is_number ? megabytes : 256, kMost) * kMegabyte;
}

struct Warning {
  std::string text;
  bool was_given = false;
};

Warning& warning() {
  static auto* const one = new Warning;  // outlives threads that run at exit
  return *one;
}

void warn(const fs::path& folder, const std::string& reason) {
  const auto lock = fork_safe_lock<Warning>();
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

std::string file_name(const std::string& name) { return name + std::string(kSuffix); }

/// Opens the folder, with a warning if it can not be used.
Descriptor open_folder(const fs::path& path, bool make) {
  std::string problem;
  Descriptor folder;
  if (!path.empty()) {
    folder = open_private_folder(path, make, &problem);
  } else if (make) {
    problem = "HOME is not set";
  }
  if (!problem.empty()) warn(path, problem);
  return folder;
}

enum class Kind { kForeign, kEntry, kTemporary };

/// Tells from its name what a file in the folder is. A file with a name that DiskCache never gives
/// is kForeign, and is never deleted.
Kind kind_of(std::string_view name) {
  const std::string_view key = name.substr(0, kKeySize);
  const std::string_view suffix = name.substr(key.size());
  if (!is_hex(key, kKeySize) || !suffix.starts_with(kSuffix)) return Kind::kForeign;
  const std::string_view rest = suffix.substr(kSuffix.size());
  if (rest.empty()) return Kind::kEntry;
  if (suffix == kLockSuffix) return Kind::kTemporary;
  return rest.starts_with('.') && is_hex(rest.substr(1), 16) ? Kind::kTemporary : Kind::kForeign;
}

struct CachedFile {
  int64_t used;  // time of the last use, in nanoseconds
  uintmax_t size;
  std::string name;
};

/// Deletes the least recently used files until all fit into most_bytes(), and temporary files older
/// than an hour, which processes that ended early have left behind.
void evict(int folder) {
  Descriptor again(::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto close = [](DIR* list) { ::closedir(list); };
  const std::unique_ptr<DIR, decltype(close)> list(
      again.is_open() ? ::fdopendir(again.number()) : nullptr, close);
  if (list == nullptr) return;
  again.release();  // closedir() closes it
  const int64_t hour_ago = static_cast<int64_t>(std::time(nullptr)) - 3600;
  std::vector<CachedFile> files;
  uintmax_t total = 0;
  while (const dirent* entry = ::readdir(list.get())) {
    const Kind kind = kind_of(entry->d_name);
    struct stat facts = {};
    if (kind == Kind::kForeign ||
        ::fstatat(folder, entry->d_name, &facts, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(facts.st_mode)) {
      continue;
    }
    if (kind == Kind::kEntry) {
      const auto size = static_cast<uintmax_t>(facts.st_size);
      files.push_back({facts.st_mtim.tv_sec * INT64_C(1000000000) + facts.st_mtim.tv_nsec, size,
                       entry->d_name});
      total += size;
    } else if (facts.st_mtim.tv_sec < hour_ago) {
      ::unlinkat(folder, entry->d_name, 0);
    }
  }
  std::sort(files.begin(), files.end(),
            [](const CachedFile& a, const CachedFile& b) { return a.used < b.used; });
  for (const CachedFile& file : files) {
    if (total <= most_bytes()) return;
    ::unlinkat(folder, file.name.c_str(), 0);
    total -= file.size;
  }
}

}  // namespace

DiskCache::DiskCache() : folder_(cache_folder()) {}

std::optional<std::string> DiskCache::load(const std::string& name) const {
  const Descriptor folder = open_folder(folder_, false);
  if (!folder.is_open()) return {};
  const Descriptor file = open_private_file(folder.number(), file_name(name), kMostFileBytes);
  if (!file.is_open()) return {};
  std::optional<std::string> content = read_whole(file.number());
  if (!content || content->size() < kTrailerSize) return {};
  const std::size_t size = content->size() - kTrailerSize;
  if (content->compare(size, kTrailerSize, checksum({content->data(), size})) != 0) return {};
  content->resize(size);
  ::futimens(file.number(), nullptr);  // may fail, as in a folder that can only be read
  return content;
}

bool DiskCache::store(const std::string& name, std::string_view content) const {
  const Descriptor folder = open_folder(folder_, true);
  if (!folder.is_open()) return false;
  const int error = write_private_file(folder.number(), file_name(name),
                                       std::string(content) + checksum(content));
  if (error != 0) {
    warn(folder_, std::strerror(error));
    return false;
  }
  evict(folder.number());
  return true;
}

DiskCache::Lock::Lock(const DiskCache& cache, const std::string& name)
    : folder_(open_folder(cache.folder_, true)), name_(name + std::string(kLockSuffix)) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(10 * compile_seconds()));
  while (folder_.is_open() && Clock::now() < deadline) {
    Descriptor file(::openat(folder_.number(), name_.c_str(),
                             O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
    if (!file.is_open()) return;
    // A lock of fcntl() belongs to the process. A forked child would inherit a lock of flock(), and
    // so hold it for too long.
    struct flock whole = {};
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    if (::fcntl(file.number(), F_SETLK, &whole) == 0) {
      struct stat facts = {};
      // If the last holder of the lock has deleted this file, other processes may lock a new file
      // of this name, so this process must lock the new file.
      if (::fstat(file.number(), &facts) == 0 && facts.st_nlink == 0) continue;
      file_ = std::move(file);
      return;
    }
    if (errno != EACCES && errno != EAGAIN && errno != EINTR) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

DiskCache::Lock::~Lock() {
  if (file_.is_open()) ::unlinkat(folder_.number(), name_.c_str(), 0);
}

std::string take_cache_warning() noexcept try {
  const auto lock = fork_safe_lock<Warning>();
  return std::exchange(warning().text, {});
} catch (...) {
  return {};
}

}  // namespace flashplan
