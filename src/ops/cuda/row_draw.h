// SPDX-License-Identifier: Apache-2.0
// A row of weights that a cluster of CTAs draws a token from: sums over the row, and the draw. All
// that is added is integers, so any order gives the CPU's results.
#pragma once

#include <cstdint>

#include "ops/cuda/row_part.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {

using sampling::Cut;

/// What the CTAs of a cluster tell each other: two sets, since a CTA may be a step ahead.
struct RowExchange {
  uint64_t values[2][kMaxCluster][3];
  uint64_t warp_values[kRowWarps][3];
};

struct Sum {
  static __device__ uint64_t of(uint64_t a, uint64_t b) { return a + b; }
};
struct Max {
  static __device__ uint64_t of(uint64_t a, uint64_t b) { return a > b ? a : b; }
};

template <class Op>
__device__ uint64_t reduce_warp(uint64_t value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = Op::of(value, __shfl_xor_sync(~0U, value, distance));
  }
  return value;
}

/// One row, whose values `Part` has. All threads of the cluster go through all calls together.
template <class Part>
class RowDraw {
 protected:
  __device__ RowDraw(const Part& part, RowExchange& exchange) : part_(part), exchange_(exchange) {}

  __device__ uint32_t weight_of_tie(const Cut& cut) const {
    if (cut.num_ties == 0) return 0;
    const uint32_t weight = sampling::weight_of(sampling::value_of(cut.key), scale_);
    return weight >= cut.min_weight ? weight : 0;
  }

  /// The weights above the cut's key, over the row.
  __device__ uint64_t total_mass(const Cut& cut) {
    uint64_t values[3] = {};
    for (int i = static_cast<int>(threadIdx.x); i < part_.count(); i += kRowThreads) {
      const float x = part_.at(i);
      const uint32_t weight = sampling::weight_of(x, scale_);
      if (sampling::key_of(x) > cut.key && weight >= cut.min_weight) values[0] += weight;
    }
    all_reduce<Sum>(values);
    return values[0];
  }

