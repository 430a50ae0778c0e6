// SPDX-License-Identifier: Apache-2.0
// sample() with top-p alone, of a row that a cluster of CTAs reads once. The cluster draws tokens
// as if there were no filter, until top-p keeps one (see "Draws with top-p alone" in
// ops/sampling_math.h). Each CTA sums up the weights of its part of the row by bins of values while
// it reads the part. These sums bound the mass of the elements that come before a token, and so
// nearly always tell whether top-p keeps it. Where they do not, the cluster reads the row again and
// computes that mass exactly.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/plain_row.h"
#include "ops/cuda/sample/value_bins.h"

namespace flashplan::cuda {

constexpr int kBinsOfThread = (ValueBins::kBins - 1) / kRowThreads + 1;
/// A thread has kBinsOfThread bins, from its first one down. The first thread has the last bins.
__device__ inline int first_bin(int thread) {
  return ValueBins::kBins - 1 - thread * kBinsOfThread;
}

/// All threads of the CTA call it; a barrier is due.
__device__ inline void clear(uint32_t (&bins)[ValueBins::kBins]) {
#pragma unroll 1
  for (int b = static_cast<int>(threadIdx.x); b < ValueBins::kBins; b += kRowThreads) bins[b] = 0;
}

enum class Tried : uint8_t {
  kError,    // of the row or its parameters, which is written
  kKept,     // top-p keeps the token of a try
  kDropped,  // it drops all tries
};

constexpr int kTriesAtOnce = 4;

/// The shared memory of a CTA, at the same place in all CTAs of a cluster.
struct CountedShared {
  PlainShared plain;
  Mailbox bounds_mail[2];           // of the steps, in turn
  uint32_t bins[ValueBins::kBins];  // of the CTA's elements above the first bin
  float above[kRowThreads];         // the mass above the bins of each thread
  float warp_sums[kRowWarps];
  uint64_t listed[32];  // keys and ids of the elements of the last bin
  uint32_t num_listed;  // of them, also those that have found no place
  sampling::RandomPair randoms[sampling::kMostTries];
  uint64_t tokens[kTriesAtOnce];  // key, id
  uint32_t verdicts[kTriesAtOnce];
  alignas(16) uint64_t bounds[2][kTriesAtOnce][kMaxCluster][2];  // of tries and CTAs, of two steps
};

template <DType kDType>
class SampleCounted : PlainRow<kDType, false> {
  using Base = PlainRow<kDType, false>;

 public:
  __device__ SampleCounted(const SampleParams& p, int32_t row, CountedShared& shared)
      : Base(p, row, shared.plain), shared_(shared) {}

  /// Finds the token, or writes the error of the row or its parameters.
  __device__ Tried run() {
    read_row();
    const SampleError error = this->receive_entries();
    if (error != SampleError::kNone) {
      if (is_first_thread_of_cluster()) write_result(p_, row_, -1, NAN, error);
      return Tried::kError;
    }
    place_of_largest_ = bins_.place_of(scale_.largest);
    this->weigh_entries();
#pragma unroll 1
    for (int begin = 0; begin < kMostTries; begin += kTriesAtOnce) {
      judge(begin);
#pragma unroll 1
      for (int t = 0; t < kTriesAtOnce; ++t) {
        const uint32_t verdict = shared_.verdicts[t];
        token_ = shared_.tokens[t];
        if (verdict == kKept || (verdict == kUnknown && is_kept())) return Tried::kKept;
      }
      __syncthreads();  // verdicts and tokens have been read
    }
    return Tried::kDropped;
  }

  /// The token that is kept: its key and, in the low half, its id.
  __device__ uint64_t token() const { return token_; }
  __device__ const ValueBins& bins() const { return bins_; }
  __device__ float largest() const { return scale_.largest; }
  /// The mass of the row, in units of which its largest value weighs 2^30.
  __device__ uint64_t total() const { return total_; }
  /// The mass of what lies above the bins, in their units.
  __device__ uint64_t mass_of_listed() const { return sum_of_warp(mass_of_lane()); }

 private:
  using Base::elements_;
  using Base::end_block_;
  using Base::first_block_;
  using Base::is_greedy_;
  using Base::kBlock;
  using Base::kVec;
  using Base::p_;
  using Base::plain_;
  using Base::row_;
  using Base::scale_;
  using Base::total_;

  static constexpr int kMostTries = static_cast<int>(sampling::kMostTries);
  static_assert(kMostTries % kTriesAtOnce == 0 && kTriesAtOnce <= kMostChosen);
  static constexpr int kLastSummed = ValueBins::kBins - 2;  // elements of the last bin are listed
  static constexpr uint32_t kDropped = 0;
  static constexpr uint32_t kKept = 1;
  static constexpr uint32_t kUnknown = 2;

