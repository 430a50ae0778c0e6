// SPDX-License-Identifier: Apache-2.0
// Rotations of heads by rotary position embeddings.
// This file is included inside the namespace of an instruction set, after float_formats.h and
// abi/rope_turns.h.

/// The cosine and the sine for each pair of dims at one position.
struct Rotations {
  float cos[kMaxRotaryDim / 2];
  float sin[kMaxRotaryDim / 2];
};

[[gnu::noinline]] void fill_rotations(const RopeTurns& p, double position, Rotations& rotations) {
  const float gain = p.gain;
#pragma omp simd
  for (int32_t i = 0; i < p.rotary_dim / 2; ++i) {
    // Adding 1.5 * 2^52 rounds to an integer. Whole turns are dropped in double precision, because
    // positions, and so the turns, may be large.
    constexpr double kMagic = 6755399441055744.0;
    const double turns = position * p.turns[i];
    const auto part = static_cast<float>(turns - ((turns + kMagic) - kMagic));
    // `part` is in [-1/2, 1/2]. Without a half turn, which only changes the signs of cosine and
    // sine, it is in [-1/4, 1/4].
    constexpr float kFloatMagic = 12582912.0F;
    const float half_turns = (2.0F * part + kFloatMagic) - kFloatMagic;
    const float sign = gain * (1.0F - 2.0F * (half_turns * half_turns));
    const float x = 6.2831853F * (part - 0.5F * half_turns);
    const float z = x * x;
    float sine = -2.5052108e-8F;  // Taylor's coefficients
    sine = sine * z + 2.7557319e-6F;
    sine = sine * z - 1.9841270e-4F;
    sine = sine * z + 8.3333333e-3F;
    sine = sine * z - 1.6666667e-1F;
    sine = x + x * (sine * z);
    float cosine = 2.0876757e-9F;
    cosine = cosine * z - 2.7557319e-7F;
    cosine = cosine * z + 2.4801587e-5F;
    cosine = cosine * z - 1.3888889e-3F;
    cosine = cosine * z + 4.1666667e-2F;
    cosine = cosine * z - 0.5F;
    cosine = cosine * z + 1.0F;
    rotations.sin[i] = sign * sine;
    rotations.cos[i] = sign * cosine;
  }
}

/// Rotates pairs of dims. `kStep`: dims from one pair to the next; `distance`: from the first dim
/// of a pair to the second. It is never inlined, so that all callers get the same bits: in each
/// copy the compiler might fuse other products and sums.
template <typename Format, int32_t kStep>
[[gnu::noinline]] void rotate_pairs(const typename Format::Storage* from,
                                    typename Format::Storage* to, int32_t num_pairs,
                                    int32_t distance, const Rotations& rotations) {
#pragma omp simd
  for (int32_t i = 0; i < num_pairs; ++i) {
    const float a = Format::load(from[kStep * i]);
    const float b = Format::load(from[kStep * i + distance]);
    to[kStep * i] = Format::store(a * rotations.cos[i] - b * rotations.sin[i]);
    to[kStep * i + distance] = Format::store(b * rotations.cos[i] + a * rotations.sin[i]);
  }
}

/// Rotates the first rotary_dim dims of a head; `to` may be `from`.
template <typename Format>
void rotate_head(const RopeTurns& p, const Rotations& rotations,
                 const typename Format::Storage* from, typename Format::Storage* to) {
  const int32_t num_pairs = p.rotary_dim / 2;
  if (p.interleaved) {
    rotate_pairs<Format, 2>(from, to, num_pairs, 1, rotations);
  } else {
    rotate_pairs<Format, 1>(from, to, num_pairs, num_pairs, rotations);
  }
}
