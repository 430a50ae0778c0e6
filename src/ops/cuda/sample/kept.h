// SPDX-License-Identifier: Apache-2.0
// What top-p or top-k keeps of a row that one CTA reads, exactly. The bins of SampleCounted tell in
// which narrow range of values the threshold is. The CTA reads the row a second time: it adds up
// the weights above the range by blocks, and lists the elements in it. The threshold is then found
// in the list.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/counted.h"

namespace flashplan::cuda {

using Mass = unsigned long long;  // as atomicAdd() takes it

/// All threads of the CTA go through all calls together.
template <DType kDType, bool kFromProbs>
class KeptOfRow {
  using Values = ValueBins<kFromProbs>;

 public:
  /// `counted`: find_threshold() reads all of it, keep_all() only the scale. The list overwrites
  /// the bins in `shared`.
  __device__ KeptOfRow(const SampleParams& p, int32_t row, const CountedRow<kFromProbs>& counted,
                       CountedShared& shared, SampleShared& common)
      : p_(p),
        row_(row),
        counted_(counted),
        shared_(shared),
        common_(common),
        by_count_(p.top_k.of(row) < p.vocab),
        elements_({p.logits, p.row_stride, p.bias, p.bias_stride}, p.logits_row(row), p.vocab,
                  kFromProbs ? 0.0F : -INFINITY) {}

  /// Finds the threshold of top-k or top-p, one of which is given. Returns false if it is not in
  /// the range that the bins tell, or if the list has no room for all elements of the range.
  __device__ bool find_threshold() {
    if (!Values::is_place(counted_.bins.place_of(counted_.scale.largest))) return false;
    const Range range = find_range();
    read(range);
    // If all are equal and the token is known, the list is not needed.
    if (num_listed() > kMostListed && (keys_.least != keys_.most || counted_.token == 0)) {
      return false;
    }
    return find_cut();
  }
  /// Keeps all elements of at least this weight.
  __device__ void keep_all(uint32_t min_weight) {
    cut_ = sampling::keep_all(min_weight);
    read({-INFINITY, -INFINITY});
  }

  /// Writes the token, which is drawn if SampleCounted has drawn none.
  __device__ void write_token() {
    if (counted_.token == 0) {
      draw();
      return;
    }
    const float value = sampling::value_of(static_cast<uint32_t>(counted_.token >> 32));
    if (threadIdx.x == 0) write(static_cast<uint32_t>(counted_.token), weight_of(value));
  }

 private:
  using Part = RowPart<kDType, false>;
  static constexpr int kVec = Part::kVec;
  static constexpr int kBlock = Part::kBlock;
  static_assert(kBlock >= sampling::kBlock, "so that blocks have places in the entries");
  static constexpr int kMostListed = kValueBins / 2;

  // --- The range of the threshold ---

