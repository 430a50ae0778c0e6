// SPDX-License-Identifier: Apache-2.0
// A row that warps read once, block by block. Each warp weighs blocks relative to their own largest
// values. The entries of all blocks then tell what each block weighs in the row, and which one has
// the token of a draw without filters.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample_block.h"

namespace flashplan::cuda {

/// The CTAs of a cluster have parts of the row, which has at most kMostEntries blocks.
template <DType kDType, bool kFromProbs>
class PlainRow {
 public:
  /// `entries` [kMostEntries], of each CTA, are those of all blocks.
  __device__ PlainRow(const SampleParams& p, int32_t row, uint64_t* entries)
      : p_(p),
        row_(row),
        entries_(entries),
        num_blocks_(num_blocks_of(p)),
        blocks_of_cta_(blocks_of_cta(p)),
        part_(part_of_blocks<kDType, kFromProbs>(p, row)),
        num_fetchable_(part_.has_words(0, 0) ? part_.count() / kBlock : 0) {}

 protected:
  static constexpr int kBlock = sampling::kBlock;
  static constexpr int kVec = kWordElements<kDType>;
  static constexpr int kWords = kBlock / (32 * kVec);
  using OfWarp = BlockOfWarp<kFromProbs, kVec, kWords>;
  using OfWarpInMemory = BlockOfWarp<kFromProbs, kVec, 1>;

  // --- Blocks of the CTA's part ---

  /// Starts to load the first block of each warp. read() is due.
  __device__ void start_reading() {
    fetch(warp_of_thread());
    const float temperature = p_.temperature.of(row_);
    is_greedy_ = !kFromProbs && temperature == 0.0F;
    scale_ =
        kFromProbs ? sampling::absolute_scale() : sampling::make_scale(0.0F, temperature, false);
  }
  /// The largest of the elements that start_reading() has loaded for this thread.
  __device__ float largest_loaded() const {
    float largest = -INFINITY;
    if (fetched_ < 0) return largest;
#pragma unroll
    for (int u = 0; u < kWords; ++u) {
      float x[kVec];
      unpack<kDType, kVec>(words_[u], x);
#pragma unroll
      for (int e = 0; e < kVec; ++e) largest = fmaxf(largest, x[e]);
    }
    return largest;
  }
  /// Reads the part. The threads of a warp call see(x), for kVec values at a time, and for each
  /// block of the warp enter(block of the row, entry).
  template <class See, class Enter>
  __device__ void read(const See& see, const Enter& enter) {
#pragma unroll 1
    for (int block = warp_of_thread(); block * kBlock < part_.count(); block += kRowWarps) {
      const WeighedBlock weighed =
          block < num_fetchable_ ? weigh_fetched(see) : weigh_elements(block, see);
      const uint64_t entry = uint64_t{weighed.key} << 32 | sampling::rounded_sum(weighed.sum);
      enter(first_block() + block, entry);
    }
  }

  __device__ int first_block() const { return cluster_rank() * blocks_of_cta_; }

  // --- Entries of blocks: the key of the largest value, and below it the sum of weights ---

  __device__ uint64_t mass_of(int block) const {
    const uint64_t entry = entries_[block];
    const float largest = OfWarp::value_of(static_cast<uint32_t>(entry >> 32));
    if (is_greedy_) return largest == scale_.largest ? 1 : 0;
    return sampling::mass_of_block(largest, static_cast<uint32_t>(entry),
                                   {scale_.largest, scale_.factor, kFromProbs});
  }

  /// Finds the row's largest value; returns the error of the parameters or of the row.
  __device__ SampleError find_largest() {
    uint32_t key = 0;
#pragma unroll 1
    for (int block = lane_of_thread(); block < num_blocks_; block += 32) {
      key = max(key, static_cast<uint32_t>(entries_[block] >> 32));
    }
    key = __reduce_max_sync(~0U, key);
    scale_.largest = OfWarp::value_of(key);
    const SampleError error = error_of_parameters(p_.temperature.of(row_), p_.top_k.of(row_),
                                                  p_.top_p.of(row_), p_.min_p.of(row_));
    if (error != SampleError::kNone) return error;
    if (kFromProbs) {
      if (key == OfWarp::kKeyOfNan) return SampleError::kNotANumber;
      return key == OfWarp::kKeyOfError ? SampleError::kProbabilities : SampleError::kNone;
    }
    if (!(scale_.largest < INFINITY)) return SampleError::kNotANumber;
    return scale_.largest == -INFINITY ? SampleError::kNoToken : SampleError::kNone;
  }

  /// The block of a token.
  struct Chosen {
    int block;        // of the CTA's part, in which it may not be
    uint64_t random;  // for its element
    uint64_t mass;
    uint64_t total;  // of the row
  };

  /// Chooses a block. All threads of a warp call it, after find_largest().
  __device__ Chosen choose(const sampling::RandomPair& random) const {
    const int lane = lane_of_thread();
    const int share = (num_blocks_ - 1) / 32 + 1;  // of a lane
    static_assert(kMostEntries <= 32 * 32, "the lanes look at one share together");
    uint64_t own = 0;
#pragma unroll 1
    for (int b = lane * share; b < min((lane + 1) * share, num_blocks_); ++b) own += mass_of(b);
    const uint64_t to_lane = sum_to_lane(own);
    const uint64_t total = __shfl_sync(~0U, to_lane, 31);
    const uint64_t target = is_greedy_ ? 0 : sampling::high_product(random.first, total);
    const BinOfLanes of_share = find_reached(to_lane, own, target + 1);
    const int begin = of_share.lane * share;
    const bool is_block = lane < share && begin + lane < num_blocks_;
    const uint64_t mass = is_block ? mass_of(begin + lane) : 0;
    const BinOfLanes of_block = find_lane(mass, of_share.above, target + 1);
    return {begin + of_block.lane - first_block(), random.second,
            __shfl_sync(~0U, mass, of_block.lane), total};
  }

