// SPDX-License-Identifier: Apache-2.0
// Applies the filters of sample() and draws, if one CTA has all elements that may be kept and these
// are few: each is compared with each. With a small top-k, the largest values that the warps of a
// cluster found give a lower bound of the k-th largest element. All CTAs send their elements that
// are not below this bound to the first CTA of the row, which draws from them.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/draw.h"

namespace flashplan::cuda {

constexpr int kFewAtOnce = 4;
static_assert(kFewAtOnce * 8 <= kFewPadding);

__device__ inline uint64_t order_of(const uint4& candidate) {
  return uint64_t{candidate.y} << 32 | candidate.x;
}

/// The sum over `parts` neighbouring threads.
template <class T>
__device__ T sum_of_parts(T value, int parts) {
#pragma unroll 1
  for (int distance = 1; distance < parts; distance *= 2) {
    value += __shfl_xor_sync(~0U, value, distance);
  }
  return value;
}

/// Puts a candidate in place `place` of row.shared.few.
template <class Row>
__device__ void set_few(Row& row, int place, uint32_t key, uint32_t id, const Cut& cut) {
  row.shared.few[place] =
      make_uint4(~id, key, row.kept_weight_of(sampling::value_of(key), cut), 0U);
}

/// Draws a token from the first `num` candidates of row.shared.few, at most kMostFew, and writes
/// it. The candidates are ranked by value, the largest first, and equal ones by id, so top-k and
/// top-p keep the first ranks. Two to eight neighbouring threads find the rank of one candidate:
/// each compares it with a part of the candidates. All threads of the CTA call this.
template <class Row>
__device__ void draw_from_few(Row& row, int num, int32_t top_k) {
  uint4* few = row.shared.few;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < kFewPadding) few[num + thread] = make_uint4(0U, 0U, 0U, 0U);
  __syncthreads();
  static_assert(2 * kMostFew <= kRowThreads);
  int log_parts = 1;
  while (log_parts < 3 && num << (log_parts + 1) <= kRowThreads) ++log_parts;
  const int parts = 1 << log_parts;
  const int index = thread >> log_parts;
  const int part = thread & (parts - 1);
  const int end = warp_of_thread() * 32 >> log_parts < num ? num : 0;  // same for all lanes
  const uint4 own = index < num ? few[index] : make_uint4(0U, 0U, 0U, 0U);
  uint32_t rank = 0;
  uint64_t above = 0;  // mass of the candidates with smaller ranks
#pragma unroll 1
  for (int c = part; c < end; c += kFewAtOnce * parts) {
#pragma unroll
    for (int u = 0; u < kFewAtOnce; ++u) {
      const uint4 other = few[c + u * parts];
      const bool comes_before = order_of(other) > order_of(own);
      rank += comes_before ? 1U : 0U;
      above += comes_before ? other.z : 0U;
    }
  }
  rank = sum_of_parts(rank, parts);
  above = sum_of_parts(above, parts);
  // The threads of the candidate at the last rank that top-k keeps store the mass up to this rank.
  const auto last = static_cast<uint32_t>(min(top_k, num)) - 1;
  bool is_kept = index < num && rank <= last;
  if (is_kept && rank == last) row.shared.total = above + own.z;
  __syncthreads();
  if (row.shared.top_p < 1.0F) {
    const uint64_t wanted = sampling::part_of(row.shared.top_p, row.shared.total);
    is_kept = is_kept && above < wanted;
    if (is_kept && above + own.z >= wanted) row.shared.wanted = above + own.z;
  } else if (thread == 0) {
    row.shared.wanted = row.shared.total;
  }
  if (part == 0 && is_kept) few[index].w = own.z;
  __syncthreads();
  const uint64_t total = row.shared.wanted;
  const uint64_t target = sampling::high_product(row.shared.random, total);
  uint64_t before = 0;  // mass of kept candidates with smaller ids
#pragma unroll 1
  for (int c = part; c < end; c += kFewAtOnce * parts) {
#pragma unroll
    for (int u = 0; u < kFewAtOnce; ++u) {
      const uint4 other = few[c + u * parts];
      before += other.x > own.x ? other.w : 0U;
    }
  }
  before = sum_of_parts(before, parts);
  if (part == 0 && is_kept && before <= target && target < before + own.z) {
    write_token(row, ~own.x, own.z, total);
  }
}

