// SPDX-License-Identifier: Apache-2.0
// The threshold of a filter of sample(), which is found in three steps: a histogram of the row
// tells the range of values that has it; the candidates, which are the elements in that range, go
// to lists that each CTA has of all of them; the threshold is found among them. Where they are too
// many, the next histogram divides their range.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/histogram.h"

namespace flashplan::cuda {

template <DType kDType, bool kFromProbs, bool kHeld>
class SampleThreshold : protected SampleHistogram<kDType, kFromProbs, kHeld> {
  using Base = SampleHistogram<kDType, kFromProbs, kHeld>;

 public:
  using Base::Base;

 protected:
  using Base::find_bin_of_row;
  using Base::groups_;
  using Base::least_;
  using Base::lists_have_bins_;
  using Base::most_;
  using Base::narrow;
  using Base::part_;
  using Base::position_of;
  using Base::publish;
  using Base::read;
  using Base::receive;
  using Base::shared_;
  using Base::shift_of_keys;
  using Base::step_;
  using Base::value_of_rank;
  using Base::values_of;

  struct Threshold {
    uint64_t wanted;
    uint64_t above;
  };

  /// Replaces cut->key by the largest key such that the values from it on have a count, or a mass,
  /// of wanted_of(that of all that takes part), which is what lies above cut->key. It then has one
  /// tie. Where all of it does not reach what is wanted, the cut stays. `above`: the count or mass
  /// above the key.
  template <bool kByWeight, class WantedOf>
  __device__ Threshold find_threshold(Cut* cut, const WantedOf& wanted_of) {
    if (has_all_candidates_) {  // all that has passed the filter before is in the lists
      const uint64_t all = mass_of_candidates(*cut);
      const uint64_t wanted = wanted_of(all);
      if (all < wanted) return {wanted, all};
      return {wanted, select<kByWeight>(cut, wanted, 0)};
    }
    if (cut->key == 0 && cut->min_weight == 0) {
      this->template fill_bins<kByWeight, false>(*cut);
    } else {
      this->template fill_bins<kByWeight, true>(*cut);
    }
    Bin bin = find_bin_of_row(0, wanted_of);
    if (bin.index < 0) return {bin.wanted, bin.above};
    if (threadIdx.x == 0) {
      shared_.own_above = bin.own_above;
      shared_.wanted = bin.wanted;
    }
    gather<false>(this->range_of_bin(bin.index));
    while (has_too_many_) {
      if (least_ == most_) {
        cut->key = least_;
        cut->num_ties = 1;
        return {shared_.wanted, bin.above};
      }
      const int shift = shift_of_keys();
      this->template fill_bins_by_key<kByWeight>(*cut, shift);
      bin = find_bin_of_row(bin.above, [&](uint64_t /*all*/) { return shared_.wanted; });
      if (threadIdx.x == 0) shared_.own_above += bin.own_above;
      narrow(bin.index, shift);
      gather<true>({sampling::value_of(least_), sampling::value_of(most_)});
    }
    has_candidates_ = kByWeight || bin.above == 0;
    has_all_candidates_ = !kByWeight && bin.above == 0;
    const uint64_t wanted = shared_.wanted;
    return {wanted, select<kByWeight>(cut, wanted, bin.above)};
  }

  // --- The candidates, of which each CTA has all ---

  /// Puts the elements of a range of positions, or of values from the low to the high one, in the
  /// lists of all CTAs, and tells these the CTA's mass above. After it least_ and most_ are the
  /// range's smallest and largest key, and has_too_many_ whether a CTA has more than its share of
  /// the lists.
  template <bool kByValue>
  __device__ void gather(const Range& range) {
    const int share = share_of_rank();
    uint32_t* own = shared_.candidates + cluster_rank() * share;
    if (threadIdx.x == 0) {
      shared_.num_candidates = 0;
      shared_.least = ~0U;
      shared_.most = 0;
    }
    __syncthreads();
    if (lists_have_bins_ && warp_of_thread() == 0) publish({});
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      bool is_in[4];
      read(i, x);
      if (kByValue && !(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) >= range.low)) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) is_in[e] = is_in_range<kByValue>(x[e], range);
      if (!(is_in[0] || is_in[1] || is_in[2] || is_in[3])) continue;
      unsigned left = 0;  // bits of the elements
#pragma unroll
      for (int e = 0; e < 4; ++e) left |= is_in[e] ? 1U << e : 0U;
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int e = __ffs(static_cast<int>(left)) - 1;
        if (i + e >= part_.count()) break;
        const uint32_t place = atomicAdd(&shared_.num_candidates, 1U);
        if (place >= static_cast<uint32_t>(share)) break;
        own[place] = key_of(e == 0 ? x[0] : e == 1 ? x[1] : e == 2 ? x[2] : x[3]);
      }
    }
    __syncthreads();
    if (lists_have_bins_) receive();  // all CTAs have read them
    lists_have_bins_ = false;
    const auto num_own = static_cast<int>(shared_.num_candidates);  // or fewer, if not all fit
    const bool fits = num_own <= share;
    if (!fits) find_extremes<kByValue>(range);
    const int num_sent = sent_of(num_own);
    const int lane = lane_of_thread();