  /// Reads the CTA's part, and leaves the sums of its bins.
  __device__ void read_row() {
    if (threadIdx.x == 0) {
      for (Mailbox& mail : shared_.bounds_mail) mail.init();
      this->init_mail();
    }
    cluster_arrive_relaxed();
    this->start_reading();
    if (threadIdx.x < kMostTries) {
      shared_.randoms[threadIdx.x] = sampling::random_of_try(p_, row_, threadIdx.x);
    }
    choose_bins();
    cluster_wait();  // all CTAs have begun: their shared memory can be written to
    this->read(
        [&](const float (&x)[kVec]) {
#pragma unroll
          for (int e = 0; e < kVec; ++e) bins_.add_above_first(shared_.bins, x[e]);
        },
        [&](int block, float largest) {
          if (bins_.is_in_last(largest)) list_last(block);
        });
    __syncthreads();
    sum_bins();
  }

  /// Clears the bins while the first elements are being loaded. Then chooses the range of values of
  /// the bins from these elements.
  __device__ void choose_bins() {
    clear(shared_.bins);
    if (threadIdx.x == 0) shared_.num_listed = 0;
    float largest = this->largest_loaded();
    if (!elements_.has_words(0, kBlock)) {
      largest = elements_.at(min(static_cast<int>(threadIdx.x), p_.vocab - 1));
    }
    const float found = sampling::value_of(this->largest_of_cta(key_of(largest)));
    const float base = found > -INFINITY ? found : 0.0F;  // of a CTA that has no part, too
    bins_ = ValueBins::of_weights(base, is_greedy_ ? 1.0F : scale_.factor);
    place_of_base_ = bins_.place_of(base);
  }

  /// Lists those elements of a block that are in the last bin. One warp calls it.
  __device__ void list_last(int block) {
#pragma unroll 1
    for (int e = lane_of_thread(); e < kBlock; e += 32) {
      const int id = block * kBlock + e;
      if (id >= p_.vocab || !bins_.is_in_last(elements_.at(id))) continue;
      const uint32_t place = atomicAdd(&shared_.num_listed, 1U);
      if (place >= 32) continue;
      shared_.listed[place] = uint64_t{key_of(elements_.at(id))} << 32 | ~static_cast<uint32_t>(id);
    }
  }
  /// The listed element of this lane, or 0. An element that comes before another one, as it is
  /// larger or has a smaller id, is the larger number.
  __device__ uint64_t listed_of_lane() const {
    const auto lane = static_cast<uint32_t>(lane_of_thread());
    return lane < shared_.num_listed ? shared_.listed[lane] : 0;
  }
  __device__ uint64_t mass_of_lane() const {
    const uint64_t listed = listed_of_lane();
    if (listed == 0) return 0;
    const float value = sampling::value_of(static_cast<uint32_t>(listed >> 32));
    return static_cast<uint64_t>(bins_.mass_of_row(sampling::weight_of_logit(value, scale_)));
  }

  /// Stores in shared_.above, for each thread, the mass of all bins above those of the thread. It
  /// is relative to the base, since the row's largest value may be in another CTA's part and is not
  /// known yet. A barrier must come before it is read.
  __device__ void sum_bins() {
    const float below = bins_.unit_in(0.0F, 1.0F);  // of the next bin
    const int end = max(first_bin(static_cast<int>(threadIdx.x)) - kBinsOfThread, -1);
    const int first = min(first_bin(static_cast<int>(threadIdx.x)), kLastSummed);
    float unit = bins_.mass(1U, first, place_of_base_);
    float own = 0.0F;
#pragma unroll 2
    for (int b = first; b > end; --b) {
      own += static_cast<float>(shared_.bins[b]) * unit;
      unit *= below;
    }
    const int lane = lane_of_thread();
    const float to_lane = sum_to_lane<float>(own);
    const float before_lane = __shfl_up_sync(~0U, to_lane, 1);
    if (lane == 31) shared_.warp_sums[warp_of_thread()] = to_lane;
    __syncthreads();
    float above = lane > 0 ? before_lane : 0.0F;
#pragma unroll 1
    for (int w = 0; w < warp_of_thread(); ++w) above += shared_.warp_sums[w];
    shared_.above[threadIdx.x] = above;
  }
  __device__ uint64_t mass_of_bin(int bin) const {
    return static_cast<uint64_t>(bins_.mass(shared_.bins[bin], bin, place_of_largest_));
  }

  // --- Tries ---

