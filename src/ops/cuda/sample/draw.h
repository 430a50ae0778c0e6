// SPDX-License-Identifier: Apache-2.0
// The draw of sample(): finds the token among what the filters keep.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/threshold.h"

namespace flashplan::cuda {

/// Sums over the elements that a thread has.
struct Sums {
  uint64_t mass;  // the mass of the elements above the cut
  uint32_t ties;  // the number of elements that equal the cut
};

/// The CTA, warp or thread in which a draw goes on.
struct Place {
  int index;
  uint64_t target;       // the draw's, less the kept weights before this CTA, warp or thread
  uint64_t ties_before;  // ties before this CTA, warp or thread
  uint64_t total;        // sum of the kept weights of all lanes that pick() compared
};

/// Draws from what the cut keeps and writes the token: the element at which the running sum of kept
/// weights, in the order of ids, exceeds the target. It is searched over CTAs, then over warps,
/// then over threads, each of which has a segment of the part, and at last in the segment.
template <class Row>
__device__ void draw(Row& row, const Cut& cut) {
  const int warp = warp_of_thread();
  const int lane = lane_of_thread();
  const uint32_t tie = row.weight_of_tie(cut);
  Sums own{};
  if (row.has_candidates) {
    sum_candidates(row, cut);
    __syncthreads();
  } else {
    own = sum_segments(row, cut);
    row.publish_sums();
  }
  if (warp == 0) {
    uint64_t mass = row.exchange.value_of_rank(0);
    uint64_t ties = row.exchange.value_of_rank(1);
    if (row.has_candidates) {
      const bool is_rank = lane < cluster_size();
      mass = is_rank ? row.exchange.value_of_rank(3) + row.shared.warp_values[lane][0] : 0;
      ties = is_rank ? row.shared.warp_values[lane][1] : 0;
    }
    const Place place = pick(row, mass, ties, 0, cut, tie, [&](uint64_t total) {
      return sampling::high_product(row.shared.random, total);
    });
    if (lane == 0) {
      row.shared.total = place.total;
      row.shared.target = place.target;
      row.shared.ties_before = place.ties_before;
      row.shared.goes_on = place.index == cluster_rank();
    }
  }
  __syncthreads();
  if (!row.shared.goes_on) return;
  if (row.has_candidates) {
    own = sum_segments(row, cut);
    __syncthreads();
  }
  const bool is_warp = lane < kRowWarps;
  const Place of_cta = pick(row, is_warp ? row.shared.warp_values[lane][0] : 0,
                            is_warp ? row.shared.warp_values[lane][1] : 0, row.shared.ties_before,
                            cut, tie, [&](uint64_t /*total*/) { return row.shared.target; });
  if (of_cta.index != warp) return;
  const Place of_warp = pick(row, own.mass, own.ties, of_cta.ties_before, cut, tie,
                             [&](uint64_t /*total*/) { return of_cta.target; });
  search(row, of_warp, cut, tie);
}

/// The first lane at which the running sum of kept weights exceeds target_of(sum of all lanes).
template <class TargetOf, class Row>
__device__ Place pick(Row& row, uint64_t mass, uint64_t ties, uint64_t ties_before, const Cut& cut,
                      uint32_t tie, const TargetOf& target_of) {
  if (tie != 0) {
    ties_before += sum_to_lane(ties) - ties;
    mass += uint64_t{sampling::kept_ties(cut, ties_before, static_cast<uint32_t>(ties))} * tie;
  }
  const uint64_t passed = sum_to_lane(mass);
  const uint64_t total = __shfl_sync(~0U, passed, 31);
  const uint64_t target = target_of(total);
  const unsigned lanes = __ballot_sync(~0U, passed > target);
  const int index = lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1 : 31;
  return {index, target - __shfl_sync(~0U, passed - mass, index),
          __shfl_sync(~0U, ties_before, index), total};
}

/// The element at which a thread's segment begins. A segment has an odd number of words, so that
/// the words that a warp reads at once are in different banks of shared memory.
template <class Row>
__device__ int begin_of_segment(Row& row, int thread) {
  const int num_words = (row.part.count() + 3) / 4;
  const int words = (num_words + kRowThreads - 1) / kRowThreads | 1;
  return min(thread * words * 4, row.part.count());
}

/// The sums of the thread's segment. Leaves the sums of each warp in row.shared.warp_values.
template <class Row>
__device__ Sums sum_segments(Row& row, const Cut& cut) {
  Sums own{};
  if (cut.min_weight != 0) {
    own = sum_few(row, cut);
  } else if (cut.key != 0) {
    own = sum_segment<true>(row, cut);
  } else {
    own = sum_segment<false>(row, cut);
  }
  const uint64_t mass = sum_of_warp(own.mass);
  const uint32_t ties = __reduce_add_sync(~0U, own.ties);
  if (lane_of_thread() == 0) {
    row.shared.warp_values[warp_of_thread()][0] = mass;
    row.shared.warp_values[warp_of_thread()][1] = ties;
  }
  return own;
}
/// The sums of the thread's segment. `kFiltered`: the cut drops some elements.
template <bool kFiltered, class Row>
__device__ Sums sum_segment(Row& row, const Cut& cut) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int end = begin_of_segment(row, thread + 1);
  Sums sums{};
#pragma unroll 1
  for (int i = begin_of_segment(row, thread); i < end; i += 4) {
    float x[4];
    row.read(i, x);
    add_word<kFiltered>(row, x, cut, sums);
  }
  return sums;
}
/// The sums of the thread's segment, for min-p, which keeps few elements: words without a kept
/// element are skipped.
template <class Row>
__device__ Sums sum_few(Row& row, const Cut& cut) {
  const auto thread = static_cast<int>(threadIdx.x);
  float low = row.least_of_min_p(cut.min_weight);
  if (cut.key != 0) low = fmaxf(low, sampling::value_of(cut.key));
  Sums sums{};
  row.for_words_from(low, begin_of_segment(row, thread), begin_of_segment(row, thread + 1), 4,
                     [&](int i) {
                       float x[4];
                       row.read(i, x);
                       add_word<true>(row, x, cut, sums);
                     });
  return sums;
}
/// Adds the kept weights of four neighbouring elements, and the ties among them, to `sums`.
template <bool kFiltered, class Row>
__device__ void add_word(Row& row, const float (&x)[4], const Cut& cut, Sums& sums) {
  const float cut_value = cut.key == 0 ? -INFINITY : sampling::value_of(cut.key);
  uint32_t weights[4];
  if (kFiltered) {
    if (!(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) >= cut_value)) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.ties += x[e] == cut_value ? 1U : 0U;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    weights[e] = kFiltered ? row.kept_weight_of(x[e], cut) : row.weight_of(x[e]);
    if (kFiltered && !(x[e] > cut_value)) weights[e] = 0;
  }
  sums.mass += weights[0] + weights[1];
  sums.mass += weights[2] + weights[3];
}

