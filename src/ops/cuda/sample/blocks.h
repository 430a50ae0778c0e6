// SPDX-License-Identifier: Apache-2.0
// Draws as if a row had no filter, from a row that a cluster has: one, or with top-p alone as many
// as it takes until top-p keeps the token (see ops/sampling_math.h).
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/block.h"

namespace flashplan::cuda {

template <DType kDType, bool kFromProbs, bool kHeld>
class SampleBlocks : protected SampleRow<kDType, kFromProbs, kHeld> {
  using Base = SampleRow<kDType, kFromProbs, kHeld>;

 public:
  using Base::Base;

 protected:
  using Base::expect;
  using Base::largest_;
  using Base::mail;
  using Base::p_;
  using Base::part_;
  using Base::publish;
  using Base::publish_sums;
  using Base::read;
  using Base::receive;
  using Base::row;
  using Base::scale_;
  using Base::shared_;
  using Base::step_;
  using Base::value_of_rank;
  using Base::values_of;

  /// Draws from a row without filters and writes the token.
  __device__ SampleError draw_from_all() {
    const Masses masses = weigh_blocks();
    if (kFromProbs && !sampling::masses_sum_to_one(masses.total)) {
      return SampleError::kProbabilities;
    }
    if (warp_of_thread() != 0) return SampleError::kNone;
    draw_from_blocks(masses, sampling::random_of_try(p_, row(), 0),
                     [&](int i, uint32_t weight, const WeighedBlock& block) {
                       write_token_of_block(p_, row(), part_.begin() + i, weight, block.sum,
                                            mass_of(block), masses.total);
                     });
    return SampleError::kNone;
  }

  struct TriedToken {
    SampleError error;
    uint64_t token;  // its key and, in the low half, its id; 0: top-p drops all tries
  };

  /// Draws with top-p alone. All CTAs get the token.
  __device__ TriedToken draw_by_tries() {
    const Masses masses = weigh_blocks();
    if (kFromProbs && !sampling::masses_sum_to_one(masses.total)) {
      return {SampleError::kProbabilities, 0};
    }
    const int warp = warp_of_thread();
#pragma unroll 1
    for (int begin = 0; begin < kMostTries; begin += kTriesAtOnce) {
      __syncthreads();  // all warps have read what came in the last step
      expect(kTriesAtOnce * sizeof(uint64_t));
      if (warp < kTriesAtOnce) send_try(masses, begin + warp);
      receive();
      uint64_t tokens[kTriesAtOnce];
#pragma unroll
      for (int t = 0; t < kTriesAtOnce; ++t) tokens[t] = only_one(value_of_rank(t));
      publish_sums_before(tokens);
      const uint64_t all = sum_of_warp(value_of_rank(kTriesAtOnce));
      const uint64_t wanted = sampling::part_of(shared_.top_p, all);
#pragma unroll
      for (int t = 0; t < kTriesAtOnce; ++t) {
        if (sum_of_warp(value_of_rank(t)) < wanted) return {SampleError::kNone, tokens[t]};
      }
    }
    if (threadIdx.x == 0) shared_.random = sampling::random_of_try(p_, row(), kMostTries).first;
    return {SampleError::kNone, 0};
  }

 private:
  static constexpr int kMostTries = static_cast<int>(sampling::kMostTries);
  static constexpr int kTriesAtOnce = kValues - 1;
  static_assert(kMostTries % kTriesAtOnce == 0);
  using OfWarp = BlockOfWarp<kFromProbs, 4, 1>;

  /// What the blocks of each CTA and of each warp of this one weigh, in the lane of its number.
  struct Masses {
    uint64_t of_rank;
    uint64_t of_warp;
    uint64_t total;
  };

  /// Weighs the blocks of all parts. Each warp has consecutive ones.
  __device__ Masses weigh_blocks() {
    const int warp = warp_of_thread();
    const int lane = lane_of_thread();
    uint64_t own = 0;
#pragma unroll 1
    for (int b = first_block(warp); b < min(first_block(warp + 1), num_blocks()); ++b) {
      own += mass_of(weigh(b));
    }
    if (lane == 0) {
      shared_.warp_values[warp][0] = own;
      shared_.warp_values[warp][1] = 0;
    }
    publish_sums();
    const uint64_t of_rank = value_of_rank(0);
    return {of_rank, lane < kRowWarps ? shared_.warp_values[lane][0] : 0,
            __shfl_sync(~0U, sum_to_lane(of_rank), 31)};
  }
  __device__ int num_blocks() const {
    return (part_.count() + sampling::kBlock - 1) / sampling::kBlock;
  }
  __device__ int first_block(int warp) const {
    return warp * ((num_blocks() + kRowWarps - 1) / kRowWarps);
  }

