// SPDX-License-Identifier: Apache-2.0
// The threshold of a filter of sample() is found in three steps. A histogram of the row tells the
// range of values that contains it. The elements in that range, the candidates, go to lists, and
// each CTA of the cluster has the lists of all CTAs. The threshold is found among the candidates.
// If there are too many of them, a further histogram divides their range.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/histogram.h"

namespace flashplan::cuda {

// --- The candidates, of which each CTA has all ---

/// How many candidates the list of one CTA of the cluster has room for.
__device__ inline int share_of_rank() {
  return kMaxCandidates >> (__ffs(cluster_size()) - 1);  // the size is a power of two
}

/// How many entries of its list a CTA sends: its candidates, and unused ones up to a multiple of
/// 4, since a message has 16 bytes. 0 if the CTA has more candidates than its list has room for.
__device__ inline int sent_of(int num_candidates) {
  return num_candidates <= share_of_rank() ? (num_candidates + 3) / 4 * 4 : 0;
}

/// Sends those of the part's elements that are in `range` to the lists that all CTAs have, and the
/// part's mass above the range to all CTAs. `kByValue`: the range has values, both ends included;
/// else it has positions (position_of()). After it row.keys has the smallest and the largest key
/// in the range, and row.has_too_many tells whether a list has no room for all.
template <bool kByValue, class Row>
__device__ void gather_candidates(Row& row, const Range& range) {
  const int share = share_of_rank();
  uint32_t* own = row.shared.candidates + cluster_rank() * share;
  if (threadIdx.x == 0) {
    row.shared.num_candidates = 0;
    row.shared.keys = KeyRange::empty();
  }
  __syncthreads();
  if (row.lists_have_bins && warp_of_thread() == 0) row.exchange.publish({});
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * 4; i < row.part.count(); i += kRowThreads * 4) {
    float x[4];
    bool is_in[4];
    row.read(i, x);
    if (kByValue && !(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) >= range.low)) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) is_in[e] = is_in_range<kByValue>(row, x[e], range);
    if (!(is_in[0] || is_in[1] || is_in[2] || is_in[3])) continue;
    unsigned left = 0;  // bits of the elements in the range
#pragma unroll
    for (int e = 0; e < 4; ++e) left |= is_in[e] ? 1U << e : 0U;
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int e = __ffs(static_cast<int>(left)) - 1;
      if (i + e >= row.part.count()) break;
      const uint32_t place = atomicAdd(&row.shared.num_candidates, 1U);
      if (place >= static_cast<uint32_t>(share)) break;
      own[place] = key_of(e == 0 ? x[0] : e == 1 ? x[1] : e == 2 ? x[2] : x[3]);
    }
  }
  __syncthreads();
  if (row.lists_have_bins) row.exchange.receive();  // all CTAs have read the bins
  row.lists_have_bins = false;
  // If not all candidates fit, num_own is larger than `share`, but may be less than their number.
  const auto num_own = static_cast<int>(row.shared.num_candidates);
  const bool fits = num_own <= share;
  if (!fits) find_extremes<kByValue>(row, range);
  const int num_sent = sent_of(num_own);
  const int lane = lane_of_thread();
#pragma unroll 1
  for (int rank = warp_of_thread(); rank < cluster_size(); rank += kRowWarps) {
    if (rank == cluster_rank()) continue;
#pragma unroll 1
    for (int c = lane * 4; c < num_sent; c += 128) {
      const uint4 keys = *reinterpret_cast<const uint4*>(own + c);
      row.shared.lists.send(own + c, keys.x | uint64_t{keys.y} << 32,
                            keys.z | uint64_t{keys.w} << 32, rank);
    }
  }
  if (warp_of_thread() == 0) {
    KeyRange keys = fits ? KeyRange::empty() : row.shared.keys;
#pragma unroll 1
    for (int c = lane; c < num_own && fits; c += 32) {
      keys.include(own[c]);
    }
    const uint64_t values[kValues] = {static_cast<uint64_t>(num_own),
                                      __reduce_max_sync(~0U, ~keys.least),
                                      __reduce_max_sync(~0U, keys.most), row.shared.own_above};
    row.exchange.publish(values);
  }
  row.exchange.receive();
  if (warp_of_thread() == 0) {
    const bool is_other = lane < cluster_size() && lane != cluster_rank();
    const int keys = is_other ? sent_of(num_candidates_of(row, lane)) : 0;
    const auto bytes = __reduce_add_sync(~0U, static_cast<uint32_t>(keys)) * 4;
    if (lane == 0) row.shared.lists.expect(bytes);
  }
  row.shared.lists.wait(row.num_gathers++ % 2);
  row.has_too_many = __reduce_max_sync(~0U, static_cast<uint32_t>(row.exchange.value_of_rank(0))) >
                     static_cast<uint32_t>(share);
  row.keys = {~__reduce_max_sync(~0U, static_cast<uint32_t>(row.exchange.value_of_rank(1))),
              __reduce_max_sync(~0U, static_cast<uint32_t>(row.exchange.value_of_rank(2)))};
}

