// SPDX-License-Identifier: Apache-2.0
// The list, in shared memory, of the candidates of a row that one CTA reads without holding it:
// elements that may pass the filters of sample(). If all elements that may pass are listed, top-k,
// min-p, top-p and the draw need nothing else.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/few.h"
#include "ops/cuda/sample/kept.h"

namespace flashplan::cuda {

constexpr int32_t kMostStreamedTopK = 128;  // the largest top-k for which candidates have a bound

/// What a CTA keeps of a row.
struct StreamList {
  static constexpr int kMost = 512;  // candidates of a warp
  union {
    struct {
      uint32_t keys[kRowWarps][kMost];  // keys of the candidates that each warp has found
      uint32_t ids[kRowWarps][kMost];
    };
    CountedShared counted;
  };
};

template <DType kDType>
class SampleList {
 public:
  /// `memory`: what SampleRow needs, and a StreamList behind it.
  __device__ SampleList(const SampleParams& p, const RowSplit& split, SampleShared& shared,
                        float* memory)

      : row_(p, split, shared, memory), list_(*reinterpret_cast<StreamList*>(memory + kListed)) {}

  /// Where the list begins, in floats.
  static constexpr int kListed = (kBytesOfRank + kGroups * 8) / 4;

 protected:
  static constexpr int kVec = kWordElements<kDType>;

  /// Lists those of the warp's elements that are at least `low` and below `high`. This thread has
  /// the elements x, of which the first is element i.
  __device__ void list(const float (&x)[kVec], int i, float low, float high = INFINITY) {
    if (num_ > StreamList::kMost) return;
    const unsigned before = (1U << lane_of_thread()) - 1;
    const int warp = warp_of_thread();
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const bool is_in = x[e] >= low && !(x[e] >= high) && i + e < row_.part.count();
      const unsigned lanes = __ballot_sync(~0U, is_in);
      const int place = num_ + __popc(lanes & before);
      if (is_in && place < StreamList::kMost) {
        list_.keys[warp][place] = key_of(x[e]);
        list_.ids[warp][place] = static_cast<uint32_t>(i + e);
      }
      num_ += __popc(lanes);
    }
  }

  /// Ends the lists: sets num_listed_ for all threads, and returns whether no warp has found more
  /// candidates than its list holds. All threads call it.
  __device__ bool finish_lists() {
    num_listed_ = static_cast<int>(row_.sum_of_cta(lane_of_thread() == 0 ? num_ : 0));
    return __syncthreads_or(num_ > StreamList::kMost ? 1 : 0) == 0;
  }

  /// Calls body(key, id) for the candidates of this thread.
  template <class Body>
  __device__ void for_each(const Body& body) const {
    const int warp = warp_of_thread();
#pragma unroll 1
    for (int c = lane_of_thread(); c < num_; c += 32) {
      body(list_.keys[warp][c], list_.ids[warp][c]);
    }
  }

  /// The candidates of this thread as KeyRange::narrow() takes them: each counts 1 or, by weight,
  /// what it adds to the mass above the cut.
  template <bool kByWeight>
  __device__ auto amounts() const {
    return [this](const auto& add) {
      for_each([&](uint32_t key, uint32_t /*id*/) {
        add(key, amount_of_key<kByWeight>(row_, key, cut_));
      });
    };
  }

  /// What the cut keeps of the candidates.
  struct Kept {
    uint32_t tie;       // the weight of a tie
    uint32_t last_tie;  // the id of the last tie that is kept
    uint64_t mass;      // the mass of all that is kept
  };
  __device__ Kept find_kept() {
    const uint32_t tie = row_.weight_of_tie(cut_);
    Kept kept = {tie, ~0U, mass_above_cut() + uint64_t{cut_.num_ties} * tie};
    if (tie == 0) return kept;
    const auto is_tie = [&](uint32_t key, uint32_t /*id*/) { return key == cut_.key ? 1U : 0U; };
    uint64_t num_ties = 0;
    for_each([&](uint32_t key, uint32_t id) { num_ties += is_tie(key, id); });
    if (row_.sum_of_cta(num_ties) > cut_.num_ties) kept.last_tie = find_id(cut_.num_ties, is_tie);
    return kept;
  }
  /// The weight of an element; 0 if it is not kept.
  __device__ uint32_t weight_in(const Kept& kept, uint32_t key, uint32_t id) const {
    if (key == cut_.key) return id <= kept.last_tie ? kept.tie : 0U;
    return amount_of_key<true>(row_, key, cut_);
  }