  __device__ WeighedBlock weigh(int block) const {
    return OfWarp::weigh(scale_.factor, [&](int u, float (&x)[4]) { read_block(block, u, x); });
  }
  __device__ uint64_t mass_of(const WeighedBlock& block) const {
    return sampling::mass_of_block(OfWarp::value_of(block.key), sampling::rounded_sum(block.sum),
                                   {largest_, scale_.factor, kFromProbs});
  }
  /// Reads the thread's word u of a block.
  __device__ void read_block(int block, int u, float (&x)[4]) const {
    const int i = block * sampling::kBlock + OfWarp::first_of(u);
    if (i < part_.count()) {
      read(i, x);
      return;
    }
#pragma unroll
    for (float& value : x) value = part_.after_end();
  }

  /// Draws a token. If it is in this CTA's part, one thread calls found(its place in the part, its
  /// weight, its block). One warp.
  template <class Found>
  __device__ void draw_from_blocks(const Masses& masses, const sampling::RandomPair& random,
                                   const Found& found) const {
    uint64_t target = sampling::high_product(random.first, masses.total);
    const BinOfLanes rank = find_lane(masses.of_rank, 0, target + 1);
    if (rank.lane != cluster_rank()) return;
    const BinOfLanes warp = find_lane(masses.of_warp, rank.above, target + 1);
    target -= warp.above;
    int b = first_block(warp.lane);
    WeighedBlock block = weigh(b);
    while (mass_of(block) <= target) {
      target -= mass_of(block);
      block = weigh(++b);
    }
    const auto read_weights = [&](int u, uint32_t (&weights)[4]) {
      float x[4];
      read_block(b, u, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[e] = sampling::weight_in_block(x[e], block.scale);
    };
    OfWarp::find(sampling::high_product(random.second, block.sum), read_weights,
                 [&](int i, uint32_t weight) { found(b * sampling::kBlock + i, weight, block); });
  }

  /// Draws the token of a try, and sends it, or 0 if it is not in this CTA's part, to all CTAs. One
  /// warp for each try.
  __device__ void send_try(const Masses& masses, int index) {
    uint64_t token = 0;
    draw_from_blocks(masses, sampling::random_of_try(p_, row(), static_cast<uint32_t>(index)),
                     [&](int i, uint32_t /*weight*/, const WeighedBlock& /*block*/) {
                       token = uint64_t{key_of(part_.at(i))} << 32 |
                               static_cast<uint32_t>(part_.begin() + i);
                     });
    token = only_one(token);
    const int rank = lane_of_thread();
    if (rank >= cluster_size()) return;
    mail().send(values_of(step_, cluster_rank()) + warp_of_thread(), token, rank);
  }

  /// The value of the one lane in which it is not 0; 0 if there is none.
  static __device__ uint64_t only_one(uint64_t value) {
    const unsigned lanes = __ballot_sync(~0U, value != 0);
    return __shfl_sync(~0U, value, lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1 : 0);
  }

  /// Tells all CTAs the mass, in this part, of what comes before each token: larger elements, and
  /// equal ones with a smaller id. The last value is the mass of all elements.
  __device__ void publish_sums_before(const uint64_t (&tokens)[kTriesAtOnce]) {
    float value[kTriesAtOnce];
    float above[kTriesAtOnce];  // the next larger value
    int place[kTriesAtOnce];
    uint64_t sums[kValues] = {};
#pragma unroll
    for (int t = 0; t < kTriesAtOnce; ++t) {
      const auto key = static_cast<uint32_t>(tokens[t] >> 32);
      value[t] = sampling::value_of(key);
      above[t] = sampling::value_of(key + 1);
      place[t] = static_cast<int>(static_cast<uint32_t>(tokens[t])) - part_.begin();
    }
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      uint32_t weights[4];
      read(i, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[e] = this->weight_of(x[e]);
      sums[kTriesAtOnce] += weights[0] + weights[1];
      sums[kTriesAtOnce] += weights[2] + weights[3];
#pragma unroll
      for (int t = 0; t < kTriesAtOnce; ++t) {
        const float least = i + 4 <= place[t] ? value[t] : above[t];
        uint32_t before[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) before[e] = x[e] >= least ? weights[e] : 0U;
        sums[t] += before[0] + before[1];
        sums[t] += before[2] + before[3];
      }
    }
    // Equal elements before a token in its own word, which the loop has not counted.
    if (threadIdx.x < 3) {
#pragma unroll
      for (int t = 0; t < kTriesAtOnce; ++t) {
        const int i = place[t] / 4 * 4 + static_cast<int>(threadIdx.x);
        if (i < 0 || i >= place[t] || place[t] >= part_.count()) continue;
        if (part_.at(i) == value[t]) sums[t] += this->weight_of(value[t]);
      }
    }
    const int lane = lane_of_thread();
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const uint64_t sum = sum_of_warp(sums[v]);
      if (lane == 0) shared_.sums[warp_of_thread()][v] = sum;
    }
    __syncthreads();
    if (warp_of_thread() == 0) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        sums[v] = sum_of_warp(lane < kRowWarps ? shared_.sums[lane][v] : 0);
      }
      publish(sums);
    }
    receive();
  }
};

}  // namespace flashplan::cuda