  /// The range of values that contains the threshold, as far as sums of bins tell.
  __device__ Range find_range() {
    const float place_of_largest = counted_.bins.place_of(counted_.scale.largest);
    const int first = first_bin(static_cast<int>(threadIdx.x));
    const auto amount_of = [&](int b) {
      // The last bin is not summed: its logits are listed, and of probabilities it has only -0.
      if (b < 0 || b == kValueBins - 1) return uint64_t{0};
      if (by_count_) return uint64_t{Values::count_in(shared_.bins[b], b)};
      return static_cast<uint64_t>(Values::mass(shared_.bins[b], b, place_of_largest));
    };
    uint64_t own = 0;
#pragma unroll 1
    for (int b = first; b > first - kBinsOfThread; --b) own += amount_of(b);
    if (threadIdx.x == 0) common_.selected[0] = common_.selected[1] = 0;
    const SumsOfCta sums = sums_of_cta(own, common_.warp_values);
    const uint64_t above_bins = by_count_ ? shared_.num_listed : counted_.listed_mass;
    const auto begin = static_cast<double>(above_bins + sums.before);
    const auto end = static_cast<double>(above_bins + sums.before + own);
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      const double wanted = wanted_of(side == 0 ? -1.0 : 1.0);
      if (threadIdx.x == 0 && wanted <= begin) common_.selected[side] = kValueBins - 1;
      if (wanted <= begin || wanted > end) continue;
      double reached = begin + static_cast<double>(amount_of(first));
      int b = first;
      while (reached < wanted) reached += static_cast<double>(amount_of(--b));
      common_.selected[side] = static_cast<uint32_t>(b);
    }
    __syncthreads();
    const auto high = static_cast<int>(common_.selected[0]);
    const auto low = static_cast<int>(common_.selected[1]);
    __syncthreads();  // the list overwrites the bins
    return {low == 0 ? -INFINITY : counted_.bins.value_of(static_cast<float>(low) - 0.1F),
            high == kValueBins - 1 ? INFINITY
                                   : counted_.bins.value_of(static_cast<float>(high) + 1.1F)};
  }
  /// The sum of bins that the filter wants, plus or minus the largest error of that sum.
  __device__ double wanted_of(double sign_of_error) const {
    if (by_count_) return p_.top_k.of(row_) * (1.0 + sign_of_error * 1e-3);
    const double wanted = p_.top_p.of(row_) * Values::mass_of_row(counted_.total);
    const double rounding = rounding_of_row<kFromProbs>(p_.vocab, counted_.scale.largest);
    return wanted + sign_of_error * (2.0 * Values::kError * wanted + rounding);
  }

  // --- The second reading ---

  __device__ uint32_t weight_of(float x) const {
    const uint32_t weight = kFromProbs ? sampling::weight_of_probability(x, counted_.scale)
                                       : sampling::weight_of_logit(x, counted_.scale);
    return weight >= cut_.min_weight ? weight : 0U;
  }

