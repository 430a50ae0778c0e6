// SPDX-License-Identifier: Apache-2.0
// sample() with a small top-k from a row that a cluster holds. The largest values that its warps
// found give a lower bound of the k-th largest element. All CTAs send their elements from the bound
// on to the first CTA of the row, which draws from them.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/few.h"

namespace flashplan::cuda {

template <DType kDType, bool kFromProbs, bool kHeld>
class SampleGathered : protected SampleFew<kDType, kFromProbs, kHeld> {
  using Base = SampleFew<kDType, kFromProbs, kHeld>;

 public:
  using Base::Base;

 protected:
  using Base::expect;
  using Base::largest_;
  using Base::mail;
  using Base::num_candidates_of;
  using Base::p_;
  using Base::part_;
  using Base::publish;
  using Base::receive;
  using Base::share_of_rank;
  using Base::shared_;
  using Base::value_of_rank;

  /// Each thread of a warp has a key. Sends the two largest of them to all CTAs of the cluster.
  __device__ void send_largest(uint32_t key) {
    const int lane = lane_of_thread();
    const uint32_t first = __reduce_max_sync(~0U, key);
    const int first_lane = __ffs(static_cast<int>(__ballot_sync(~0U, key == first))) - 1;
    const uint32_t second = __reduce_max_sync(~0U, lane == first_lane ? 0U : key);
    if (lane >= cluster_size()) return;
    uint64_t* to = &shared_.largest[cluster_rank()][warp_of_thread()];
    mail().send(to, uint64_t{first} << 32 | second, lane);
  }

  /// Waits for what the warps of all CTAs have sent. Returns the row's largest key.
  __device__ uint32_t receive_largest() {
    expect(sizeof(shared_.largest[0]));
    receive();
    uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < kLargest; ++i) key = max(key, static_cast<uint32_t>(pair(i) >> 32));
    return __reduce_max_sync(~0U, key);
  }

  /// Draws and writes the token if top-k keeps few elements; else returns false.
  __device__ bool draw_from_gathered(const Cut& cut) {
    if (shared_.top_k >= p_.vocab) return false;
    const uint32_t bound = find_bound(shared_.top_k);
    if (bound == 0 || !gather(sampling::value_of(bound))) return false;
    if (cluster_rank() != 0) return true;
    const int lane = lane_of_thread();
    const int num_of_lane = lane < cluster_size() ? num_candidates_of(lane) : 0;
    const auto to_lane = static_cast<int>(sum_to_lane(static_cast<uint64_t>(num_of_lane)));
    constexpr int kThreadsOfRank = 16;
    static_assert(kThreadsOfRank * kMaxCluster <= kRowThreads);
    const int rank = static_cast<int>(threadIdx.x) / kThreadsOfRank;
    const int num = __shfl_sync(~0U, num_of_lane, rank);
    const int first = __shfl_sync(~0U, to_lane, rank) - num;
#pragma unroll 1
    for (int c = lane % kThreadsOfRank; c < num; c += kThreadsOfRank) {
      const uint64_t candidate = shared_.gathered[rank * share_of_rank() + c];
      this->set_few(first + c, static_cast<uint32_t>(candidate >> 32),
                    static_cast<uint32_t>(candidate), cut);
    }
    this->draw_from_few(__shfl_sync(~0U, to_lane, 31), shared_.top_k);
    return true;
  }

 private:
  static constexpr int kLargest = kMaxCluster * kRowWarps / 32;  // pairs of warps that a lane reads
  static_assert(kLargest * 32 == kMaxCluster * kRowWarps);

  /// Pair number i of the lane: the two largest keys of a warp, the larger one in the high half.
  __device__ uint64_t pair(int i) const {
    const int warp = i * 32 + lane_of_thread();
    return warp < kRowWarps * cluster_size() ? (&shared_.largest[0][0])[warp] : 0;
  }

  /// A key that at least `top_k` elements of the row reach: not many more than `top_k` of the keys
  /// that the warps have told reach it. 0 if these keys are too few.
  __device__ uint32_t find_bound(int top_k) const {
    // Both keys of each warp in a cluster of up to half the CTAs, else the larger one.
    const bool has_both = cluster_size() <= kMaxCluster / 2;
    int num = kRowWarps * cluster_size() * (has_both ? 2 : 1);  // of keys that are at least `low`
    if (num / 2 < top_k) return 0;  // too many elements would reach the bound
    uint32_t keys[kLargest];
    uint32_t low = ~0U;
#pragma unroll
    for (int i = 0; i < kLargest; ++i) {
      const bool is_second = has_both && i >= kLargest / 2;
      const uint64_t both = pair(is_second ? i - kLargest / 2 : i);
      keys[i] = static_cast<uint32_t>(is_second ? both : both >> 32);
      if (both != 0) low = min(low, keys[i]);
    }
    low = ~__reduce_max_sync(~0U, ~low);
    uint32_t high = sampling::key_of(largest_);
    const int enough = top_k + top_k / 8;
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

  /// Sends the part's elements from `low` on to the first CTA. Returns whether these are few, in
  /// the row and in each part.
  __device__ bool gather(float low) {
    const int share = share_of_rank();
    const auto begin = static_cast<int>(threadIdx.x) * 4;
    this->for_words_from(low, begin, part_.count(), kRowThreads * 4, [&](int first) {
#pragma unroll 1
      for (int i = first; i < min(first + 4, part_.count()); ++i) {
        const float value = part_.at(i);
        if (!(value >= low)) continue;
        const auto place = static_cast<int>(atomicAdd(&shared_.num_candidates, 1U));
        if (place >= share) break;
        const uint64_t id = static_cast<uint32_t>(part_.begin() + i);
        shared_.gathered_mail.send(&shared_.gathered[cluster_rank() * share + place],
                                   uint64_t{key_of(value)} << 32 | id, 0);
      }
    });
    __syncthreads();
    if (warp_of_thread() == 0) publish({shared_.num_candidates, 0, 0, 0});
    receive();
    const auto num = static_cast<uint32_t>(value_of_rank(0));
    const uint32_t sent = min(num, static_cast<uint32_t>(share));
    if (cluster_rank() == 0) {
      const uint32_t all = __reduce_add_sync(~0U, sent);
      if (threadIdx.x == 0) shared_.gathered_mail.expect(all * sizeof(uint64_t));
      shared_.gathered_mail.wait(0);
    }
    return __reduce_max_sync(~0U, num) <= static_cast<uint32_t>(share) &&
           __reduce_add_sync(~0U, num) <= kMostFew;
  }
};

}  // namespace flashplan::cuda