  /// Draws the tokens of the next kTriesAtOnce tries and decides about each of them. Stores them in
  /// shared_.tokens and the decisions in shared_.verdicts. Each CTA draws all of these tokens
  /// itself, also from blocks that other CTAs have read, which saves an exchange between the CTAs.
  __device__ void judge(int begin) {
    const int warp = warp_of_thread();
    expect(kTriesAtOnce);
#pragma unroll 1
    for (int t = 0; t < kTriesAtOnce; ++t) this->choose(t, shared_.randoms[begin + t]);
    __syncthreads();
    if (warp < kTriesAtOnce) send(warp, bounds_of(draw(warp)));
    receive();
    if (warp < kTriesAtOnce) {
      const uint32_t verdict = verdict_of(received(warp));
      if (lane_of_thread() == 0) shared_.verdicts[warp] = verdict;
    }
    __syncthreads();
  }

  /// Draws the token of a try whose block is chosen. One warp calls it.
  __device__ uint64_t draw(int index) {
    uint64_t& token = shared_.tokens[index];
    this->draw_from(plain_.chosen[index],
                    [&](int32_t id, uint32_t /*weight*/, const WeighedBlock& /*block*/) {
                      token = uint64_t{key_of(elements_.at(id))} << 32 | static_cast<uint32_t>(id);
                    });
    __syncwarp();
    return token;
  }

  /// Bounds of the mass of the elements that come before a token; or that mass and the row's.
  struct Bounds {
    uint64_t least, most;
  };
  static __device__ uint32_t bytes_of_bounds() {
    return static_cast<uint32_t>(cluster_size()) * sizeof(uint64_t[2]);
  }

  // In a step each CTA sends two values for each token to all CTAs, itself among them. There are
  // two mailboxes and two arrays: one for even steps, one for odd ones. A CTA begins to send only
  // when all of its threads have read what the step before brought, and a step ends only when all
  // CTAs have sent. So when an array is written again, two steps later, nobody still reads it.

  __device__ Mailbox& mail() { return shared_.bounds_mail[step_ % 2]; }
  /// Says that each CTA sends the values of `num_tokens` tokens in this step. At least warp 0 calls
  /// it.
  __device__ void expect(int num_tokens) {
    if (threadIdx.x == 0) mail().expect(static_cast<uint32_t>(num_tokens) * bytes_of_bounds());
  }
  /// Sends two values to each CTA of the cluster. One warp calls it.
  __device__ void send(int token, const Bounds& values) {
    const int rank = lane_of_thread();
    uint64_t (&to)[2] = shared_.bounds[step_ % 2][token][cluster_rank()];
    if (rank < cluster_size()) mail().send(to, values.least, values.most, rank);
  }
  /// Waits for the values of all CTAs, and ends the step. All threads call it.
  __device__ void receive() {
    mail().wait(step_ / 2 % 2);
    ++step_;
  }
  /// The sums, over the CTAs, of what they have sent for a token in the step that has ended.
  __device__ Bounds received(int token) const {
    const int rank = lane_of_thread();
    const uint64_t (&of_ranks)[kMaxCluster][2] = shared_.bounds[(step_ - 1) % 2][token];
    const bool is_rank = rank < cluster_size();
    return {sum_of_warp(is_rank ? of_ranks[rank][0] : 0),
            sum_of_warp(is_rank ? of_ranks[rank][1] : 0)};
  }

  /// Bounds of the mass of those elements of the CTA's part that come before a token, as they are
  /// larger, or equal with a smaller id. One warp calls it.
  __device__ Bounds bounds_of(uint64_t token) const {
    const float value = sampling::value_of(static_cast<uint32_t>(token >> 32));
    const int bin = bins_.bin_of(value);
    // Of the listed elements, which are above all bins, it is known which come before.
    const bool is_listed = bin == ValueBins::kBins - 1;
    const uint64_t order = token ^ 0xffffffffU;
    Bounds bounds;
    bounds.least = sum_of_warp(!is_listed || listed_of_lane() > order ? mass_of_lane() : 0);
    bounds.most = bounds.least;
    if (!is_listed) {
      const int thread = (ValueBins::kBins - 1 - bin) / kBinsOfThread;
      const int own = min(first_bin(thread), kLastSummed) - lane_of_thread();
      const float from_base = bins_.unit_in(place_of_base_, place_of_largest_);
      bounds.least += static_cast<uint64_t>(shared_.above[thread] * from_base);
      bounds.least += sum_of_warp(own > bin ? mass_of_bin(own) : 0);
      // The token is in its bin, too, but does not come before itself.
      const auto block = static_cast<int>(static_cast<uint32_t>(token)) / kBlock;
      const bool is_own = block >= first_block_ && block < end_block_ && bin != 0;
      const uint32_t others = shared_.bins[bin] - (is_own ? bins_.amount_of(value) : 0U);
      bounds.most =
          bounds.least + static_cast<uint64_t>(bins_.mass(others, bin, place_of_largest_));
      if (bin == 0) bounds.most = uint64_t{1} << 53;  // its elements are not summed
    }
    const bool has_places =
        ValueBins::is_place(place_of_base_) && ValueBins::is_place(place_of_largest_);
    if (has_places && shared_.num_listed <= 32) return bounds;
    return {0, uint64_t{1} << 53};
  }

