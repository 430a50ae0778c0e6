// SPDX-License-Identifier: Apache-2.0
// The arithmetic of sampling. It gives the same bits on the CPU and on a GPU, because it consists
// of IEEE operations with explicit rounding and of integers. Only integers are summed, so the order
// of additions does not matter.
#pragma once

#include <cstdint>

#include "abi/host_device.h"
#include "ops/params.h"

namespace flashplan::sampling {

/// The weight of a row's largest logit, where filters are applied.
constexpr uint32_t kOne = 1U << 30;

FLASHPLAN_HOST_DEVICE uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}

FLASHPLAN_HOST_DEVICE float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

// The next functions round each result to float32, so that all devices give the same bits. On the
// CPU, files that call them are compiled without contraction of products and sums.
FLASHPLAN_HOST_DEVICE float times(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
FLASHPLAN_HOST_DEVICE float plus(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
FLASHPLAN_HOST_DEVICE float ratio(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
/// min(a * b, 1), for a product that is not negative. On a GPU it takes one instruction, as a
/// product does.
FLASHPLAN_HOST_DEVICE float times_to_one(float a, float b) {
#ifdef __CUDA_ARCH__
  return __saturatef(__fmul_rn(a, b));
#else
  const float product = a * b;
  return product < 1.0F ? product : 1.0F;
#endif
}
/// a * b + c, rounded once.
FLASHPLAN_HOST_DEVICE float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

FLASHPLAN_HOST_DEVICE uint64_t high_product(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(a) * b) >> 64);
#endif
}

/// Maps floats to unsigned integers in the same order; value_of() maps them back. x is not NaN and
/// not -0.
FLASHPLAN_HOST_DEVICE uint32_t key_of(float x) {
  const uint32_t bits = bits_of(x);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
}
FLASHPLAN_HOST_DEVICE float value_of(uint32_t key) {
  return float_of((key >> 31) != 0 ? key & 0x7fffffffU : ~key);
}

/// How the values of a row become weights. The sum of several weights is called their mass.
struct Scale {
  float largest;  // the row's largest value
  float factor;   // from logits: log2(e) / (32 * temperature); from probabilities: 1 / largest
  bool from_probs;
};

FLASHPLAN_HOST_DEVICE Scale make_scale(float largest, float temperature, bool from_probs) {
  constexpr float kLog2E = 1.44269504F;
  constexpr float kMost = 3.40282347e38F;
  float factor = from_probs ? ratio(1.0F, largest) : ratio(kLog2E / 32.0F, temperature);
  // The largest probability must weigh kOne, also where 1 / largest was rounded down.
  if (from_probs && times(largest, factor) < 1.0F) factor = float_of(bits_of(factor) + 1U);
  return {largest, factor < kMost ? factor : kMost, from_probs};
}

/// How far a logit lies below the largest one: -log2(weight / kOne) / 32, at most 1. Logits that
/// lie farther below weigh nothing.
FLASHPLAN_HOST_DEVICE float distance(float x, const Scale& scale) {
  return times_to_one(plus(scale.largest, -x), scale.factor);
}

/// Returns 2^(kLog - 32 * distance).
template <int kLog>
FLASHPLAN_HOST_DEVICE float power_at(float distance) {
  // Adding 1.5 * 2^23 leaves in the low bits the nearest integer to the exponent n of the power.
  constexpr float kMagic = 12582912.0F + static_cast<float>(kLog);
  const float shifted = fused(distance, -32.0F, kMagic);
  const float r = fused(distance, -32.0F, -plus(shifted, -kMagic));  // exact, |r| <= 1/2
  // The polynomial of degree 5 nearest to 2^r; the relative error is below 2e-7.
  float p = 1.3264768e-3F;
  p = fused(p, r, 9.6715139e-3F);
  p = fused(p, r, 5.5507336e-2F);
  p = fused(p, r, 2.4022242e-1F);
  p = fused(p, r, 6.9314698e-1F);
  p = fused(p, r, 1.0F);
  return float_of(bits_of(p) + (bits_of(shifted) << 23));  // p * 2^n
}

/// Rounds x in [0, 2^31) to the nearest integer.
FLASHPLAN_HOST_DEVICE uint32_t whole_of(float x) {
#ifdef __CUDA_ARCH__
  return __float2uint_rn(x);
#else
  // Adding 2^23 rounds numbers below 2^23; larger ones have no fraction.
  constexpr float kWhole = 8388608.0F;
  const float whole = x < kWhole ? (x + kWhole) - kWhole : x;
  return static_cast<uint32_t>(static_cast<int32_t>(whole));
#endif
}

/// The weight of a logit at `distance`: kOne * 2^(-32 * distance), rounded to nearest. At distance
/// 1 it is 0.
FLASHPLAN_HOST_DEVICE uint32_t weight_at(float distance) {
  return whole_of(power_at<30>(distance));
}

FLASHPLAN_HOST_DEVICE uint32_t weight_of_logit(float x, const Scale& scale) {
  return weight_at(distance(x, scale));
}

/// The weight of a probability: kOne times its ratio to the largest one, rounded to nearest.
FLASHPLAN_HOST_DEVICE uint32_t weight_of_probability(float x, const Scale& scale) {
  return whole_of(times(times_to_one(x, scale.factor), 1073741824.0F));
}

FLASHPLAN_HOST_DEVICE uint32_t weight_of(float x, const Scale& scale) {
  return scale.from_probs ? weight_of_probability(x, scale) : weight_of_logit(x, scale);
}

/// The values of a row that are kept: those whose key is above `key`, and of those whose key is
/// equal (ties) the first `num_ties`. A value whose weight is below min_weight is not kept.
struct Cut {
  uint32_t key;
  uint32_t num_ties;
  uint32_t min_weight;
};

/// Keeps all values whose weight is at least min_weight, since all keys are above 0.
FLASHPLAN_HOST_DEVICE Cut keep_all(uint32_t min_weight) { return {0U, 0U, min_weight}; }

/// The least weight that min-p keeps: min_p * kOne, rounded up, for min_p in [0, 1].
FLASHPLAN_HOST_DEVICE uint32_t least_weight(float min_p) {
  const float exact = times(min_p, 1073741824.0F);  // exact, because kOne is a power of two
  const auto whole = static_cast<uint32_t>(exact);
  return whole + (static_cast<float>(whole) < exact ? 1U : 0U);
}

/// ceil(p * total), at least 1, for p in (0, 1].
FLASHPLAN_HOST_DEVICE uint64_t part_of(float p, uint64_t total) {
  const uint32_t bits = bits_of(p);
  const uint32_t exponent_bits = bits >> 23;
  const uint64_t mantissa = (bits & 0x7fffffU) | (exponent_bits != 0 ? 0x800000U : 0U);
  const uint32_t shift = exponent_bits != 0 ? 150U - exponent_bits : 149U;  // from 23 to 149
  const uint64_t high = high_product(mantissa, total);
  const uint64_t low = mantissa * total;
  uint64_t whole = 0;
  bool has_rest = true;
  if (shift < 64) {
    whole = (high << (64 - shift)) | (low >> shift);
    has_rest = (low & ((uint64_t{1} << shift) - 1)) != 0;
  } else if (shift < 128) {
    const uint32_t above = shift - 64;
    whole = high >> above;
    has_rest = low != 0 || (high & ((uint64_t{1} << above) - 1)) != 0;
  }
  whole += has_rest ? 1 : 0;
  return whole == 0 ? 1 : whole;
}

/// The mass that top-p keeps: the part top_p of `counted`, but at most `kept`, the mass that the
/// other filters keep. `counted` is the mass of the row if filters are joint; 0 stands for `kept`.
FLASHPLAN_HOST_DEVICE uint64_t wanted_of_top_p(float top_p, uint64_t kept, uint64_t counted) {
  const uint64_t wanted = part_of(top_p, counted != 0 ? counted : kept);
  return wanted < kept ? wanted : kept;
}

/// The number of ties, each of `weight`, that must be added to the mass `above` to reach `wanted`,
/// which is larger.
FLASHPLAN_HOST_DEVICE uint32_t ties_to_reach(uint64_t wanted, uint64_t above, uint32_t weight) {
  const uint64_t rest = wanted - above;
  return weight == 0 ? 0U : static_cast<uint32_t>((rest + weight - 1) / weight);
}

/// How many of `num_ties` ties are kept if `before` other ties come before them in the row.
FLASHPLAN_HOST_DEVICE uint32_t kept_ties(const Cut& cut, uint64_t before, uint32_t num_ties) {
  if (before >= cut.num_ties) return 0;
  const uint64_t left = cut.num_ties - before;
  return left < num_ties ? static_cast<uint32_t>(left) : num_ties;
}

struct RandomPair {
  uint64_t first, second;
};

/// 128 random bits by Philox4x32-10 (Salmon et al., 2011). `use` distinguishes the numbers of one
/// draw.
FLASHPLAN_HOST_DEVICE RandomPair random_pair(int64_t seed, int64_t offset, uint32_t stream,
                                             uint32_t use) {
  const auto unsigned_offset = static_cast<uint64_t>(offset);
  const auto unsigned_seed = static_cast<uint64_t>(seed);
  uint32_t c0 = static_cast<uint32_t>(unsigned_offset);
  uint32_t c1 = static_cast<uint32_t>(unsigned_offset >> 32);
  uint32_t c2 = stream;
  uint32_t c3 = use;
  uint32_t k0 = static_cast<uint32_t>(unsigned_seed);
  uint32_t k1 = static_cast<uint32_t>(unsigned_seed >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll 1  // less code to fetch
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53U} * c0;
    const uint64_t b = uint64_t{0xCD9E8D57U} * c2;
    const uint32_t next0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    c0 = next0;
    c2 = next2;
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {uint64_t{c0} | uint64_t{c1} << 32, uint64_t{c2} | uint64_t{c3} << 32};
}
FLASHPLAN_HOST_DEVICE uint64_t random_bits(int64_t seed, int64_t offset, uint32_t stream,
                                           uint32_t use) {
  return random_pair(seed, offset, stream, use).first;
}

/// The values of `use`: what the random numbers of one draw are for.
constexpr uint32_t kUseSample = 0;
constexpr uint32_t kUseVerify = 1;
// kUseDraft + i is for draft i.
constexpr uint32_t kUseDraft = 2;
constexpr uint32_t kUseTry = 1U << 30;  // kUseTry + i is for try i of a draw, from i = 1 on

// --- Draws without filters ---
//
// The row is divided into blocks. An element is weighed relative to the largest value of its block,
// so that a row is read once: its largest value is needed only when the blocks are weighed. Then
// one random number draws a block, and another one an element of it.

constexpr int32_t kBlock = 768;  // elements of a block; the last block of a row may have fewer

FLASHPLAN_HOST_DEVICE bool has_filters(int32_t top_k, float top_p, float min_p, int32_t vocab) {
  return top_k < vocab || top_p < 1.0F || min_p > 0.0F;
}

/// The biased exponent of a block's largest probability. A block whose largest probability is below
/// 2^-48 weighs nothing, so one exponent stands for all such blocks.
FLASHPLAN_HOST_DEVICE uint32_t exponent_of_block(float largest) {
  constexpr uint32_t kLeast = 127 - 49;
  const uint32_t exponent = bits_of(largest) >> 23;
  return exponent > kLeast ? exponent : kLeast;
}

/// How the values of a block become weights. `largest`: the block's largest value. Of `row`, only
/// from_probs and the factor of logits are used.
FLASHPLAN_HOST_DEVICE Scale scale_of_block(float largest, const Scale& row) {
  if (!row.from_probs) return {largest, row.factor, false};
  // The factor is the power of two with which the largest weight is in [2^26, 2^27], unless
  // `largest` is below 2^-49.
  return {largest, float_of((280U - exponent_of_block(largest)) << 23), true};
}

/// The weight of an element in its block. It is at most 2^27, so that the weights of 31 elements
/// can be added in 32 bits. The block's largest logit weighs 2^27.
FLASHPLAN_HOST_DEVICE uint32_t weight_in_block(float x, const Scale& block) {
  if (block.from_probs) return whole_of(times(x, block.factor));
  return whole_of(power_at<27>(distance(x, block)));
}

/// The sum of a block's weights in units of 2^5, which fits 32 bits.
FLASHPLAN_HOST_DEVICE uint32_t rounded_sum(uint64_t sum) {
  return static_cast<uint32_t>((sum + 16) >> 5);
}

/// The weight of a block in its row, computed from the block's largest value and its rounded_sum(),
/// and rounded down. The row's largest logit, or a probability of 1, adds 2^30 to it. A row has
/// fewer than 2^31 elements, so the weights of its blocks together stay below 2^62.
FLASHPLAN_HOST_DEVICE uint64_t mass_of_block(float largest, uint32_t sum, const Scale& row) {
  uint32_t bits = 0;  // bits of the float by which weights of the block are multiplied
  if (row.from_probs) {
    bits = (exponent_of_block(largest) + 1) << 23;
  } else {
    const float below = distance(largest, row);
    if (!(below < 1.0F)) return 0;
    bits = bits_of(power_at<0>(below));
  }
  const uint64_t mantissa = (bits & 0x7fffffU) | 0x800000U;
  return (sum * mantissa) >> (142U - (bits >> 23));
}

/// Whether probabilities whose blocks have the mass `total` sum to 1 within 1 %.
FLASHPLAN_HOST_DEVICE bool masses_sum_to_one(uint64_t total) {
  return total > 1063004405U && total < 1084479243U;  // 0.99 and 1.01 of 2^30
}

/// A scale that weighs probabilities as they are, not relative to the largest.
FLASHPLAN_HOST_DEVICE Scale absolute_scale() { return {1.0F, 1.0F, true}; }

// --- Draws with top-p alone ---
//
// Tokens are drawn as if there were no filter, each with new random numbers, until top-p keeps one.
// That is a draw from the filtered distribution, and does not need the sums of what is kept. Each
// token is kept with a chance of at least top_p, and at least as often as the most likely token is
// drawn, so top-p usually keeps one of the first. If it drops kMostTries tokens, which happens once
// in 200,000 draws at a chance of 0.4 and once in 200 at 0.2, a token is drawn from what it keeps.

constexpr uint32_t kMostTries = 24;
/// With a smaller top-p most tries may be in vain.
constexpr float kLeastTriedTopP = 0.01F;

FLASHPLAN_HOST_DEVICE bool is_tried(int32_t top_k, float top_p, float min_p, int32_t vocab) {
  return top_p >= kLeastTriedTopP && top_p < 1.0F && top_k >= vocab && min_p == 0.0F;
}

/// The argument `use` of random_pair() for try number `index`, which is less than kMostTries.
/// kMostTries stands for the draw from what top-p keeps, after it has dropped all tries.
FLASHPLAN_HOST_DEVICE uint32_t use_of_try(uint32_t index) {
  return index == 0 ? kUseSample : kUseTry + index;
}
/// The random numbers of a try. Rows for which nothing is tried are drawn with those of try 0.
FLASHPLAN_HOST_DEVICE RandomPair random_of_try(const RandomParams& p, int32_t row, uint32_t index) {
  return random_pair(p.seed_of(row), p.offset_of(row), p.stream(row), use_of_try(index));
}

FLASHPLAN_HOST_DEVICE bool is_probability(float x) { return x >= 0.0F && x <= 1.01F; }

/// Whether a draft is accepted, with chance min(1, p / q): q is its probability in the distribution
/// that it was drawn from, p that in the target.
FLASHPLAN_HOST_DEVICE bool is_accepted(uint64_t random, float p, float q) {
  // 53 random bits as a number in [0, 1), which a double has exactly.
  const double part = static_cast<double>(random >> 11) * 1.1102230246251565e-16;
#ifdef __CUDA_ARCH__
  return __dmul_rn(part, static_cast<double>(q)) < static_cast<double>(p);
#else
  return part * static_cast<double>(q) < static_cast<double>(p);
#endif
}

/// What is left of a probability p, in a row with the sum `sum`, if a draft of probability q is
/// rejected.
FLASHPLAN_HOST_DEVICE float residual(float p, float sum, float q) {
  const float rest = plus(ratio(p, sum), -q);
  return rest > 0.0F ? rest : 0.0F;
}

/// The sum of probabilities whose weights, in which kOne stands for `largest`, sum to `total`.
FLASHPLAN_HOST_DEVICE float sum_of_weights(uint64_t total, float largest) {
  return times(times(static_cast<float>(total), 9.31322575e-10F), largest);
}

/// The logit of a token that occurred `count` times, after the penalties.
FLASHPLAN_HOST_DEVICE float penalised(float logit, float count, const Penalties& penalties) {
  const float scaled =
      logit > 0.0F ? ratio(logit, penalties.repetition) : times(logit, penalties.repetition);
  return plus(fused(-penalties.frequency, count, scaled), -penalties.presence);
}

/// Whether probabilities whose weights have the sum `total` sum to 1 within 1 %.
FLASHPLAN_HOST_DEVICE bool sums_to_one(uint64_t total, float largest) {
  const float sum = times(times(static_cast<float>(total), 9.31322575e-10F), largest);
  return sum > 0.99F && sum < 1.01F;
}

}  // namespace flashplan::sampling