  /// The mass of the candidates above the cut.
  __device__ uint64_t mass_above_cut() {
    uint64_t mass = 0;
    for_each([&](uint32_t key, uint32_t /*id*/) { mass += amount_of_key<true>(row_, key, cut_); });
    return row_.sum_of_cta(mass);
  }

  /// The id at which the sum of amount_of(key, id), in the order of ids, reaches `wanted`.
  template <class AmountOf>
  __device__ uint32_t find_id(uint64_t wanted, const AmountOf& amount_of) {
    const auto last = static_cast<uint32_t>(row_.p.vocab - 1);
    KeyRange ids{0, last};  // counted from the end of the row
    ids.narrow_to_one(row_.search(), wanted, 0, [&](const auto& add) {
      for_each([&](uint32_t key, uint32_t id) { add(last - id, amount_of(key, id)); });
    });
    return last - ids.least;
  }

  /// Takes the row's largest value from shared memory, after the row has been read. Returns false
  /// if the value shows an error of the row.
  __device__ bool read_largest() {
    row_.scale.largest = sampling::value_of(row_.shared.keys.most);
    return error_of_logits(row_.scale.largest) == SampleError::kNone;
  }

  // --- Where the list has all that the filters may keep ---

  /// A range that all listed elements are in.
  __device__ KeyRange listed_keys() const { return {key_of(bound_), row_.shared.keys.most}; }

  /// Draws and writes the token if few candidates may be kept; else returns false.
  __device__ bool draw_from_few_listed() {
    uint32_t least = 1;  // the smallest key that may be kept
    if (top_k_ < row_.p.vocab && num_listed_ > kMostFew / 4 && num_listed_ >= top_k_) {
      KeyRange keys = listed_keys();
      keys.narrow(row_.search(), static_cast<uint64_t>(top_k_), 0, amounts<false>());
      least = keys.least;
    }
    if (threadIdx.x == 0) row_.shared.num_candidates = 0;
    __syncthreads();
    for_each([&](uint32_t key, uint32_t id) {
      if (key < least) return;
      const auto place = static_cast<int>(atomicAdd(&row_.shared.num_candidates, 1U));
      if (place < kMostFew) set_few(row_, place, key, id, cut_);
    });
    __syncthreads();
    const auto num = static_cast<int>(row_.shared.num_candidates);
    if (num > kMostFew) return false;
    draw_from_few(row_, num, top_k_);
    return true;
  }

  /// Finds the cut among the listed elements. If these are fewer than top_k, min-p drops all other
  /// elements of the row, so top-k drops nothing more.
  __device__ void filter() {
    KeyRange keys = listed_keys();
    if (top_k_ < row_.p.vocab && num_listed_ >= top_k_) {
      const auto wanted = static_cast<uint64_t>(top_k_);
      const uint64_t above = keys.narrow_to_one(row_.search(), wanted, 0, amounts<false>());
      cut_ = {keys.least, static_cast<uint32_t>(wanted - above), cut_.min_weight};
    }
    if (row_.shared.top_p >= 1.0F) return;
    const uint64_t all = mass_above_cut();
    const uint64_t wanted = sampling::part_of(
        row_.shared.top_p, all + uint64_t{cut_.num_ties} * row_.weight_of_tie(cut_));
    uint64_t above = all;
    if (all >= wanted) {
      keys.most = row_.shared.keys.most;
      above = keys.narrow_to_one(row_.search(), wanted, 0, amounts<true>());
      cut_.key = keys.least;
      cut_.num_ties = 1;
    }
    cut_.num_ties = sampling::ties_to_reach(wanted, above, row_.weight_of_tie(cut_));
  }

  /// Draws from what the cut keeps of the list and writes the token.
  __device__ void draw() {
    const auto kept = find_kept();
    const auto weight_of = [&](uint32_t key, uint32_t id) { return weight_in(kept, key, id); };
    const uint64_t target = sampling::high_product(row_.shared.random, kept.mass);
    const uint32_t token = find_id(target + 1, weight_of);
    for_each([&](uint32_t key, uint32_t id) {
      if (id == token) write_token(row_, id, weight_of(key, id), kept.mass);
    });
  }

  SampleRow<kDType, false, false> row_;
  StreamList& list_;
  Cut cut_{};
  int32_t top_k_ = 0;
  float bound_ = -INFINITY;  // all listed elements are at least this value
  int num_ = 0;              // candidates that the warp has found
  int num_listed_ = 0;       // candidates that all warps of the CTA have found
};

}  // namespace flashplan::cuda
