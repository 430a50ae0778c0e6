// SPDX-License-Identifier: Apache-2.0
// Reads and writes the structs of flashplan_c.h and flashplan_c_ops.h, whose size depends on the
// version that the caller was compiled with.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "common/error.h"
#include "flashplan/flashplan_c.h"
#include "flashplan/flashplan_c_ops.h"

namespace flashplan::c_abi {

/// Whether a constant of the C interface has the value of the C++ one.
constexpr bool is_same(int c, auto code) { return c == static_cast<int>(code); }

/// The size that a struct had in the first release that had it. No caller's struct is smaller, and
/// these numbers never change. A struct grows only by fields at its end, and its size must stay a
/// multiple of 8 without padding.
template <typename T>
inline constexpr std::size_t kFirstSize = 0;
template <>
inline constexpr std::size_t kFirstSize<flashplan_tensor> = 104;
template <>
inline constexpr std::size_t kFirstSize<flashplan_options> = 96;
template <>
inline constexpr std::size_t kFirstSize<flashplan_batch> = 56;
template <>
inline constexpr std::size_t kFirstSize<flashplan_attention_tensors> = 136;
template <>
inline constexpr std::size_t kFirstSize<flashplan_append_tensors> = 104;
template <>
inline constexpr std::size_t kFirstSize<flashplan_device_data> = 56;
template <>
inline constexpr std::size_t kFirstSize<flashplan_variant_description> = 96;
template <>
inline constexpr std::size_t kFirstSize<flashplan_rope> = 88;
template <>
inline constexpr std::size_t kFirstSize<flashplan_rope_tensors> = 88;
template <>
inline constexpr std::size_t kFirstSize<flashplan_mla_append_tensors> = 80;
template <>
inline constexpr std::size_t kFirstSize<flashplan_mla_gather_tensors> = 72;
template <>
inline constexpr std::size_t kFirstSize<flashplan_penalty_tensors> = 72;
template <>
inline constexpr std::size_t kFirstSize<flashplan_sample_tensors> = 168;
template <>
inline constexpr std::size_t kFirstSize<flashplan_verify_tensors> = 104;

/// The largest size that a struct of any version will have. A caller's struct_size above it must
/// come from memory that was never initialised.
constexpr std::size_t kMaxSize = 4096;

/// Copies the caller's struct to `known`. Fields that an older struct does not have get the values
/// in `defaults`.
///   kInvalidArgument  no struct, a wrong size, or a field that this library does not know
template <typename T>
Status read(const char* name, const T* given, const T& defaults, T* known) noexcept {
  static_assert(kFirstSize<T> > 0 && sizeof(T) >= kFirstSize<T> && sizeof(T) % 8 == 0);
  if (given == nullptr) {
    return error(StatusCode::kInvalidArgument, "%s: expected a struct, got null", name);
  }
  const std::size_t size = given->struct_size;
  if (size < kFirstSize<T> || size > kMaxSize) {
    return error(StatusCode::kInvalidArgument,
                 "%s.struct_size: expected %zu to %zu (init functions write it), got %zu", name,
                 kFirstSize<T>, kMaxSize, size);
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    return error(StatusCode::kInvalidArgument,
                 "%s.struct_size: expected 0 in fields behind %zu bytes, which this version does "
                 "not know, got %d at %zu",
                 name, sizeof(T), bytes[i], i);
  }
  *known = defaults;
  std::memcpy(known, given, std::min(size, sizeof(T)));
  return {};
}

/// Writes the defaults to the caller's struct, which has `size` bytes.
template <typename T>
void write(const T& defaults, T* given, std::size_t size) noexcept {
  if (given == nullptr || size < sizeof(std::size_t) || size > kMaxSize) return;
  std::memset(given, 0, size);
  std::memcpy(given, &defaults, std::min(size, sizeof(T)));
  given->struct_size = size;
}

}  // namespace flashplan::c_abi
