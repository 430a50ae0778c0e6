// SPDX-License-Identifier: Apache-2.0
// How a warp weighs a block of a row, and draws an element of the block (see "Draws without
// filters" in ops/sampling_math.h). A thread has every 32nd word of kVec elements of the block.
// Loops over words that a thread keeps in registers must be unrolled, so kUnroll is then kWords;
// for words that are read from memory kUnroll is 1.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/row.h"

namespace flashplan::cuda {

struct WeighedBlock {
  uint32_t key;           // key of the block's largest value
  sampling::Scale scale;  // of the weights of its elements
  uint64_t sum;           // sum of these weights
};

template <bool kFromProbs, int kVec, int kUnroll>
struct BlockOfWarp {
  static constexpr int kWords = sampling::kBlock / (32 * kVec);  // words of a block for each thread
  static_assert(kWords * 32 * kVec == sampling::kBlock && (kUnroll == kWords || kUnroll == 1));

  // Keys are integers in the order of the values. The key of a logit is key_of(), and NaN has the
  // largest. The key of a probability is its bits; the two largest keys stand for errors.
  static constexpr uint32_t kKeyOfNan = ~0U;
  static constexpr uint32_t kKeyOfError = ~0U - 1;

  static __device__ float value_of(uint32_t key) {
    return kFromProbs ? sampling::float_of(key) : sampling::value_of(key);
  }

  /// The place in the block of the first element of this thread's word u.
  static __device__ int first_of(int u) { return (u * 32 + lane_of_thread()) * kVec; }

  // All threads of a warp call the next functions together. They get the values from read(u, x),
  // which writes the values of word u to x.

  /// Weighs the block. Calls keep(weights, u) for each word u. `factor`: Scale::factor of the row.
  template <class Read, class Keep>
  static __device__ WeighedBlock weigh(float factor, const Read& read, const Keep& keep) {
    WeighedBlock block;
    block.key = find_key(read);
    block.scale = sampling::scale_of_block(value_of(block.key), {0.0F, factor, kFromProbs});
    uint32_t sum = 0;
#pragma unroll kUnroll
    for (int u = 0; u < kWords; ++u) {
      float x[kVec];
      uint32_t weights[kVec];
      read(u, x);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        weights[e] = sampling::weight_in_block(x[e], block.scale);
        sum += weights[e];
      }
      keep(weights, u);
    }
    block.sum = sum_of_warp(sum);
    return block;
  }
  template <class Read>
  static __device__ WeighedBlock weigh(float factor, const Read& read) {
    return weigh(factor, read, [](const uint32_t (&)[kVec], int /*u*/) {});
  }

  /// Calls found(i, weight) in the thread that has the first element, i, at which the running sum
  /// of weights exceeds `target`. read(u, weights) gives the weights of word u.
  template <class Read, class Found>
  static __device__ void find(uint64_t target, const Read& read, const Found& found) {
    bool is_found = false;
    int first = 0;  // the first element of the word in which the sum exceeds `target`
    uint32_t weights[kVec] = {};
    uint32_t own = 0;  // the sum of `weights`
#pragma unroll kUnroll
    for (int u = 0; u < kWords; ++u) {
      uint32_t next[kVec];
      uint32_t of_word = 0;
      read(u, next);
#pragma unroll
      for (int e = 0; e < kVec; ++e) of_word += next[e];
      const uint64_t sum = sum_of_warp(of_word);
      if (!is_found && target < sum) {
        is_found = true;
        first = first_of(u);
        own = of_word;
#pragma unroll
        for (int e = 0; e < kVec; ++e) weights[e] = next[e];
      }
      target -= is_found ? 0 : sum;
    }
    const BinOfLanes reached = find_lane(own, 0, target + 1);
    if (reached.lane != lane_of_thread()) return;
    target -= reached.above;
    int e = 0;
    uint32_t weight = weights[0];
#pragma unroll
    for (int next = 1; next < kVec; ++next) {
      if (e < next - 1 || target < weight) continue;
      target -= weight;
      weight = weights[next];
      e = next;
    }
    found(first + e, weight);
  }

 private:
  /// The key of the block's largest value.
  template <class Read>
  static __device__ uint32_t find_key(const Read& read) {
    if (kFromProbs) {
      constexpr uint32_t kMostBits = 0x3f8147aeU;  // 1.01, the largest probability that is allowed
      uint32_t bits = 0;
      for_each(read, [&](float x) { bits = max(bits, sampling::bits_of(x)); });
      bits = __reduce_max_sync(~0U, bits);
      return bits <= kMostBits ? bits : find_key_of_any(read);
    }
    float largest = -INFINITY;
    for_each(read, [&](float x) { largest = larger_or_nan(largest, x); });
    return __reduce_max_sync(~0U, key_of(largest));
  }

  /// The key of a block with a value that is no probability, or with -0, whose bits are larger than
  /// those of any probability.
  template <class Read>
  static __device__ uint32_t find_key_of_any(const Read& read) {
    uint32_t key = 0;
    for_each(read, [&](float x) {
      const uint32_t of_number =
          sampling::is_probability(x) ? sampling::bits_of(__fadd_rn(x, 0.0F)) : kKeyOfError;
      key = max(key, x != x ? kKeyOfNan : of_number);
    });
    return __reduce_max_sync(~0U, key);
  }

  template <class Read, class Body>
  static __device__ void for_each(const Read& read, const Body& body) {
#pragma unroll kUnroll
    for (int u = 0; u < kWords; ++u) {
      float x[kVec];
      read(u, x);
#pragma unroll
      for (int e = 0; e < kVec; ++e) body(x[e]);
    }
  }
};

/// Writes a token and the logarithm of its probability, which is the probability of its block, mass
/// / total, times that of the token in the block, weight / sum_of_block.
__device__ inline void write_token_of_block(const SampleParams& p, int32_t row, int32_t id,
                                            uint32_t weight, uint64_t sum_of_block, uint64_t mass,
                                            uint64_t total) {
  write_token(p, row, id, static_cast<double>(mass) * static_cast<double>(weight),
              static_cast<double>(total) * static_cast<double>(sum_of_block));
}

}  // namespace flashplan::cuda