  /// Whether top-p keeps a token, as far as the bounds tell. Top-p keeps it if the mass of the
  /// elements before it is less than top_p times the mass of the row.
  __device__ uint32_t verdict_of(const Bounds& before) const {
    if (is_greedy_) return kKept;  // nothing comes before the largest element
    // The weights that decide are rounded to 1 / kOne of the largest one.
    const double rounding = bins_.mass_of_row(static_cast<uint64_t>(p_.vocab) / 2 + 2);
    const double error = ValueBins::kError;
    const double all = bins_.mass_of_row(total_);
    const double top_p = p_.top_p.of(row_);
    if (static_cast<double>(before.most) * (1 + error) + rounding <
        top_p * (all * (1 - error) - rounding)) {
      return kKept;
    }
    if (static_cast<double>(before.least) * (1 - error) - rounding >
        top_p * (all * (1 + error) + rounding)) {
      return kDropped;
    }
    return kUnknown;
  }

  /// Whether top-p keeps token_, from exact weights: the cluster reads the row again. All threads
  /// of the cluster call it.
  __device__ bool is_kept() {
    const auto key = static_cast<uint32_t>(token_ >> 32);
    const auto id = static_cast<int>(static_cast<uint32_t>(token_));
    const float value = sampling::value_of(key);
    const float above = sampling::value_of(key + 1);  // the next larger value
    uint64_t before = 0;
    uint64_t all = 0;
    this->read_again([&](const float (&x)[kVec], int i) {
      const float least = i + kVec <= id ? value : above;
#pragma unroll
      for (int e = 0; e < kVec; e += 2) {
        const uint32_t first = sampling::weight_of_logit(x[e], scale_);
        const uint32_t second = sampling::weight_of_logit(x[e + 1], scale_);
        all += first + second;
        before += (x[e] >= least ? first : 0U) + (x[e + 1] >= least ? second : 0U);
      }
    });
    if (is_first_thread_of_cluster()) {
      // Equal elements before the token in its own word.
      for (int i = id / kVec * kVec; i < id; ++i) {
        if (elements_.at(i) == value) before += sampling::weight_of_logit(value, scale_);
      }
    }
    before = sum_of_warp(before);
    all = sum_of_warp(all);
    const int lane = lane_of_thread();
    if (lane == 0) {
      plain_.warp_values[warp_of_thread()][0] = before;
      plain_.warp_values[warp_of_thread()][1] = all;
    }
    __syncthreads();
    if (warp_of_thread() == 0) {
      const bool is_warp = lane < kRowWarps;
      expect(1);
      send(0, {sum_of_warp(is_warp ? plain_.warp_values[lane][0] : 0),
               sum_of_warp(is_warp ? plain_.warp_values[lane][1] : 0)});
    }
    receive();
    const Bounds sum = received(0);
    return sum.least < sampling::part_of(p_.top_p.of(row_), sum.most);
  }

  CountedShared& shared_;
  ValueBins bins_;
  float place_of_base_ = 0.0F;
  float place_of_largest_ = 0.0F;
  uint64_t token_ = 0;
  unsigned step_ = 0;  // of the exchange of bounds
};

/// Whether SampleCounted can draw from rows of this length.
__device__ __host__ inline bool is_countable(const SampleParams& p) {
  return p.vocab <= kMostEntries * sampling::kBlock && p.vocab <= ValueBins::kMostElements;
}

/// What SampleCounted has found.
struct TriedRow {
  Tried tried;
  uint64_t token;  // this and the next ones: see SampleCounted
  ValueBins bins;
  float largest;
  uint64_t total;
  uint64_t mass_of_listed;
};
/// A function of its own, as draw_plain().
template <DType kDType>
__device__ __noinline__ TriedRow draw_by_tries(const SampleParams& p, int32_t row,
                                               CountedShared& shared) {
  SampleCounted<kDType> sample(p, row, shared);
  const Tried tried = sample.run();
  return {tried,          sample.token(),         sample.bins(), sample.largest(),
          sample.total(), sample.mass_of_listed()};
}

}  // namespace flashplan::cuda