  /// Draws an element of the chosen block, which is one of the CTA's part. One thread of the warp
  /// that calls it calls found(id, weight, block).
  template <class Found>
  __device__ void draw_from(const Chosen& chosen, const Found& found) {
    if (chosen.block < num_fetchable_) {
      draw_from_words(chosen, found);
    } else {
      draw_from_elements(chosen, found);
    }
  }

  const SampleParams& p_;
  int32_t row_;
  uint64_t* entries_;
  int num_blocks_;
  int blocks_of_cta_;
  RowPart<kDType, false> part_;
  bool is_greedy_ = false;
  sampling::Scale scale_{};  // of the row

 private:
  /// Loads a block that consists of words.
  __device__ void fetch(int block) {
    if (block >= num_fetchable_) return;
    fetched_ = block;
    const auto* from = part_.words_at(block * kBlock + OfWarp::first_of(0));
#pragma unroll
    for (int u = 0; u < kWords; ++u) words_[u] = __ldcs(from + u * 32);
  }
  /// Weighs the fetched block, and fetches the warp's next one if there is one: each word as soon
  /// as the one in its place is weighed.
  template <class See>
  __device__ WeighedBlock weigh_fetched(const See& see) {
    const int next = fetched_ + kRowWarps;
    const bool has_next = next < num_fetchable_;
    const auto* from = part_.words_at(next * kBlock + OfWarp::first_of(0));
    if (has_next) fetched_ = next;
    return OfWarp::weigh(
        scale_.factor, [&](int u, float (&x)[kVec]) { unpack<kDType, kVec>(words_[u], x); },
        [&](const uint32_t (&)[kVec], int u) {
          float x[kVec];
          unpack<kDType, kVec>(words_[u], x);
          see(x);
          if (has_next) words_[u] = __ldcs(from + u * 32);
        });
  }
  /// Weighs a block that does not consist of words. It is read several times.
  template <class See>
  __device__ WeighedBlock weigh_elements(int block, const See& see) const {
    return OfWarpInMemory::weigh(
        scale_.factor, [&](int u, float (&x)[kVec]) { read_elements(block, u, x); },
        [&](const uint32_t (&)[kVec], int u) {
          float x[kVec];
          read_elements(block, u, x);
          see(x);
        });
  }
  __device__ void read_elements(int block, int u, float (&x)[kVec]) const {
    part_.read_elements(block * kBlock + OfWarp::first_of(u), x);
  }

  template <class Found>
  __device__ void draw_from_words(const Chosen& chosen, const Found& found) {
    if (chosen.block != fetched_) fetch(chosen.block);
    uint32_t all[kWords][kVec];
    const WeighedBlock block = OfWarp::weigh(
        scale_.factor, [&](int u, float (&x)[kVec]) { unpack<kDType, kVec>(words_[u], x); },
        [&](const uint32_t (&weights)[kVec], int u) {
#pragma unroll
          for (int e = 0; e < kVec; ++e) all[u][e] = chance_of(weights[e]);
        });
    OfWarp::find(
        target_in(block, chosen),
        [&](int u, uint32_t (&weights)[kVec]) {
#pragma unroll
          for (int e = 0; e < kVec; ++e) weights[e] = all[u][e];
        },
        [&](int i, uint32_t weight) { found(id_of(chosen, i), weight, block); });
  }

  template <class Found>
  __device__ void draw_from_elements(const Chosen& chosen, const Found& found) {
    const WeighedBlock block = weigh_elements(chosen.block, [](const float (&)[kVec]) {});
    OfWarpInMemory::find(
        target_in(block, chosen),
        [&](int u, uint32_t (&weights)[kVec]) {
          float x[kVec];
          read_elements(chosen.block, u, x);
#pragma unroll
          for (int e = 0; e < kVec; ++e) {
            weights[e] = chance_of(sampling::weight_in_block(x[e], block.scale));
          }
        },
        [&](int i, uint32_t weight) { found(id_of(chosen, i), weight, block); });
  }

  /// The weight with which an element is drawn. At the temperature 0, only a logit that is equal to
  /// the largest one weighs as much.
  __device__ uint32_t chance_of(uint32_t weight) const {
    constexpr uint32_t kWeightOfLargest = 1U << 27;
    const uint32_t is_largest = weight == kWeightOfLargest ? 1U : 0U;
    return is_greedy_ ? is_largest : weight;
  }
  __device__ uint64_t target_in(const WeighedBlock& block, const Chosen& chosen) const {
    return is_greedy_ ? 0 : sampling::high_product(chosen.random, block.sum);
  }
  __device__ int32_t id_of(const Chosen& chosen, int i) const {
    return part_.begin() + chosen.block * kBlock + i;
  }

  int num_fetchable_;  // blocks of the part that consist of words
  int fetched_ = -1;   // the block in words_
  Word<kDType, kVec> words_[kWords];
};

}  // namespace flashplan::cuda