/// Leaves {mass above the cut, ties} of the candidates of CTA `rank` in
/// row.shared.warp_values[rank], for every CTA of the cluster.
template <class Row>
__device__ void sum_candidates(Row& row, const Cut& cut) {
#pragma unroll 1
  for (int rank = warp_of_thread(); rank < cluster_size(); rank += kRowWarps) {
    const uint32_t* keys = row.shared.candidates + rank * share_of_rank();
    uint64_t mass = 0;
    uint32_t ties = 0;
#pragma unroll 1
    for (int c = lane_of_thread(); c < num_candidates_of(row, rank); c += 32) {
      mass += amount_of_key<true>(row, keys[c], cut);
      ties += keys[c] == cut.key ? 1U : 0U;
    }
    mass = sum_of_warp(mass);
    ties = __reduce_add_sync(~0U, ties);
    if (lane_of_thread() == 0) {
      row.shared.warp_values[rank][0] = mass;
      row.shared.warp_values[rank][1] = ties;
    }
  }
}

/// Writes a token. `total`: the sum of the weights of all kept elements.
template <class Row>
__device__ void write_token(Row& row, uint32_t id, uint32_t weight, uint64_t total) {
  write_token(row.p, row.index(), static_cast<int32_t>(id), weight, static_cast<double>(total));
}

/// Finds the token in the segment of the warp's thread place.index, and writes it. One warp calls
/// it.
template <class Row>
__device__ void search(Row& row, const Place& place, const Cut& cut, uint32_t tie) {
  const int lane = lane_of_thread();
  const int thread = warp_of_thread() * 32 + place.index;
  const int begin = begin_of_segment(row, thread);
  const int end = begin_of_segment(row, thread + 1);
  uint64_t target = place.target;
  uint64_t ties_before = place.ties_before;
#pragma unroll 1
  for (int i = begin + lane * 4; i - lane * 4 < end; i += 128) {
    float x[4] = {row.part.after_end(), row.part.after_end(), row.part.after_end(),
                  row.part.after_end()};
    uint32_t weights[4];
    if (i < end) row.read(i, x);
    bool is_tie[4];
    uint32_t ties = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t key = key_of(x[e]);
      weights[e] = key > cut.key ? row.kept_weight_of(x[e], cut) : 0U;
      is_tie[e] = tie != 0 && key == cut.key;
      ties += is_tie[e] ? 1U : 0U;
    }
    if (tie != 0) {
      const uint64_t up_to_lane = ties_before + sum_to_lane(ties);
      uint64_t rank = up_to_lane - ties;
      ties_before = __shfl_sync(~0U, up_to_lane, 31);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (is_tie[e] && rank++ < cut.num_ties) weights[e] = tie;
      }
    }
    const uint64_t own = uint64_t{weights[0]} + weights[1] + weights[2] + weights[3];
    const uint64_t sum = sum_of_warp(own);
    if (target >= sum && i - lane * 4 + 128 < end) {
      target -= sum;
      continue;
    }
    const uint64_t passed = sum_to_lane(own);
    const unsigned lanes = __ballot_sync(~0U, passed > target);
    if (lanes != 0 && lane == __ffs(static_cast<int>(lanes)) - 1) {
      uint64_t reached = passed - own;
      int e = 0;
      uint32_t weight = weights[0];
#pragma unroll
      for (int next = 1; next < 4; ++next) {
        if (reached + weight <= target && e == next - 1) {
          reached += weight;
          weight = weights[next];
          e = next;
        }
      }
      write_token(row, static_cast<uint32_t>(row.part.begin() + i + e), weight, row.shared.total);
    }
    return;
  }
}

}  // namespace flashplan::cuda
