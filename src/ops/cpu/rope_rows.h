// SPDX-License-Identifier: Apache-2.0
// Rotation of rows. Only kernels.cpp includes this file, inside the namespace of an instruction
// set.

/// Rotates the heads of a token. 8-bit results are rounded to `From` first, as if apply_rope() and
/// then quantize_fp8() were called.
template <typename From, typename To = From>
void rotate_token(const RopeParams& p, const Rotations& rotations, const RopeSide& side,
                  int32_t token) {
  using Storage = typename From::Storage;
  for (int32_t head = 0; head < side.num_heads; ++head) {
    const auto* from = reinterpret_cast<const Storage*>(side.from + token * side.from_token_stride +
                                                        head * side.from_head_stride);
    auto* to = reinterpret_cast<typename To::Storage*>(side.to + token * side.to_token_stride +
                                                       head * side.to_head_stride);
    if constexpr (std::is_same_v<From, To>) {
      rotate_head<From>(p, rotations, from, to);
      if (from == to) continue;
      for (int32_t d = p.rotary_dim; d < p.head_dim; ++d) to[d] = from[d];
    } else {
      const float scale = side.scale_of(head);
      alignas(64) Storage rotated[kMaxRotaryDim];
      rotate_head<From>(p, rotations, from, rotated);
      narrow<From, To>(rotated, to, p.rotary_dim, scale);
      narrow<From, To>(from + p.rotary_dim, to + p.rotary_dim, p.head_dim - p.rotary_dim, scale);
    }
  }
}

/// Reads the rotation of each pair from the caller's table. At a position outside of it nothing is
/// rotated: positions were checked, but another thread may have written them since.
void read_rotations(const RopeParams& p, int32_t token, Rotations& rotations) {
  const float* row = p.table_row(token);
  const int32_t num_pairs = p.rotary_dim / 2;
  for (int32_t i = 0; i < num_pairs; ++i) {
    rotations.cos[i] = row == nullptr ? 1.0F : row[i];
    rotations.sin[i] = row == nullptr ? 0.0F : row[num_pairs + i];
  }
}

void rope_rows(const RopeParams& p, int32_t begin, int32_t end) noexcept {
  dispatch_wide_format(p.dtype, [&](auto from) {
    using From = decltype(from);
    dispatch_stored_format<From>(p.out_dtype, [&](auto to) {
      Rotations rotations;
      for (int32_t token = begin; token < end; ++token) {
        if (p.table != nullptr) {
          read_rotations(p, token, rotations);
        } else {
          fill_rotations(p, p.position(token), rotations);
        }
        for (const RopeSide& side : p.sides) {
          rotate_token<From, decltype(to)>(p, rotations, side, token);
        }
      }
    });
  });
}