#pragma unroll 1
    for (int rank = warp_of_thread(); rank < cluster_size(); rank += kRowWarps) {
      if (rank == cluster_rank()) continue;
#pragma unroll 1
      for (int c = lane * 4; c < num_sent; c += 128) {
        const uint4 keys = *reinterpret_cast<const uint4*>(own + c);
        shared_.lists.send(own + c, keys.x | uint64_t{keys.y} << 32,
                           keys.z | uint64_t{keys.w} << 32, rank);
      }
    }
    if (warp_of_thread() == 0) {
      uint32_t least = fits ? ~0U : shared_.least;
      uint32_t most = fits ? 0U : shared_.most;
#pragma unroll 1
      for (int c = lane; c < num_own && fits; c += 32) {
        least = min(least, own[c]);
        most = max(most, own[c]);
      }
      const uint64_t values[kValues] = {static_cast<uint64_t>(num_own),
                                        __reduce_max_sync(~0U, ~least),
                                        __reduce_max_sync(~0U, most), shared_.own_above};
      publish(values);
    }
    receive();
    if (warp_of_thread() == 0) {
      const bool is_other = lane < cluster_size() && lane != cluster_rank();
      const int keys = is_other ? sent_of(num_candidates_of(lane)) : 0;
      const auto bytes = __reduce_add_sync(~0U, static_cast<uint32_t>(keys)) * 4;
      if (lane == 0) shared_.lists.expect(bytes);
    }
    shared_.lists.wait(num_gathers_++ % 2);
    has_too_many_ = __reduce_max_sync(~0U, static_cast<uint32_t>(value_of_rank(0))) >
                    static_cast<uint32_t>(share);
    least_ = ~__reduce_max_sync(~0U, static_cast<uint32_t>(value_of_rank(1)));
    most_ = __reduce_max_sync(~0U, static_cast<uint32_t>(value_of_rank(2)));
  }

  template <bool kByValue>
  __device__ bool is_in_range(float x, const Range& range) const {
    if (kByValue) return x >= range.low && x <= range.high;
    const float position = position_of(x);
    return position >= range.low && position < range.high;
  }

  /// Leaves in shared_.least and shared_.most those of the part's elements in a range.
  template <bool kByValue>
  __device__ void find_extremes(const Range& range) {
    uint32_t least = ~0U;
    uint32_t most = 0;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < part_.count(); i += kRowThreads) {
      const float x = part_.at(i);
      if (!is_in_range<kByValue>(x, range)) continue;
      least = min(least, key_of(x));
      most = max(most, key_of(x));
    }
    share_extremes(least, most);
  }

  /// Sets shared_.least to the minimum of itself and all threads' `least`, and shared_.most to the
  /// maximum of itself and all threads' `most`. All threads of the CTA call
  /// it, and see both values when it returns.
  __device__ void share_extremes(uint32_t least, uint32_t most) {
    least = ~__reduce_max_sync(~0U, ~least);
    most = __reduce_max_sync(~0U, most);
    if (lane_of_thread() == 0) {
      atomicMin(&shared_.least, least);
      atomicMax(&shared_.most, most);
    }
    __syncthreads();
  }

  /// How many entries of its list a CTA sends: its candidates, and unused ones up to a multiple of
  /// 4, since a message has 16 bytes. None if they are more than its share.
  __device__ int sent_of(int num_candidates) const {
    return num_candidates <= share_of_rank() ? (num_candidates + 3) / 4 * 4 : 0;
  }

  /// Candidates that the lists have place for, of each CTA of the cluster.
  __device__ int share_of_rank() const {
    return kMaxCandidates >> (__ffs(cluster_size()) - 1);  // it is a power of two
  }

  /// Calls body(key) for the candidates of this thread, which are of all CTAs.
  template <class Body>
  __device__ void for_each_candidate(const Body& body) const {
    const int share = share_of_rank();
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < kMaxCandidates; c += kRowThreads) {
      const int rank = c * cluster_size() / kMaxCandidates;
      if (c - rank * share < num_candidates_of(rank)) {
        body(shared_.candidates[c]);
      }
    }
  }

  __device__ int num_candidates_of(int rank) const {
    return static_cast<int>(values_of(step_ - 1, rank)[0]);
  }

  /// Finds the threshold among the candidates. `above`: the count or mass above all of them;
  /// returns that above the threshold.
  template <bool kByWeight>
  __device__ uint64_t select(Cut* cut, uint64_t wanted, uint64_t above) {
    const Cut before = *cut;
    const uint32_t most = most_;
    const uint32_t least = least_;
    above = this->find_key(wanted, above, [&](const auto& add) {
      for_each_candidate(
          [&](uint32_t key) { add(key, this->template amount_of_key<kByWeight>(key, before)); });
    });
    cut->key = least_;
    cut->num_ties = 1;
    least_ = least;
    most_ = most;
    return above;
  }

  /// The sum of the weights of all CTAs' candidates that are above the cut.
  __device__ uint64_t mass_of_candidates(const Cut& cut) {
    uint64_t mass = 0;
    for_each_candidate([&](uint32_t key) { mass += this->template amount_of_key<true>(key, cut); });
    return this->sum_of_cta(mass);
  }

  bool has_candidates_ = false;      // and the masses above them of each CTA
  bool has_all_candidates_ = false;  // nothing that is kept is above them
  bool has_too_many_ = false;        // the lists do not have all
  uint32_t num_gathers_ = 0;
};

}  // namespace flashplan::cuda