template <bool kByValue, class Row>
__device__ bool is_in_range(Row& row, float x, const Range& range) {
  if (kByValue) return x >= range.low && x <= range.high;
  const float position = position_of(row, x);
  return position >= range.low && position < range.high;
}

/// Extends row.shared.keys to the keys of those elements of this CTA's part that lie in `range`.
template <bool kByValue, class Row>
__device__ void find_extremes(Row& row, const Range& range) {
  KeyRange keys = KeyRange::empty();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < row.part.count(); i += kRowThreads) {
    const float x = row.part.at(i);
    if (is_in_range<kByValue>(row, x, range)) keys.include(key_of(x));
  }
  share_keys(row.shared, keys);
}

/// Calls body(key) for each candidate of all CTAs; the threads of this CTA divide them.
template <class Body, class Row>
__device__ void for_each_candidate(Row& row, const Body& body) {
  const int share = share_of_rank();
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < kMaxCandidates; c += kRowThreads) {
    const int rank = c * cluster_size() / kMaxCandidates;
    if (c - rank * share < num_candidates_of(row, rank)) {
      body(row.shared.candidates[c]);
    }
  }
}

template <class Row>
__device__ int num_candidates_of(Row& row, int rank) {
  return static_cast<int>(row.exchange.value_of(rank, 0));
}

/// Finds the threshold among the candidates. `above`: the count or mass above all candidates.
/// Returns the count or mass above the threshold.
template <bool kByWeight, class Row>
__device__ uint64_t select(Row& row, Cut* cut, uint64_t wanted, uint64_t above) {
  const Cut before = *cut;
  KeyRange keys = row.keys;
  above = keys.narrow_to_one(row.search(), wanted, above, [&](const auto& add) {
    for_each_candidate(row,
                       [&](uint32_t key) { add(key, amount_of_key<kByWeight>(row, key, before)); });
  });
  cut->key = keys.least;
  cut->num_ties = 1;
  return above;
}

/// The sum of the weights of all CTAs' candidates that are above the cut.
template <class Row>
__device__ uint64_t mass_of_candidates(Row& row, const Cut& cut) {
  uint64_t mass = 0;
  for_each_candidate(row, [&](uint32_t key) { mass += amount_of_key<true>(row, key, cut); });
  return row.sum_of_cta(mass);
}

// --- The threshold of a filter ---

struct Threshold {
  uint64_t wanted;
  uint64_t above;
};

/// Moves the cut up to the threshold: the largest key such that the elements with this key or a
/// larger one have the count or mass that is wanted, which is wanted_of(the count or mass above the
/// old cut). If all elements above the old cut have less, the cut stays. Sets cut->num_ties to 1.
/// Threshold::above: the count or mass above the new key.
template <bool kByWeight, class WantedOf, class Row>
__device__ Threshold find_threshold(Row& row, Cut* cut, const WantedOf& wanted_of) {
  if (row.has_all_candidates) {  // all that has passed the filter before is in the lists
    const uint64_t all = mass_of_candidates(row, *cut);
    const uint64_t wanted = wanted_of(all);
    if (all < wanted) return {wanted, all};
    return {wanted, select<kByWeight>(row, cut, wanted, 0)};
  }
  if (cut->key == 0 && cut->min_weight == 0) {
    fill_bins<kByWeight, false>(row, *cut);
  } else {
    fill_bins<kByWeight, true>(row, *cut);
  }
  Bin bin = find_bin_of_row(row, 0, wanted_of);
  if (bin.index < 0) return {bin.wanted, bin.above};
  if (threadIdx.x == 0) {
    row.shared.own_above = bin.own_above;
    row.shared.wanted = bin.wanted;
  }
  gather_candidates<false>(row, range_of_bin(row, bin.index));
  while (row.has_too_many) {
    if (row.keys.least == row.keys.most) {
      cut->key = row.keys.least;
      cut->num_ties = 1;
      return {row.shared.wanted, bin.above};
    }
    const int shift = row.keys.shift();
    fill_bins_by_key<kByWeight>(row, *cut, shift);
    bin = find_bin_of_row(row, bin.above, [&](uint64_t /*all*/) { return row.shared.wanted; });
    if (threadIdx.x == 0) row.shared.own_above += bin.own_above;
    row.keys.narrow(bin.index, shift);
    gather_candidates<true>(
        row, {sampling::value_of(row.keys.least), sampling::value_of(row.keys.most)});
  }
  row.has_candidates = kByWeight || bin.above == 0;
  row.has_all_candidates = !kByWeight && bin.above == 0;
  const uint64_t wanted = row.shared.wanted;
  return {wanted, select<kByWeight>(row, cut, wanted, bin.above)};
}

}  // namespace flashplan::cuda
