// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4), for the names and the checksums of cached files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace flashplan {

class Sha256 {
 public:
  using Digest = std::array<uint8_t, 32>;

  void add(const void* data, std::size_t size) noexcept;
  /// Adds the length of a text and the text, so that "ab", "c" give another digest than "a", "bc".
  void add_text(std::string_view text) noexcept;
  /// The digest of what was added. Nothing may be added afterwards.
  Digest digest() noexcept;

 private:
  void add_block(const uint8_t* block) noexcept;

  std::array<uint32_t, 8> state_ = {0x6a09e667U, 0xbb67ae85U, 0x3c6ef372U, 0xa54ff53aU,
                                    0x510e527fU, 0x9b05688cU, 0x1f83d9abU, 0x5be0cd19U};
  std::array<uint8_t, 64> block_ = {};
  uint64_t size_ = 0;
};

/// A digest as 64 hexadecimal digits in lower case.
std::string to_hex(const Sha256::Digest& digest);

}  // namespace flashplan