  /// Draws a token from what the cut keeps, and calls write(id, its weight, sum of weights) in the
  /// thread that finds it. Kept weights are added in the order of ids, over CTAs, then over warps,
  /// each of which has a segment of the part, then in the segment.
  template <class Write>
  __device__ void draw(const Cut& cut, uint64_t random, const Write& write) {
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32;
    const int lane = thread % 32;
    const int segment = (part_.count() + kRowThreads - 1) / kRowThreads * 32;
    const int begin = min(warp * segment, part_.count());
    const int end = min(begin + segment, part_.count());
    uint64_t mass = 0;
    uint64_t ties = 0;
    for (int i = begin + lane; i < end; i += 32) {
      const float x = part_.at(i);
      const uint32_t key = sampling::key_of(x);
      const uint32_t weight = sampling::weight_of(x, scale_);
      if (key > cut.key && weight >= cut.min_weight) mass += weight;
      ties += key == cut.key ? 1 : 0;
    }
    mass = reduce_warp<Sum>(mass);
    ties = reduce_warp<Sum>(ties);
    if (lane == 0) {
      exchange_.warp_values[warp][0] = mass;
      exchange_.warp_values[warp][1] = ties;
    }
    __syncthreads();
    uint64_t of_cta[3] = {};
    for (int w = 0; w < kRowWarps; ++w) {
      of_cta[0] += exchange_.warp_values[w][0];
      of_cta[1] += exchange_.warp_values[w][1];
    }
    const int set = step_ % 2;
    publish(of_cta, set);
    cluster_sync();
    ++step_;

    const uint32_t tie = weight_of_tie(cut);
    const auto kept = [&](uint64_t above, uint64_t num_ties, uint64_t ties_before) {
      return above +
             uint64_t{sampling::kept_ties(cut, ties_before, static_cast<uint32_t>(num_ties))} * tie;
    };
    uint64_t total = 0;
    uint64_t ties_before = 0;
    for (int rank = 0; rank < cluster_size(); ++rank) {
      const uint64_t* of_rank = exchange_.values[set][rank];
      total += kept(of_rank[0], of_rank[1], ties_before);
      ties_before += of_rank[1];
    }
    uint64_t target = sampling::high_product(random, total);
    ties_before = 0;
    for (int rank = 0; rank < cluster_rank(); ++rank) {
      const uint64_t* of_rank = exchange_.values[set][rank];
      const uint64_t passed = kept(of_rank[0], of_rank[1], ties_before);
      if (target < passed) return;  // the token is in a CTA before
      target -= passed;
      ties_before += of_rank[1];
    }
    if (target >= kept(of_cta[0], of_cta[1], ties_before)) return;
    for (int w = 0; w < warp; ++w) {
      const uint64_t passed =
          kept(exchange_.warp_values[w][0], exchange_.warp_values[w][1], ties_before);
      if (target < passed) return;
      target -= passed;
      ties_before += exchange_.warp_values[w][1];
    }
    if (target >= kept(mass, ties, ties_before)) return;

    for (int first = begin; first < end; first += 32) {
      const int i = first + lane;
      const float x = i < end ? part_.at(i) : 0.0F;
      const uint32_t key = i < end ? sampling::key_of(x) : 0U;
      const uint32_t weight = i < end ? sampling::weight_of(x, scale_) : 0U;
      const bool is_tie = i < end && key == cut.key;
      const unsigned tie_lanes = __ballot_sync(~0U, is_tie);
      const auto tie_rank =
          ties_before + static_cast<uint64_t>(__popc(tie_lanes & ((1U << lane) - 1)));
      uint64_t own = 0;
      if (i < end && key > cut.key && weight >= cut.min_weight) own = weight;
      if (is_tie && tie_rank < cut.num_ties) own = tie;
      uint64_t passed = own;
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t other = __shfl_up_sync(~0U, passed, distance);
        if (lane >= distance) passed += other;
      }
      const unsigned reached = __ballot_sync(~0U, passed > target);
      if (reached != 0) {
        if (lane == __ffs(static_cast<int>(reached)) - 1) {
          write(part_.begin() + i, own, total);
        }
        return;
      }
      target -= __shfl_sync(~0U, passed, 31);
      ties_before += static_cast<uint64_t>(__popc(tie_lanes));
    }
  }

  /// Reduces over all threads of the cluster; all get the results.
  template <class Op>
  __device__ void all_reduce(uint64_t (&values)[3]) {
    const int thread = static_cast<int>(threadIdx.x);
    for (uint64_t& value : values) value = reduce_warp<Op>(value);
    if (thread % 32 == 0) {
      for (int v = 0; v < 3; ++v) exchange_.warp_values[thread / 32][v] = values[v];
    }
    __syncthreads();
    for (int v = 0; v < 3; ++v) {
      values[v] = exchange_.warp_values[0][v];
      for (int w = 1; w < kRowWarps; ++w) {
        values[v] = Op::of(values[v], exchange_.warp_values[w][v]);
      }
    }
    const int set = step_ % 2;
    publish(values, set);
    cluster_sync();  // warp_values may be written again, too
    ++step_;
    for (int v = 0; v < 3; ++v) {
      values[v] = exchange_.values[set][0][v];
      for (int rank = 1; rank < cluster_size(); ++rank) {
        values[v] = Op::of(values[v], exchange_.values[set][rank][v]);
      }
    }
  }

  /// Writes this CTA's values to all CTAs; a cluster_sync() is still due. A set is written again
  /// two steps later: by then all have passed the barrier of the step between, and read this one.
  __device__ void publish(const uint64_t (&values)[3], int set) {
    const int rank = static_cast<int>(threadIdx.x);
    if (rank >= cluster_size()) return;
    uint64_t* to = shared_of(&exchange_.values[set][cluster_rank()][0], rank);
    for (int v = 0; v < 3; ++v) to[v] = values[v];
  }

  Part part_;
  RowExchange& exchange_;
  sampling::Scale scale_{};
  int step_ = 0;  // of the exchange
};

}  // namespace flashplan::cuda
