// SPDX-License-Identifier: Apache-2.0
#include "variant/private_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

namespace flashplan {
namespace {

namespace fs = std::filesystem;

/// Why another user may have written the file or folder; null if no other user can have.
const char* why_not_private(const struct stat& facts) noexcept {
  if (facts.st_uid != ::geteuid()) return "it belongs to another user";
  if ((facts.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "other users may write to it";
  return nullptr;
}

/// Makes a folder and the missing folders above it. Returns 0 or an errno.
int make_folders(const fs::path& path) {
  if (::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return 0;
  if (errno != ENOENT || !path.has_parent_path() || path.parent_path() == path) return errno;
  if (const int error = make_folders(path.parent_path()); error != 0) return error;
  return ::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST ? 0 : errno;
}

}  // namespace

Descriptor::~Descriptor() {
  if (is_open()) ::close(number_);
}

Descriptor::Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

int Descriptor::release() noexcept { return std::exchange(number_, -1); }

Descriptor open_private_folder(const fs::path& path, bool make, std::string* problem) {
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
  Descriptor folder(::open(path.c_str(), kFlags));
  int error = folder.is_open() ? 0 : errno;
  if (error == ENOENT) {
    if (!make) return folder;
    error = make_folders(path);
    if (error == 0) {
      folder = Descriptor(::open(path.c_str(), kFlags));
      error = folder.is_open() ? 0 : errno;
    }
  }
  struct stat facts = {};
  if (error == 0 && ::fstat(folder.number(), &facts) != 0) error = errno;
  const char* why = error != 0 ? std::strerror(error) : why_not_private(facts);
  if (why == nullptr) return folder;
  *problem = why;
  return Descriptor();
}

Descriptor open_private_file(int folder, const std::string& name, std::size_t most_bytes) {
  Descriptor file(
      ::openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  struct stat facts = {};
  if (!file.is_open() || ::fstat(file.number(), &facts) != 0) return Descriptor();
  const bool serves = S_ISREG(facts.st_mode) && why_not_private(facts) == nullptr &&
                      static_cast<uintmax_t>(facts.st_size) <= most_bytes;
  return serves ? std::move(file) : Descriptor();
}

std::optional<std::string> read_whole(int file) try {
  struct stat facts = {};
  if (::fstat(file, &facts) != 0) return {};
  std::string content(static_cast<std::size_t>(facts.st_size), '\0');
  std::size_t done = 0;
  while (done < content.size()) {
    const ssize_t count = ::read(file, content.data() + done, content.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return {};
    done += static_cast<std::size_t>(count);
  }
  return content;
} catch (const std::bad_alloc&) {
  return {};
}

bool write_all(int file, std::string_view content) noexcept {
  while (!content.empty()) {
    const ssize_t count = ::write(file, content.data(), content.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    content.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

int write_private_file(int folder, const std::string& name, std::string_view content) {
  uint64_t number = 0;
  if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) return errno;
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(number));
  const std::string beside = name + "." + digits;
  Descriptor file(
      ::openat(folder, beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file.is_open()) return errno;
  int error = write_all(file.number(), content) ? 0 : errno;
  // A remote file system may report a full disk only when the file is closed.
  if (::close(file.release()) != 0 && error == 0) error = errno;
  if (error == 0 && ::renameat(folder, beside.c_str(), folder, name.c_str()) != 0) error = errno;
  if (error != 0) ::unlinkat(folder, beside.c_str(), 0);
  return error;
}

bool is_hex(std::string_view text, std::size_t count) noexcept {
  return text.size() == count && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

}  // namespace flashplan
