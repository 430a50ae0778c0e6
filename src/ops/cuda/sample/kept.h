// SPDX-License-Identifier: Apache-2.0
// What top-p or top-k keeps of a row that one CTA reads. The bins of SampleCounted tell in which
// narrow range of values the threshold is. The CTA reads the row a second time: it adds up the
// weights above the range by blocks, and lists the elements in it. The threshold is then found in
// the list. Where the range has more elements than the list, the CTA reads the row again to divide
// the range. Where only the mass of what top-p keeps is wanted, and the weight of one element at
// the threshold is next to nothing of it, the row is not read a second time.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ops/cuda/sample/threshold_range.h"

namespace flashplan::cuda {

using Mass = unsigned long long;  // the type that atomicAdd() takes

/// All threads of the CTA call each function together.
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

  /// Finds the threshold of top-k or top-p, one of which is given, or only the mass that top-p
  /// keeps if that is all that write_token() needs.
  __device__ void find_threshold() {
    Range range = everything();
    if (are_bins_usable()) {
      range = range_of_threshold(p_, row_, counted_, shared_, common_);
      if (estimate_mass(range)) return;
      if (by_count_ && range.low == -INFINITY) {  // very many elements are below the bins
        keys_ = {key_of(-INFINITY), key_of(range.high) - 1};
        range = divide();
      }
    }
#pragma unroll 1
    for (;;) {
      read(range);
      const bool are_all_listed = num_listed() <= kMostListed;
      const uint64_t amount = are_all_listed ? read_listed() : find_keys(range);
      if (!are_all_listed && keys_.least != keys_.most) {
        range = divide();
        continue;
      }
      const uint64_t above = amount_above();
      if (above < wanted_amount() && wanted_amount() <= above + amount) break;
      range = everything();
    }
    find_cut();
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
  /// A bit for each element that a thread has of a block.
  using Bits = std::conditional_t<Part::kUnroll * kVec <= 32, uint32_t, uint64_t>;

  // --- The range of the threshold ---

  static __device__ Range everything() { return {-INFINITY, INFINITY}; }
  __device__ bool are_bins_usable() const {
    const bool has_all = cluster_size() == 1 && shared_.num_listed <= kMostAboveBins;
    return has_all && Values::is_place(counted_.bins.place_of(counted_.scale.largest));
  }

  /// Estimates the mass that top-p keeps, if only this is needed. The mass is more than top_p times
  /// the row's mass by less than one element. Returns false if an element at the threshold may
  /// weigh more than 2^-18 of the mass; below the bins none does. Half an element is added, so the
  /// mass is off by at most 2^-19 of itself, and by what the rounding of small weights adds.
  __device__ bool estimate_mass(const Range& range) {
    if (by_count_ || counted_.token == 0 || !(range.high < INFINITY)) return false;
    const double of_row = static_cast<double>(counted_.total) /
                          (kFromProbs ? static_cast<double>(counted_.scale.largest) : 1.0);
    const double wanted = static_cast<double>(p_.top_p.of(row_)) * of_row;
    const double of_one = weight_of(range.high);  // the weight of an element, at most
    if (of_one * 0x1p18 > wanted) return false;
    above_ = static_cast<uint64_t>(wanted + of_one / 2);
    return true;
  }

  // --- The second reading ---

  __device__ uint32_t weight_of(float x) const {
    const uint32_t weight = kFromProbs ? sampling::weight_of_probability(x, counted_.scale)
                                       : sampling::weight_of_logit(x, counted_.scale);
    return weight >= cut_.min_weight ? weight : 0U;
  }

  __device__ int num_blocks() const { return (p_.vocab - 1) / kBlock + 1; }
  /// Sums up the row and what is above the range, and lists the ids of the elements in the range.
  __device__ void read(const Range& range) {
    __syncthreads();  // all have read the list and how long it is
    if (threadIdx.x == 0) common_.num_candidates = 0;
    __syncthreads();
    uint64_t all = 0;
    uint64_t above = 0;  // the mass above the range
    uint32_t num_above = 0;
    // Blocks are read from the end of the row on: it was read last, so L2 may still have it.
#pragma unroll 1
    for (int block = num_blocks() - 1 - warp_of_thread(); block >= 0; block -= kRowWarps) {
      const int first = block * kBlock + lane_of_thread() * kVec;
      uint64_t of_block = 0;  // what the block adds to `above`
      Bits are_above = 0;
      Bits in_range = 0;
      elements_.read_block(block, [&](const float (&x)[kVec], int i) {
        const int place = (i - first) / 32;  // of x[0], among the thread's elements
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const uint32_t weight = weight_of(x[e]);
          const bool is_above = x[e] >= range.high;
          all += weight;
          of_block += is_above ? weight : 0U;
          const Bits bit = Bits{1} << (place + e);
          are_above |= is_above ? bit : Bits{0};
          in_range |= !is_above && x[e] >= range.low ? bit : Bits{0};
        }
      });
      const uint64_t sum = sum_of_warp(of_block);
      if (lane_of_thread() == 0) shared_.plain.entries[block] = sum;
      above += of_block;
      num_above += num_bits(are_above);
      list(first, in_range);
    }
    all_ = sum_of_cta(all);
    above_ = sum_of_cta(above);
    num_above_ = sum_of_cta(num_above);
  }
  /// Lists those of the thread's elements of a block whose bits are set. Once the row has more than
  /// kMostListed, it lists no more: callers then use only that num_listed() exceeds the limit.
  __device__ void list(int first, Bits elements) {
    if (num_listed() > kMostListed) return;
#pragma unroll 1
    for (; elements != 0; elements &= elements - 1) {
      const int place = first_bit(elements);
      const int id = first + place / kVec * 32 * kVec + place % kVec;
      if (id >= p_.vocab) return;
      const uint32_t number = atomicAdd(&common_.num_candidates, 1U);
      if (number < kMostListed) listed()[number] = static_cast<uint32_t>(id);
    }
  }
  static __device__ int first_bit(Bits bits) {
    return sizeof(Bits) == 8 ? __ffsll(static_cast<long long>(bits)) - 1
                             : __ffs(static_cast<int>(bits)) - 1;
  }
  static __device__ uint32_t num_bits(Bits bits) {
    return static_cast<uint32_t>(sizeof(Bits) == 8 ? __popcll(bits)
                                                   : __popc(static_cast<uint32_t>(bits)));
  }
  /// Reads the listed elements, whose ids are known, and adds their keys to the list. Returns the
  /// sum of amount_of() over them.
  __device__ uint64_t read_listed() {
    KeyRange keys = KeyRange::empty();
    uint64_t amount = 0;
    for_each([&](uint64_t& element) {
      const float x = elements_.at(static_cast<int>(id_in(element)));
      const uint32_t key = key_of(x);
      keys.include(key);
      amount += amount_of(x);
      element |= uint64_t{key} << 32;
    });
    find_keys_of_all(keys);
    return sum_of_cta(amount);
  }
  /// Sets keys_ to the smallest and the largest of all threads' keys.
  __device__ void find_keys_of_all(const KeyRange& own) {
    if (threadIdx.x == 0) common_.keys = KeyRange::empty();
    __syncthreads();
    share_keys(common_, own);
    keys_ = common_.keys;
  }

