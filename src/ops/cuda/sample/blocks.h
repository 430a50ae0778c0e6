// SPDX-License-Identifier: Apache-2.0
// Draws tokens from a row that the CTAs of a cluster share, as if there were no filter: one token
// or, with top-p alone, further ones until top-p keeps one (see "Draws with top-p alone" in
// ops/sampling_math.h).
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/block.h"

namespace flashplan::cuda {

constexpr int kMostTries = static_cast<int>(sampling::kMostTries);
constexpr int kClusterTries = kValues - 1;
static_assert(kMostTries % kClusterTries == 0);
template <class Row>
using RowBlock = BlockOfWarp<Row::kIsFromProbs, 4, 1>;

/// Sums of the masses of blocks. In lane i, of_rank is the sum over the blocks of CTA i, and
/// of_warp the sum over the blocks of warp i of this CTA.
struct Masses {
  uint64_t of_rank;
  uint64_t of_warp;
  uint64_t total;
};

/// The value of the only lane whose value is not 0; 0 if all lanes have 0.
__device__ inline uint64_t only_one(uint64_t value) {
  const unsigned lanes = __ballot_sync(~0U, value != 0);
  return __shfl_sync(~0U, value, lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1 : 0);
}

/// Draws from a row without filters and writes the token.
template <class Row>
__device__ SampleError draw_from_all(Row& row) {
  const Masses masses = weigh_blocks(row);
  if (Row::kIsFromProbs && !sampling::masses_sum_to_one(masses.total)) {
    return SampleError::kProbabilities;
  }
  if (warp_of_thread() != 0) return SampleError::kNone;
  draw_from_blocks(row, masses, sampling::random_of_try(row.p, row.index(), 0),
                   [&](int i, uint32_t weight, const WeighedBlock& block) {
                     write_token_of_block(row.p, row.index(), row.part.begin() + i, weight,
                                          block.sum, mass_of(row, block), masses.total);
                   });
  return SampleError::kNone;
}

struct TriedToken {
  SampleError error;
  uint64_t token;  // key and, in the low half, id of the token; 0: top-p dropped all drawn tokens
};

/// The first of the tokens whose key is at least `key`; 0 if there is none.
__device__ inline uint64_t first_from(uint32_t key, const uint64_t (&tokens)[kClusterTries]) {
  uint64_t token = 0;
#pragma unroll
  for (int t = kClusterTries - 1; t >= 0; --t) token = tokens[t] >> 32 >= key ? tokens[t] : token;
  return token;
}

/// Draws with top-p alone. All CTAs get the token. `threshold`: the key of the smallest elements
/// that top-p keeps; 0 if it is not known.
template <class Row>
__device__ TriedToken draw_by_tries(Row& row, uint32_t threshold) {
  const Masses masses = weigh_blocks(row);
  if (Row::kIsFromProbs && !sampling::masses_sum_to_one(masses.total)) {
    return {SampleError::kProbabilities, 0};
  }
  const int warp = warp_of_thread();
#pragma unroll 1
  for (int begin = 0; begin < kMostTries; begin += kClusterTries) {
    __syncthreads();  // all warps have read what came in the last exchange
    row.exchange.expect(kClusterTries * sizeof(uint64_t));
    if (warp < kClusterTries) send_try(row, masses, begin + warp);
    row.exchange.receive();
    uint64_t tokens[kClusterTries];
#pragma unroll
    for (int t = 0; t < kClusterTries; ++t) tokens[t] = only_one(row.exchange.value_of_rank(t));
    if (threshold != 0) {
      // A token above the threshold is kept. Whether one that equals the threshold is kept depends
      // on the equal elements before it, so the sums below are needed.
      const uint64_t token = first_from(threshold, tokens);
      if (token == 0) continue;
      if (token >> 32 != threshold) return {SampleError::kNone, token};
    }
    publish_sums_before(row, tokens);
    const uint64_t all = sum_of_warp(row.exchange.value_of_rank(kClusterTries));
    const uint64_t wanted = sampling::part_of(row.shared.top_p, all);
#pragma unroll
    for (int t = 0; t < kClusterTries; ++t) {
      if (sum_of_warp(row.exchange.value_of_rank(t)) < wanted)
        return {SampleError::kNone, tokens[t]};
    }
  }
  if (threadIdx.x == 0)
    row.shared.random = sampling::random_of_try(row.p, row.index(), kMostTries).first;
  return {SampleError::kNone, 0};
}

/// Weighs the blocks of the row. Each CTA has a part of the row, and each warp has consecutive
/// blocks of this part.
template <class Row>
__device__ Masses weigh_blocks(Row& row) {
  const int warp = warp_of_thread();
  const int lane = lane_of_thread();
  uint64_t own = 0;
#pragma unroll 1
  for (int b = first_block(row, warp); b < min(first_block(row, warp + 1), num_blocks(row)); ++b) {
    own += mass_of(row, weigh(row, b));
  }
  if (lane == 0) {
    row.shared.warp_values[warp][0] = own;
    row.shared.warp_values[warp][1] = 0;
  }
  row.publish_sums();
  const uint64_t of_rank = row.exchange.value_of_rank(0);
  return {of_rank, lane < kRowWarps ? row.shared.warp_values[lane][0] : 0,
          __shfl_sync(~0U, sum_to_lane(of_rank), 31)};
}
template <class Row>
__device__ int num_blocks(Row& row) {
  return (row.part.count() + sampling::kBlock - 1) / sampling::kBlock;
}
template <class Row>
__device__ int first_block(Row& row, int warp) {
  return warp * ((num_blocks(row) + kRowWarps - 1) / kRowWarps);
}

template <class Row>
__device__ WeighedBlock weigh(Row& row, int block) {
  return RowBlock<Row>::weigh(row.scale.factor,
                              [&](int u, float (&x)[4]) { read_block(row, block, u, x); });
}
template <class Row>
__device__ uint64_t mass_of(Row& row, const WeighedBlock& block) {
  return sampling::mass_of_block(RowBlock<Row>::value_of(block.key),
                                 sampling::rounded_sum(block.sum),
                                 {row.largest, row.scale.factor, Row::kIsFromProbs});
}
/// Reads to x the word u of a block, counted among the block's words that this thread has.
template <class Row>
__device__ void read_block(Row& row, int block, int u, float (&x)[4]) {
  const int i = block * sampling::kBlock + RowBlock<Row>::first_of(u);
  if (i < row.part.count()) {
    row.read(i, x);
    return;
  }
#pragma unroll
  for (float& value : x) value = row.part.after_end();
}

/// Draws a token. If it is in this CTA's part, one thread calls found(place in the part, weight,
/// block) of the token. One warp calls it.
template <class Found, class Row>
__device__ void draw_from_blocks(Row& row, const Masses& masses, const sampling::RandomPair& random,
                                 const Found& found) {
  uint64_t target = sampling::high_product(random.first, masses.total);
  const BinOfLanes rank = find_lane(masses.of_rank, 0, target + 1);
  if (rank.lane != cluster_rank()) return;
  const BinOfLanes warp = find_lane(masses.of_warp, rank.above, target + 1);
  target -= warp.above;
  int b = first_block(row, warp.lane);
  WeighedBlock block = weigh(row, b);
  while (mass_of(row, block) <= target) {
    target -= mass_of(row, block);
    block = weigh(row, ++b);
  }
  const auto read_weights = [&](int u, uint32_t (&weights)[4]) {
    float x[4];
    read_block(row, b, u, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) weights[e] = sampling::weight_in_block(x[e], block.scale);
  };
  RowBlock<Row>::find(
      sampling::high_product(random.second, block.sum), read_weights,
      [&](int i, uint32_t weight) { found(b * sampling::kBlock + i, weight, block); });
}

/// Draws the token of a try, and sends it to all CTAs. Sends 0 if the token is not in this CTA's
/// part of the row. One warp calls it for each try.
template <class Row>
__device__ void send_try(Row& row, const Masses& masses, int index) {
  uint64_t token = 0;
  draw_from_blocks(row, masses,
                   sampling::random_of_try(row.p, row.index(), static_cast<uint32_t>(index)),
                   [&](int i, uint32_t /*weight*/, const WeighedBlock& /*block*/) {
                     token = uint64_t{key_of(row.part.at(i))} << 32 |
                             static_cast<uint32_t>(row.part.begin() + i);
                   });
  token = only_one(token);
  const int rank = lane_of_thread();
  if (rank >= cluster_size()) return;
  row.exchange.mail().send(row.exchange.own_values() + warp_of_thread(), token, rank);
}

/// Tells all CTAs the mass, in this part, of the elements before each token: larger ones, and equal
/// ones with a smaller id. The last value that it sends is the mass of all elements of the part.
template <class Row>
__device__ void publish_sums_before(Row& row, const uint64_t (&tokens)[kClusterTries]) {
  float value[kClusterTries];
  float above[kClusterTries];  // the next larger value
  int place[kClusterTries];
  uint64_t sums[kValues] = {};
#pragma unroll
  for (int t = 0; t < kClusterTries; ++t) {
    const auto key = static_cast<uint32_t>(tokens[t] >> 32);
    value[t] = sampling::value_of(key);
    above[t] = sampling::value_of(key + 1);
    place[t] = static_cast<int>(static_cast<uint32_t>(tokens[t])) - row.part.begin();
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * 4; i < row.part.count(); i += kRowThreads * 4) {
    float x[4];
    uint32_t weights[4];
    row.read(i, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) weights[e] = row.weight_of(x[e]);
    sums[kClusterTries] += weights[0] + weights[1];
    sums[kClusterTries] += weights[2] + weights[3];
#pragma unroll
    for (int t = 0; t < kClusterTries; ++t) {
      const float least = i + 4 <= place[t] ? value[t] : above[t];
      uint32_t before[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) before[e] = x[e] >= least ? weights[e] : 0U;
      sums[t] += before[0] + before[1];
      sums[t] += before[2] + before[3];
    }
  }
  // Adds elements that equal a token and come before it in its own word, which the loop left out.
  if (threadIdx.x < 3) {
#pragma unroll
    for (int t = 0; t < kClusterTries; ++t) {
      const int i = place[t] / 4 * 4 + static_cast<int>(threadIdx.x);
      if (i < 0 || i >= place[t] || place[t] >= row.part.count()) continue;
      if (row.part.at(i) == value[t]) sums[t] += row.weight_of(value[t]);
    }
  }
  const int lane = lane_of_thread();
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    const uint64_t sum = sum_of_warp(sums[v]);
    if (lane == 0) row.shared.sums[warp_of_thread()][v] = sum;
  }
  __syncthreads();
  if (warp_of_thread() == 0) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      sums[v] = sum_of_warp(lane < kRowWarps ? row.shared.sums[lane][v] : 0);
    }
    row.exchange.publish(sums);
  }
  row.exchange.receive();
}

}  // namespace flashplan::cuda