// --- With a small top-k ---

/// Whether find_bound() compares both keys that each warp has sent, and not only the larger one.
FLASHPLAN_HOST_DEVICE constexpr bool compares_both(int ctas) { return ctas <= kMaxCluster / 2; }
FLASHPLAN_HOST_DEVICE constexpr int num_compared(int ctas) {
  return kRowWarps * ctas * (compares_both(ctas) ? 2 : 1);
}
/// The largest top-k for which find_bound() finds a bound. If more of the compared keys were at
/// least the bound, probably more than kMostFew elements of the row would be: a warp may have more
/// of them than the two that it has sent.
FLASHPLAN_HOST_DEVICE constexpr int most_bounded(int ctas) {
  return compares_both(ctas) ? num_compared(ctas) * 5 / 8 : num_compared(ctas) * 13 / 24;
}

constexpr int kLargest = kMaxCluster * kRowWarps / 32;  // pairs of keys that a lane reads
static_assert(kLargest * 32 == kMaxCluster * kRowWarps);

/// Each thread of a warp has a key. Sends the two largest of them to all CTAs of the cluster.
template <class Row>
__device__ void send_largest(Row& row, uint32_t key) {
  const int lane = lane_of_thread();
  const uint32_t first = __reduce_max_sync(~0U, key);
  const int first_lane = __ffs(static_cast<int>(__ballot_sync(~0U, key == first))) - 1;
  const uint32_t second = __reduce_max_sync(~0U, lane == first_lane ? 0U : key);
  if (lane >= cluster_size()) return;
  uint64_t* to = &row.shared.largest[cluster_rank()][warp_of_thread()];
  row.exchange.mail().send(to, uint64_t{first} << 32 | second, lane);
}

/// Waits for what the warps of all CTAs have sent. Returns the row's largest key.
template <class Row>
__device__ uint32_t receive_largest(Row& row) {
  row.exchange.expect(sizeof(row.shared.largest[0]));
  row.exchange.receive();
  uint32_t key = 0;
#pragma unroll
  for (int i = 0; i < kLargest; ++i)
    key = max(key, static_cast<uint32_t>(pair_of_warps(row, i) >> 32));
  return __reduce_max_sync(~0U, key);
}

/// Draws and writes the token if top-k keeps few elements; else returns false.
template <class Row>
__device__ bool draw_from_gathered(Row& row, const Cut& cut) {
  if (row.shared.top_k >= row.p.vocab) return false;
  const uint32_t bound = find_bound(row, row.shared.top_k);
  if (bound == 0 || !gather_from(row, sampling::value_of(bound))) return false;
  if (cluster_rank() != 0) return true;
  const int lane = lane_of_thread();
  const int num_of_lane = lane < cluster_size() ? num_candidates_of(row, lane) : 0;
  const auto to_lane = static_cast<int>(sum_to_lane(static_cast<uint64_t>(num_of_lane)));
  constexpr int kThreadsOfRank = 16;
  static_assert(kThreadsOfRank * kMaxCluster <= kRowThreads);
  const int rank = static_cast<int>(threadIdx.x) / kThreadsOfRank;
  const int num = __shfl_sync(~0U, num_of_lane, rank);
  const int first = __shfl_sync(~0U, to_lane, rank) - num;
#pragma unroll 1
  for (int c = lane % kThreadsOfRank; c < num; c += kThreadsOfRank) {
    const uint64_t candidate = row.shared.gathered[rank * share_of_rank() + c];
    set_few(row, first + c, static_cast<uint32_t>(candidate >> 32),
            static_cast<uint32_t>(candidate), cut);
  }
  draw_from_few(row, __shfl_sync(~0U, to_lane, 31), row.shared.top_k);
  return true;
}