  /// The list: each element has the key in the high half and the id in the low one.
  __device__ uint64_t* listed() const { return reinterpret_cast<uint64_t*>(shared_.bins); }
  /// The number of listed elements, or more than kMostListed if the list has no room for all. Other
  /// threads change it while they list elements.
  __device__ int num_listed() const {
    return static_cast<int>(*static_cast<volatile uint32_t*>(&common_.num_candidates));
  }
  /// Calls body(element) for the listed elements of this thread.
  template <class Body>
  __device__ void for_each(const Body& body) const {
    const int num = min(num_listed(), kMostListed);
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < num; c += kRowThreads) body(listed()[c]);
  }
  static __device__ uint32_t key_in(uint64_t element) {
    return static_cast<uint32_t>(element >> 32);
  }
  static __device__ uint32_t id_in(uint64_t element) { return static_cast<uint32_t>(element); }

  __device__ uint64_t sum_of_cta(uint64_t value) const {
    return cuda::sum_of_cta(value, common_.warp_values);
  }
  __device__ KeySearch search() const { return {common_.bins, shared_.groups, common_.found}; }

  // --- A range with more elements than the list ---

  /// Calls body(x) for the thread's elements of the row.
  template <class Body>
  __device__ void for_each_of_row(const Body& body) const {
#pragma unroll 1
    for (int block = warp_of_thread(); block < num_blocks(); block += kRowWarps) {
      elements_.read_block(block, [&](const float (&x)[kVec], int i) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          if (i + e < p_.vocab) body(x[e]);
        }
      });
    }
  }
  /// Finds the smallest and the largest key of the elements in the range. Returns the sum of
  /// amount_of() over these elements, which is right only if all of them are equal.
  __device__ uint64_t find_keys(const Range& range) {
    float least = INFINITY;
    float most = -INFINITY;
    uint32_t num = 0;
    for_each_of_row([&](float x) {
      if (!(x >= range.low) || x >= range.high) return;
      least = fminf(least, x);
      most = fmaxf(most, x);
      ++num;
    });
    find_keys_of_all({key_of(least), key_of(most)});
    return sum_of_cta(num) * amount_of_key(keys_.least);
  }
  /// Narrows keys_ to fewer keys, among them that of the threshold. Returns the range of the values
  /// that have these keys.
  __device__ Range divide() {
    if (by_count_) {
      keys_ = divide_by_counts(elements_, keys_, wanted_amount(), shared_, common_);
    } else {
      keys_.narrow(search(), wanted_amount(), above_, [&](const auto& add) {
        for_each_of_row([&](float x) {
          const uint32_t weight = weight_of(x);
          if (weight != 0) add(key_of(x), weight);
        });
      });
    }
    return {sampling::value_of(keys_.least), sampling::value_of(keys_.most + 1)};
  }

  // --- The cut ---

  /// What an element counts for the filter: 1 for top-k, its weight for top-p.
  __device__ uint32_t amount_of(float x) const { return by_count_ ? 1U : weight_of(x); }
  __device__ uint32_t amount_of_key(uint32_t key) const {
    return amount_of(sampling::value_of(key));
  }
  __device__ uint64_t amount_above() const { return by_count_ ? num_above_ : above_; }
  __device__ uint64_t wanted_amount() const {
    return by_count_ ? static_cast<uint64_t>(p_.top_k.of(row_))
                     : sampling::part_of(p_.top_p.of(row_), all_);
  }

  /// Finds the cut: one of the listed elements or, if the list has no room for all elements of the
  /// range, the one key that all these elements have. Also finds the mass that the cut keeps.
  __device__ void find_cut() {
    const uint64_t wanted = wanted_amount();
    const uint64_t above =
        keys_.narrow_to_one(search(), wanted, amount_above(), [&](const auto& add) {
          for_each([&](uint64_t element) { add(key_in(element), amount_of_key(key_in(element))); });
        });
    cut_.key = keys_.least;
    tie_ = weight_of(sampling::value_of(cut_.key));
    cut_.num_ties = by_count_ ? static_cast<uint32_t>(wanted - above)
                              : sampling::ties_to_reach(wanted, above, tie_);
    uint64_t mass = 0;
    if (num_listed() <= kMostListed) {
      for_each([&](uint64_t element) {
        const uint32_t key = key_in(element);
        if (key > cut_.key) mass += weight_of(sampling::value_of(key));
      });
    }
    above_ += sum_of_cta(mass) + uint64_t{cut_.num_ties} * tie_;
  }

  // --- The draw ---

  /// Calls body(id) for the thread's elements that are equal to the cut.
  template <class Body>
  __device__ void for_each_tie(const Body& body) const {
    if (num_listed() <= kMostListed) {
      for_each([&](uint64_t element) {
        if (key_in(element) == cut_.key) body(id_in(element));
      });
      return;
    }
#pragma unroll 4
    for (int id = static_cast<int>(threadIdx.x); id < p_.vocab; id += kRowThreads) {
      if (key_of(elements_.at(id)) == cut_.key) body(static_cast<uint32_t>(id));
    }
  }
  /// Leaves in last_tie_ the id of the last tie that is kept.
  __device__ void find_last_tie() {
    const auto last = static_cast<uint32_t>(p_.vocab - 1);
    uint64_t num_ties = 0;
    for_each_tie([&](uint32_t /*id*/) { ++num_ties; });
    if (sum_of_cta(num_ties) <= cut_.num_ties) return;
    KeyRange ids{0, last};  // counted from the end of the row
    ids.narrow_to_one(search(), cut_.num_ties, 0, [&](const auto& add) {
      for_each_tie([&](uint32_t id) { add(last - id, 1U); });
    });
    last_tie_ = last - ids.least;
  }
  __device__ uint32_t kept_weight(uint32_t key, uint32_t id) const {
    if (key == cut_.key) return id <= last_tie_ ? tie_ : 0U;
    return key > cut_.key ? weight_of(sampling::value_of(key)) : 0U;
  }

  /// Draws a token in the order of ids and writes it.
  __device__ void draw() {
    uint64_t* masses = shared_.plain.entries;
    const auto add = [&](uint32_t key, uint32_t id) {
      atomicAdd(reinterpret_cast<Mass*>(&masses[id / kBlock]), Mass{kept_weight(key, id)});
    };
    if (cut_.num_ties != 0) {
      find_last_tie();
      for_each_tie([&](uint32_t id) { add(cut_.key, id); });
    }
    if (cut_.key != 0 && num_listed() <= kMostListed) {
      for_each([&](uint64_t element) {
        if (key_in(element) > cut_.key) add(key_in(element), id_in(element));
      });
    }
    __syncthreads();
    if (warp_of_thread() != 0) return;
    uint64_t target = sampling::high_product(counted_.random, above_);
    const int block = find_block(masses, num_blocks(), &target);
    bool is_found = false;
    uint32_t id = 0;
    uint32_t weight = 0;  // not 0 in the lane that has the token
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
        id = is_token ? static_cast<uint32_t>(i + e) : id;
        weight = is_token ? weights[e] : weight;
        before += weights[e];
      }
      is_found = is_found || target < sum;
      target -= is_found ? 0 : sum;
    });
    if (weight != 0) write(id, weight);
  }
  /// The first block at which the running sum of masses exceeds *target. Subtracts the masses of
  /// the blocks before it from *target. One warp calls it.
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
    cuda::write_token(p_, row_, static_cast<int32_t>(id), weight, static_cast<double>(above_));
  }

  const SampleParams& p_;
  int32_t row_;
  const CountedRow<kFromProbs>& counted_;
  CountedShared& shared_;
  SampleShared& common_;
  bool by_count_;
  RowPart<kDType, false> elements_;  // the whole row
  Cut cut_{};
  uint32_t tie_ = 0;         // the weight of an element at the cut
  uint32_t last_tie_ = ~0U;  // id of the last element at the cut that is kept
  KeyRange keys_{};          // keys of the listed elements; after find_cut(), the threshold
  uint64_t all_ = 0;         // the mass of the row
  uint64_t above_ = 0;       // the mass above the range; after find_cut(), of all that is kept
  uint64_t num_above_ = 0;   // elements above the range
};

/// Finds what the filter keeps of a row, and writes the token. It is not inlined, so that its
/// registers do not make other loops over rows spill.
template <DType kDType, bool kFromProbs>
__device__ __noinline__ void draw_kept(const SampleParams& p, int32_t row,
                                       const CountedRow<kFromProbs>& counted, CountedShared& shared,
                                       SampleShared& common) {
  KeptOfRow<kDType, kFromProbs> kept(p, row, counted, shared, common);
  kept.find_threshold();
  kept.write_token();
}

/// Draws from a row with top-p or top-k alone, or without filters, and writes the token or an
/// error. Several CTAs share the row only if tokens are tried. Top-p rarely drops all of them; if
/// it does, the first CTA finds the threshold alone.
template <DType kDType, bool kFromProbs>
__device__ __forceinline__ void draw_counted(const SampleParams& p, int32_t row,
                                             CountedShared& shared, SampleShared& common) {
  const CountedRow<kFromProbs> counted = SampleCounted<kDType, kFromProbs>(p, row, shared).run();
  if (counted.is_done || cluster_rank() != 0) return;
  draw_kept<kDType>(p, row, counted, shared, common);
}

}  // namespace flashplan::cuda