  __device__ int num_blocks() const { return (p_.vocab - 1) / kBlock + 1; }
  __device__ void read(const Range& range) {
    if (threadIdx.x == 0) {
      common_.num_candidates = 0;
      common_.least = ~0U;
      common_.most = 0;
    }
    __syncthreads();
    uint64_t all = 0;
    uint64_t above = 0;     // the range
    uint64_t of_block = 0;  // of `above`
    uint32_t num_above = 0;
    KeyRange keys{~0U, 0U};
    // The end of the row was read last, so that L2 may still have it.
#pragma unroll 1
    for (int block = num_blocks() - 1 - warp_of_thread(); block >= 0; block -= kRowWarps) {
      elements_.read_block(block, [&](const float (&x)[kVec], int i) {
        bool any_in = false;
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const uint32_t weight = weight_of(x[e]);
          const bool is_above = x[e] >= range.high;
          all += weight;
          of_block += is_above ? weight : 0U;
          num_above += is_above ? 1U : 0U;
          any_in = any_in || (!is_above && x[e] >= range.low);
        }
        if (__ballot_sync(~0U, any_in) != 0) list(x, i, range, keys);
      });
      const uint64_t sum = sum_of_warp(of_block);
      if (lane_of_thread() == 0) shared_.plain.entries[block] = sum;
      above += of_block;
      of_block = 0;
    }
    keys.least = ~__reduce_max_sync(~0U, ~keys.least);
    keys.most = __reduce_max_sync(~0U, keys.most);
    if (lane_of_thread() == 0) {
      atomicMin(&common_.least, keys.least);
      atomicMax(&common_.most, keys.most);
    }
    all_ = sum_of_cta(all);
    above_ = sum_of_cta(above);
    num_above_ = sum_of_cta(num_above);
    keys_ = {common_.least, common_.most};
  }
  /// Lists those elements that are in a range. All threads of the warp call it.
  __device__ void list(const float (&x)[kVec], int i, const Range& range, KeyRange& keys) {
    const unsigned before = (1U << lane_of_thread()) - 1;
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const bool is_in = x[e] >= range.low && !(x[e] >= range.high) && i + e < p_.vocab;
      const unsigned lanes = __ballot_sync(~0U, is_in);
      if (lanes == 0) continue;
      uint32_t place = 0;
      if (lane_of_thread() == 0) {
        place = atomicAdd(&common_.num_candidates, static_cast<uint32_t>(__popc(lanes)));
      }
      place = __shfl_sync(~0U, place, 0) + static_cast<uint32_t>(__popc(lanes & before));
      if (!is_in) continue;
      const uint32_t key = key_of(x[e]);
      keys = {min(keys.least, key), max(keys.most, key)};
      if (place < kMostListed) listed()[place] = uint64_t{key} << 32 | static_cast<uint32_t>(i + e);
    }
  }
  /// Keys and ids.
  __device__ uint64_t* listed() const { return reinterpret_cast<uint64_t*>(shared_.bins); }
  __device__ int num_listed() const { return static_cast<int>(common_.num_candidates); }
  /// Calls body(key, id) for the listed elements of this thread.
  template <class Body>
  __device__ void for_each(const Body& body) const {
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < min(num_listed(), kMostListed);
         c += kRowThreads) {
      body(static_cast<uint32_t>(listed()[c] >> 32), static_cast<uint32_t>(listed()[c]));
    }
  }

  __device__ uint64_t sum_of_cta(uint64_t value) {
    const uint64_t sum = sums_of_cta(value, common_.warp_values).all;
    __syncthreads();  // all have read the sums of warps
    return sum;
  }

  // --- The cut ---

  /// Finds the cut in the list, and the mass that it keeps. Returns false if it is not there.
  __device__ bool find_cut() {
    const auto amount_of = [&](uint32_t key) {
      return by_count_ ? 1U : weight_of(sampling::value_of(key));
    };
    const uint64_t wanted = by_count_ ? static_cast<uint64_t>(p_.top_k.of(row_))
                                      : sampling::part_of(p_.top_p.of(row_), all_);
    uint64_t above = by_count_ ? num_above_ : above_;
    uint64_t amount = 0;
    for_each([&](uint32_t key, uint32_t /*id*/) { amount += amount_of(key); });
    amount = sum_of_cta(amount);
    if (num_listed() > kMostListed) {
      amount = uint64_t{amount_of(keys_.least)} * common_.num_candidates;
    }
    if (above >= wanted || above + amount < wanted) return false;
    while (keys_.least != keys_.most) {
      above = keys_.narrow(common_.bins, shared_.groups, common_.found, wanted, above,
                           [&](const auto& add) {
                             for_each([&](uint32_t key, uint32_t) { add(key, amount_of(key)); });
                           });
    }
    cut_.key = keys_.least;
    tie_ = weight_of(sampling::value_of(cut_.key));
    cut_.num_ties = by_count_ ? static_cast<uint32_t>(wanted - above)
                              : sampling::ties_to_reach(wanted, above, tie_);
    uint64_t mass = 0;
    for_each([&](uint32_t key, uint32_t /*id*/) {
      if (key > cut_.key) mass += weight_of(sampling::value_of(key));
    });
    above_ += sum_of_cta(mass) + uint64_t{cut_.num_ties} * tie_;
    return true;
  }

  // --- The draw ---

  /// Leaves in last_tie_ the id of the last tie that is kept.
  __device__ void find_last_tie() {
    const auto last = static_cast<uint32_t>(p_.vocab - 1);
    uint64_t num_ties = 0;
    for_each([&](uint32_t key, uint32_t /*id*/) { num_ties += key == cut_.key ? 1U : 0U; });
    if (sum_of_cta(num_ties) <= cut_.num_ties) return;
    KeyRange ids{0, last};  // from the end
    uint64_t above = 0;
    while (ids.least != ids.most) {
      above = ids.narrow(
          common_.bins, shared_.groups, common_.found, cut_.num_ties, above, [&](const auto& add) {
            for_each([&](uint32_t key, uint32_t id) { add(last - id, key == cut_.key ? 1U : 0U); });
          });
    }
    last_tie_ = last - ids.least;
  }
  __device__ uint32_t kept_weight(uint32_t key, uint32_t id) const {
    if (key == cut_.key) return id <= last_tie_ ? tie_ : 0U;
    return key > cut_.key ? weight_of(sampling::value_of(key)) : 0U;
  }

  /// Draws a token in the order of ids and writes it.
  __device__ void draw() {
    uint64_t* masses = shared_.plain.entries;
    if (cut_.num_ties != 0) find_last_tie();
    if (cut_.key != 0) {
      for_each([&](uint32_t key, uint32_t id) {
        atomicAdd(reinterpret_cast<Mass*>(&masses[id / kBlock]), Mass{kept_weight(key, id)});
      });
    }
    __syncthreads();
    if (warp_of_thread() != 0) return;
    uint64_t target = sampling::high_product(counted_.random, above_);
    const int block = find_block(masses, num_blocks(), &target);
    bool is_found = false;
    elements_.read_block(block, [&](const float (&x)[kVec], int i) {
      uint32_t weights[kVec];
      uint64_t own = 0;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        weights[e] = kept_weight(key_of(x[e]), static_cast<uint32_t>(i + e));
        own += weights[e];
      }
      const uint64_t passed = sum_to_lane(own);
      uint64_t before = passed - own;
      const uint64_t sum = __shfl_sync(~0U, passed, 31);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const bool is_token = !is_found && before <= target && target < before + weights[e];
        if (is_token) write(static_cast<uint32_t>(i + e), weights[e]);
        before += weights[e];
      }
      is_found = is_found || target < sum;
      target -= is_found ? 0 : sum;
    });
  }
  /// The first block at which the masses pass *target, from which those before are taken. One warp.
  static __device__ int find_block(const uint64_t* masses, int num_blocks, uint64_t* target) {
    int block = 0;
#pragma unroll 1
    for (; block + 32 < num_blocks; block += 32) {
      const uint64_t sum = sum_of_warp(masses[block + lane_of_thread()]);
      if (*target < sum) break;
      *target -= sum;
    }
    const int own = block + lane_of_thread();
    const BinOfLanes found = find_lane(own < num_blocks ? masses[own] : 0, 0, *target + 1);
    *target -= found.above;
    return block + found.lane;
  }

  __device__ void write(uint32_t id, uint32_t weight) const {
    float logprob = 0.0F;
    if (p_.logprobs != nullptr) {
      logprob = log_of_ratio(static_cast<double>(weight), static_cast<double>(above_));
    }
    write_result(p_, row_, static_cast<int32_t>(id), logprob, SampleError::kNone);
  }

  const SampleParams& p_;
  int32_t row_;
  const CountedRow<kFromProbs>& counted_;
  CountedShared& shared_;
  SampleShared& common_;
  bool by_count_;
  RowPart<kDType, false> elements_;  // of the row
  Cut cut_{};
  uint32_t tie_ = 0;         // the weight of an element at the cut
  uint32_t last_tie_ = ~0U;  // id
  KeyRange keys_{};          // of the listed elements; after find_cut(), of the threshold
  uint64_t all_ = 0;         // the mass of the row
  uint64_t above_ = 0;       // the mass above the range; after find_cut(), of all that is kept
  uint64_t num_above_ = 0;   // elements above the range
};

/// A function of its own, so that the registers it needs do not make other loops over rows spill.
template <DType kDType, bool kFromProbs>
__device__ __noinline__ bool draw_kept(const SampleParams& p, int32_t row,
                                       const CountedRow<kFromProbs>& counted, CountedShared& shared,
                                       SampleShared& common) {
  KeptOfRow<kDType, kFromProbs> kept(p, row, counted, shared, common);
  if (!kept.find_threshold()) return false;
  kept.write_token();
  return true;
}

/// Draws from a row with top-p or top-k alone, or without filters, and writes the token or an
/// error. Returns false if nothing is written, because of a threshold that one CTA cannot find in
/// this way, or that several CTAs would have to find.
template <DType kDType, bool kFromProbs>
__device__ __forceinline__ bool draw_counted(const SampleParams& p, int32_t row,
                                             CountedShared& shared, SampleShared& common) {
  const CountedRow<kFromProbs> counted = SampleCounted<kDType, kFromProbs>(p, row, shared).run();
  if (counted.is_done) return true;
  return cluster_size() == 1 && draw_kept<kDType>(p, row, counted, shared, common);
}

}  // namespace flashplan::cuda
