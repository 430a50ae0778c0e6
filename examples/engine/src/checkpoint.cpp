// SPDX-License-Identifier: Apache-2.0
#include "checkpoint.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <map>
#include <span>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "json.h"

namespace engine {

namespace {

namespace fs = std::filesystem;

using Bytes = std::span<const std::byte>;

int64_t num_elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

std::string to_string(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

/// The bytes of a file, for as long as anybody has the pointer.
std::shared_ptr<const Bytes> map_file(const fs::path& path) {
  const auto fail = [&] { throw std::system_error(errno, std::generic_category(), path.string()); };
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail();
  struct stat status{};
  if (fstat(file, &status) != 0) {
    close(file);
    fail();
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  void* address = size == 0 ? nullptr : mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  const int error = errno;
  close(file);
  errno = error;
  if (address == MAP_FAILED) fail();
  return {new Bytes(static_cast<const std::byte*>(address), size), [](const Bytes* bytes) {
            if (!bytes->empty()) munmap(const_cast<std::byte*>(bytes->data()), bytes->size());
            delete bytes;
          }};
}

struct Entry {
  std::string dtype;
  std::vector<int64_t> shape;
  Bytes bytes;
  std::shared_ptr<const Bytes> file;
};

/// Reads a file, which has the length of the header in 8 bytes, the header, and the bytes of all
/// tensors.
void read_entries(const fs::path& path, std::map<std::string, Entry, std::less<>>* entries) {
  static_assert(std::endian::native == std::endian::little, "files are little-endian");
  const auto refuse = [&](const std::string& expected) {
    throw std::invalid_argument(path.string() + ": expected " + expected);
  };
  const std::shared_ptr<const Bytes> file = map_file(path);
  uint64_t header_size = 0;
  if (file->size() < sizeof(header_size)) refuse("the length of a header, got a shorter file");
  std::memcpy(&header_size, file->data(), sizeof(header_size));
  const Bytes rest = file->subspan(sizeof(header_size));
  if (header_size > rest.size()) refuse("a header, got a shorter file");
  const Bytes data = rest.subspan(header_size);
  const Json header = Json::parse({reinterpret_cast<const char*>(rest.data()), header_size});
  for (const auto& [name, value] : header.object()) {
    if (name == "__metadata__") continue;
    Entry entry;
    entry.dtype = value.at("dtype").string();
    for (const Json& size : value.at("shape").array()) entry.shape.push_back(size.integer());
    const Json::Array& offsets = value.at("data_offsets").array();
    if (offsets.size() != 2) refuse("two data_offsets of " + name);
    const int64_t begin = offsets[0].integer(), end = offsets[1].integer();
    if (begin < 0 || end < begin || static_cast<uint64_t>(end) > data.size()) {
      refuse("data_offsets of " + name + " inside of the file");
    }
    entry.bytes =
        data.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    entry.file = file;
    entries->insert_or_assign(name, std::move(entry));
  }
}

std::shared_ptr<float> allocate(std::size_t count) {
  return {new float[count], std::default_delete<float[]>()};
}

class Checkpoint final : public WeightSource {
 public:
  explicit Checkpoint(const fs::path& folder) {
    for (const fs::directory_entry& file : fs::directory_iterator(folder)) {
      if (file.path().extension() == ".safetensors") read_entries(file.path(), &entries_);
    }
    if (entries_.empty()) {
      throw std::invalid_argument(folder.string() + ": expected *.safetensors, got none");
    }
  }

  Weights load(const std::string& name, const std::vector<int64_t>& shape) override {
    const auto place = entries_.find(name);
    if (place == entries_.end()) throw std::invalid_argument(name + ": no file has these weights");
    const Entry& entry = place->second;
    const std::string got = entry.dtype + " " + to_string(entry.shape);
    const bool is_wide = entry.dtype == "F32";
    if (entry.shape != shape || (!is_wide && entry.dtype != "BF16")) {
      throw std::invalid_argument(name + ": expected F32 or BF16 " + to_string(shape) + ", got " +
                                  got);
    }
    const auto count = static_cast<std::size_t>(num_elements(shape));
    if (entry.bytes.size() != count * (is_wide ? 4 : 2)) {
      throw std::invalid_argument(name + ": expected the bytes of " + got + ", got " +
                                  std::to_string(entry.bytes.size()));
    }
    const std::byte* from = entry.bytes.data();
    if (is_wide && reinterpret_cast<uintptr_t>(from) % alignof(float) == 0) {
      return {entry.file, reinterpret_cast<const float*>(from)};
    }
    const std::shared_ptr<float> values = allocate(count);
    if (is_wide) {
      std::memcpy(values.get(), from, entry.bytes.size());
      return values;
    }
    for (std::size_t i = 0; i < count; ++i) {
      uint16_t upper = 0;
      std::memcpy(&upper, from + 2 * i, sizeof(upper));
      values.get()[i] = std::bit_cast<float>(static_cast<uint32_t>(upper) << 16);
    }
    return values;
  }

 private:
  std::map<std::string, Entry, std::less<>> entries_;
};

class RandomWeights final : public WeightSource {
 public:
  explicit RandomWeights(uint64_t seed) : seed_(seed) {}

  Weights load(const std::string& name, const std::vector<int64_t>& shape) override {
    uint64_t state = seed_;
    for (const char c : name) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    const bool is_vector = shape.size() == 1;
    // Uniform numbers in [-scale, scale), with the variance 1 / inputs.
    const float scale = is_vector ? 0.1F : std::sqrt(3.0F / static_cast<float>(shape.back()));
    const auto count = static_cast<std::size_t>(num_elements(shape));
    const std::shared_ptr<float> values = allocate(count);
    for (std::size_t i = 0; i < count; ++i) {
      const float unit = static_cast<float>(next(&state) >> 40) * 0x1p-23F - 1.0F;
      values.get()[i] = (is_vector ? 1.0F : 0.0F) + scale * unit;
    }
    return values;
  }

 private:
  /// Returns the next random number, by SplitMix64 (Steele, Lea and Flood, 2014).
  static uint64_t next(uint64_t* state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  uint64_t seed_;
};

}  // namespace

std::unique_ptr<WeightSource> open_checkpoint(const fs::path& folder) {
  return std::make_unique<Checkpoint>(folder);
}

std::unique_ptr<WeightSource> random_weights(uint64_t seed) {
  return std::make_unique<RandomWeights>(seed);
}

}  // namespace engine
