// SPDX-License-Identifier: Apache-2.0
// Softmax of rows. Only kernels.cpp includes this file, inside the namespace of an instruction set.

/// Calls body(first, count, block) for the blocks of a row. A block is float32 in aligned memory on
/// the stack; lanes behind the last element are `filling`.
template <typename Format, typename Body>
FLASHPLAN_INLINE void for_each_block(const char* row, int32_t size, float filling,
                                     const Body& body) {
  constexpr int32_t kBlock = 256;
  alignas(64) float block[kBlock];
  const auto* from = reinterpret_cast<const typename Format::Storage*>(row);
  for (int32_t first = 0; first < size; first += kBlock) {
    const int32_t count = size - first < kBlock ? size - first : kBlock;
    load_all<Format>(from + first, count, static_cast<float*>(block));
    for (int32_t i = count; i % kLanes != 0; ++i) block[i] = filling;
    body(first, count, static_cast<float*>(block));
  }
}

template <typename From, typename To>
void softmax_row(const SoftmaxParams& p, int32_t row) {
  constexpr float kInfinity = __builtin_inff();
  const char* from = p.logits + row * p.row_stride;
  auto* to = reinterpret_cast<typename To::Storage*>(p.out + row * p.out_stride);
  Vec largest_lanes = splat(-kInfinity);
  for_each_block<From>(from, p.vocab, -kInfinity, [&](int32_t, int32_t count, float* block) {
    for (int32_t i = 0; i < count; i += kLanes) largest_lanes = max(load(block + i), largest_lanes);
  });
  const float largest = max_lane(largest_lanes);  // ignores NaN, which makes the sum below NaN
  const float factor = 1.0F / p.temperature.of(row);
  // A block is read before it is written, because `out` may be `logits`.
  // A float32 `out` keeps the exponentials until their sum is known.
  constexpr bool kKeeps = std::is_same_v<typename To::Storage, float>;
  Vec sum_lanes_of_row{};
  for_each_block<From>(from, p.vocab, -kInfinity, [&](int32_t first, int32_t count, float* block) {
    for (int32_t i = 0; i < count; i += kLanes) {
      const Vec power = exp((load(block + i) - largest) * factor);
      sum_lanes_of_row += power;
      if constexpr (kKeeps) store(block + i, power);
    }
    if constexpr (kKeeps) store_each<To>(to + first, count, [=](int32_t i) { return block[i]; });
  });
  const float scale = 1.0F / sum_of_lanes(sum_lanes_of_row);
  if constexpr (kKeeps) {
    store_each<To>(to, p.vocab, [=](int32_t i) { return to[i] * scale; });
    return;
  }
  for_each_block<From>(from, p.vocab, -kInfinity, [&](int32_t first, int32_t count, float* block) {
    for (int32_t i = 0; i < count; i += kLanes) {
      store(block + i, exp((load(block + i) - largest) * factor) * scale);
    }
    store_each<To>(to + first, count, [=](int32_t i) { return block[i]; });
  });
}

void softmax_rows(const SoftmaxParams& p, int32_t begin, int32_t end) noexcept {
  dispatch_wide_format(p.dtype, [&](auto format) {
    using From = decltype(format);
    for (int32_t row = begin; row < end; ++row) {
      if (p.out_dtype == DType::kFloat32) {
        softmax_row<From, Format<DType::kFloat32>>(p, row);
      } else {
        softmax_row<From, From>(p, row);
      }
    }
  });
}
