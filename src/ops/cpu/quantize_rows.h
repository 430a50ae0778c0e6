// SPDX-License-Identifier: Apache-2.0
// Quantization of rows to 8-bit floats. Only kernels.cpp includes this file, inside the namespace
// of an instruction set.

/// The largest finite magnitude of some elements; 0 where none is finite.
template <typename Format>
float largest_magnitude(const typename Format::Storage* x, int32_t count) {
  uint32_t largest = 0;  // bits of floats >= 0, which are ordered as the floats are
#pragma omp simd reduction(max : largest)
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t magnitude = float_bits(Format::load(x[i])) & 0x7fffffffU;
    const uint32_t finite = magnitude < kFloatInfinity ? magnitude : 0U;
    largest = finite > largest ? finite : largest;
  }
  return bits_float(largest);
}

/// Raises *scale to `value` if `value` is larger. Other threads may raise *scale, too. Both numbers
/// are >= 0, so their bits are ordered as the numbers are.
inline void raise_to(float* scale, float value) {
  typedef uint32_t Bits __attribute__((may_alias));
  auto* bits = reinterpret_cast<Bits*>(scale);
  const uint32_t wanted = float_bits(value);
  uint32_t seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (seen < wanted && !__atomic_compare_exchange_n(bits, &seen, wanted, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
  }
}

void raise_scales(const QuantizeParams& p, int32_t begin, int32_t end) noexcept {
  dispatch_wide_format(p.dtype, [&](auto format) {
    using Format = decltype(format);
    using Storage = typename Format::Storage;
    for (int32_t head = 0; head < p.heads.num_heads; ++head) {
      const char* from = p.heads.from + head * p.heads.from_head_stride;
      float amax = 0.0F;
      for (int32_t token = begin; token < end; ++token) {
        const auto* row =
            reinterpret_cast<const Storage*>(from + token * p.heads.from_token_stride);
        const float of_row = largest_magnitude<Format>(row, p.head_dim);
        amax = of_row > amax ? of_row : amax;
      }
      raise_to(p.scale_of(head), p.scale_for(amax));
    }
  });
}

/// to[i] = from[i] / scale.
template <typename From, typename To>
FLASHPLAN_INLINE void narrow(const typename From::Storage* from, typename To::Storage* to,
                             int32_t count, float scale) {
#pragma omp simd
  for (int32_t i = 0; i < count; ++i) to[i] = To::store(From::load(from[i]) / scale);
}

template <typename From, typename To>
void quantize_token(const QuantizeParams& p, int32_t token) {
  const RopeSide& heads = p.heads;
  for (int32_t head = 0; head < heads.num_heads; ++head) {
    const auto* from = reinterpret_cast<const typename From::Storage*>(
        heads.from + token * heads.from_token_stride + head * heads.from_head_stride);
    auto* to = reinterpret_cast<typename To::Storage*>(heads.to + token * heads.to_token_stride +
                                                       head * heads.to_head_stride);
    narrow<From, To>(from, to, p.head_dim, *p.scale_of(head));
  }
}

void quantize_rows(const QuantizeParams& p, int32_t begin, int32_t end) noexcept {
  dispatch_wide_format(p.dtype, [&](auto from) {
    using From = decltype(from);
    const auto quantize_all = [&](auto quantize) {
      for (int32_t token = begin; token < end; ++token) quantize(p, token);
    };
    if (p.out_dtype == DType::kFloat8E5M2) {
      quantize_all(quantize_token<From, cpu::Format<DType::kFloat8E5M2>>);
    } else {
      quantize_all(quantize_token<From, cpu::Format<DType::kFloat8E4M3>>);
    }
  });
}
