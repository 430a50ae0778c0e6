// SPDX-License-Identifier: Apache-2.0
// Files that no other user can have written, in folders that no other user can write to. Nothing
// here throws, except std::bad_alloc, and programs that this process starts inherit no descriptor.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace flashplan {

/// Owns a file descriptor, and closes it.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) noexcept : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;

  bool is_open() const noexcept { return number_ >= 0; }
  int number() const noexcept { return number_; }
  int release() noexcept;

 private:
  int number_;
};

/// Opens a folder that belongs to this user and that nobody else may write. If the folder does not
/// exist and `make` is true, makes it and the folders above it, for this user alone. If the folder
/// can not be used, the result is not open, and `problem` says why. If the folder does not exist
/// and `make` is false, the result is not open either, but `problem` stays empty.
Descriptor open_private_folder(const std::filesystem::path& path, bool make, std::string* problem);

/// Opens a file for reading, if it is a regular file of this user that nobody else may write, and
/// has at most `most_bytes` bytes. Does not follow links, and does not wait if it is a pipe.
Descriptor open_private_file(int folder, const std::string& name, std::size_t most_bytes);

/// The content of a regular file, given its descriptor; none if the file can not be read
/// completely.
std::optional<std::string> read_whole(int file);

/// Writes `content`. Returns false, and sets errno, if not everything could be written.
bool write_all(int file, std::string_view content) noexcept;

/// Writes a file under a name that nobody can foresee, `name` and 16 hexadecimal digits, and then
/// renames it to `name`. Returns 0 or an errno.
int write_private_file(int folder, const std::string& name, std::string_view content);

/// Whether `text` is exactly `count` hexadecimal digits in lower case.
bool is_hex(std::string_view text, std::size_t count) noexcept;

}  // namespace flashplan