/// Pair number i of the lane: the two largest keys of a warp, the larger one in the high half.
template <class Row>
__device__ uint64_t pair_of_warps(Row& row, int i) {
  const int warp = i * 32 + lane_of_thread();
  return warp < kRowWarps * cluster_size() ? (&row.shared.largest[0][0])[warp] : 0;
}

/// A lower bound for top-k: a key such that at least `top_k` elements of the row have this key or a
/// larger one, since so many of the keys that warps have sent by send_largest() are that large. A
/// search raises the bound until few more than `top_k` of the sent keys reach it. Warps without
/// elements have sent the key of -infinity, which no element is below. Returns 0 if warps have sent
/// too few keys.
template <class Row>
__device__ uint32_t find_bound(Row& row, int top_k) {
  // In clusters of more CTAs, `keys` has no room for both keys of each pair that the lane reads.
  const bool has_both = compares_both(cluster_size());
  int num = num_compared(cluster_size());  // compared keys that are at least `low`
  const int most = most_bounded(cluster_size());
  if (most < top_k) return 0;
  uint32_t keys[kLargest];
  uint32_t low = ~0U;
#pragma unroll
  for (int i = 0; i < kLargest; ++i) {
    const bool is_second = has_both && i >= kLargest / 2;
    const uint64_t both = pair_of_warps(row, is_second ? i - kLargest / 2 : i);
    keys[i] = static_cast<uint32_t>(is_second ? both : both >> 32);
    if (both != 0) low = min(low, keys[i]);
  }
  low = ~__reduce_max_sync(~0U, ~low);
  uint32_t high = sampling::key_of(row.largest);
  const int enough = max(top_k, min(top_k + top_k / 8, most * 9 / 10));
#pragma unroll 1
  while (num > enough && low < high) {
    const uint32_t middle = high - (high - low) / 2;
    unsigned own = 0;
#pragma unroll
    for (const uint32_t key : keys) own += key >= middle ? 1U : 0U;
    const auto reached = static_cast<int>(__reduce_add_sync(~0U, own));
    if (reached >= top_k) {
      low = middle;
      num = reached;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Sends those elements of this CTA's part that are at least `low` to the first CTA. Returns
/// whether the row has at most kMostFew such elements, and each CTA's part at most share_of_rank().
template <class Row>
__device__ bool gather_from(Row& row, float low) {
  const int share = share_of_rank();
  const auto begin = static_cast<int>(threadIdx.x) * 4;
  row.for_words_from(low, begin, row.part.count(), kRowThreads * 4, [&](int first) {
#pragma unroll 1
    for (int i = first; i < min(first + 4, row.part.count()); ++i) {
      const float value = row.part.at(i);
      if (!(value >= low)) continue;
      const auto place = static_cast<int>(atomicAdd(&row.shared.num_candidates, 1U));
      if (place >= share) break;
      const uint64_t id = static_cast<uint32_t>(row.part.begin() + i);
      row.shared.gathered_mail.send(&row.shared.gathered[cluster_rank() * share + place],
                                    uint64_t{key_of(value)} << 32 | id, 0);
    }
  });
  __syncthreads();
  if (warp_of_thread() == 0) row.exchange.publish({row.shared.num_candidates, 0, 0, 0});
  row.exchange.receive();
  const auto num = static_cast<uint32_t>(row.exchange.value_of_rank(0));
  const uint32_t sent = min(num, static_cast<uint32_t>(share));
  if (cluster_rank() == 0) {
    const uint32_t all = __reduce_add_sync(~0U, sent);
    if (threadIdx.x == 0) row.shared.gathered_mail.expect(all * sizeof(uint64_t));
    row.shared.gathered_mail.wait(0);
  }
  return __reduce_max_sync(~0U, num) <= static_cast<uint32_t>(share) &&
         __reduce_add_sync(~0U, num) <= kMostFew;
}

}  // namespace flashplan::cuda
