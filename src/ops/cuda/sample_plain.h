// SPDX-License-Identifier: Apache-2.0
// sample() of a row without filters, which a cluster of CTAs reads once. Each warp weighs blocks of
// the row relative to their own largest values and tells all CTAs what they weigh. Then each warp
// finds the block of the token by itself, and the warp that has weighed it draws the token.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample_block.h"

namespace flashplan::cuda {

/// Also takes the largest of logits, if the temperature is 0. Probabilities need another one. The
/// row has at most kMostEntries blocks.
template <DType kDType, bool kFromProbs>
class SamplePlain {
 public:
  /// All CTAs have an array `entries` [kMostEntries] and a mailbox, which is not initialised yet.
  __device__ SamplePlain(const SampleParams& p, int32_t row, uint64_t* entries, Mailbox& mail)
      : p_(p),
        row_(row),
        entries_(entries),
        mail_(mail),
        num_blocks_(num_blocks_of(p)),
        blocks_of_cta_(blocks_of_cta(p)),
        part_(part_of_blocks<kDType, kFromProbs>(p, row)),
        num_fetchable_(part_.has_words(0, 0) ? part_.count() / kBlock : 0) {}

  /// Draws and writes the token, or the error of the parameters or the row.
  __device__ void run() {
    if (threadIdx.x == 0) {
      mail_.init();
      Mailbox::fence_init();
      mail_.expect(static_cast<uint32_t>(num_blocks_) * sizeof(uint64_t));
    }
    cluster_arrive_relaxed();
    fetch(warp_of_thread());
    const float temperature = p_.temperature.of(row_);
    is_greedy_ = !kFromProbs && temperature == 0.0F;
    scale_ =
        kFromProbs ? sampling::absolute_scale() : sampling::make_scale(0.0F, temperature, false);
    cluster_wait();  // all CTAs have begun: their shared memory can be written to
#pragma unroll 1
    for (int block = warp_of_thread(); block * kBlock < part_.count(); block += kRowWarps) {
      send(block, block < num_fetchable_ ? weigh_fetched() : weigh_elements(block));
    }
    // While the entries of other CTAs are on their way.
    const auto random = sampling::random_pair(p_.seed.of(row_), p_.offset.of(row_), p_.stream(row_),
                                              sampling::kUseSample);
    mail_.wait(0);
    SampleError error = find_largest();
    if (error == SampleError::kNone) error = draw(random);
    if (error != SampleError::kNone && cluster_rank() == 0 && threadIdx.x == 0) {
      write_result(p_, row_, -1, NAN, error);
    }
  }

 private:
  static constexpr int kBlock = sampling::kBlock;
  static constexpr int kVec = kWordElements<kDType>;
  static constexpr int kWords = kBlock / (32 * kVec);
  using OfWarp = BlockOfWarp<kFromProbs, kVec, kWords>;
  using OfWarpInMemory = BlockOfWarp<kFromProbs, kVec, 1>;

  // --- Blocks of the CTA's part ---

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
  __device__ WeighedBlock weigh_fetched() {
    const int next = fetched_ + kRowWarps;
    const bool has_next = next < num_fetchable_;
    const auto* from = part_.words_at(next * kBlock + OfWarp::first_of(0));
    if (has_next) fetched_ = next;
    return OfWarp::weigh(
        scale_.factor, [&](int u, float (&x)[kVec]) { unpack<kDType, kVec>(words_[u], x); },
        [&](const uint32_t (&)[kVec], int u) {
          if (has_next) words_[u] = __ldcs(from + u * 32);
        });
  }
  /// Weighs a block that does not consist of words. It is read twice.
  __device__ WeighedBlock weigh_elements(int block) const {
    return OfWarpInMemory::weigh(scale_.factor,
                                 [&](int u, float (&x)[kVec]) { read_elements(block, u, x); });
  }
  __device__ void read_elements(int block, int u, float (&x)[kVec]) const {
    part_.read_elements(block * kBlock + OfWarp::first_of(u), x);
  }

  // --- Entries: what CTAs tell each other of blocks ---

  /// Tells all CTAs of a block: its key, and its sum below it.
  __device__ void send(int block, const WeighedBlock& weighed) {
    const int rank = lane_of_thread();
    if (rank >= cluster_size()) return;
    const uint64_t entry = uint64_t{weighed.key} << 32 | sampling::rounded_sum(weighed.sum);
    mail_.send(entries_ + first_block() + block, entry, rank);
  }
  __device__ int first_block() const { return cluster_rank() * blocks_of_cta_; }

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

  /// Draws a block, and if this warp has weighed it, draws and writes the token.
  __device__ SampleError draw(const sampling::RandomPair& random) {
    const int lane = lane_of_thread();
    const int share = (num_blocks_ - 1) / 32 + 1;  // of a lane
    static_assert(kMostEntries <= 32 * 32, "the lanes look at one share together");
    uint64_t own = 0;
#pragma unroll 1
    for (int b = lane * share; b < min((lane + 1) * share, num_blocks_); ++b) own += mass_of(b);
    const uint64_t to_lane = sum_to_lane(own);
    const uint64_t total = __shfl_sync(~0U, to_lane, 31);
    if (kFromProbs && !sampling::masses_sum_to_one(total)) return SampleError::kProbabilities;
    const uint64_t target = is_greedy_ ? 0 : sampling::high_product(random.first, total);
    const BinOfLanes of_share = find_reached(to_lane, own, target + 1);
    const int begin = of_share.lane * share;
    const bool is_block = lane < share && begin + lane < num_blocks_;
    const uint64_t mass = is_block ? mass_of(begin + lane) : 0;
    const BinOfLanes of_block = find_lane(mass, of_share.above, target + 1);
    const int block = begin + of_block.lane - first_block();
    const bool is_own = block >= 0 && block < blocks_of_cta_;
    if (!is_own || block % kRowWarps != warp_of_thread()) return SampleError::kNone;
    const Chosen chosen = {block, random.second, __shfl_sync(~0U, mass, of_block.lane), total};
    if (block < num_fetchable_) {
      draw_from_words(chosen);
    } else {
      draw_from_elements(chosen);
    }
    return SampleError::kNone;
  }

  /// The block of the token.
  struct Chosen {
    int block;
    uint64_t random;  // for its element
    uint64_t mass;
    uint64_t total;
  };

  __device__ void draw_from_words(const Chosen& chosen) {
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
        [&](int i, uint32_t weight) { write_token(chosen, block, i, weight); });
  }

  __device__ void draw_from_elements(const Chosen& chosen) {
    const WeighedBlock block = weigh_elements(chosen.block);
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
        [&](int i, uint32_t weight) { write_token(chosen, block, i, weight); });
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

  __device__ void write_token(const Chosen& chosen, const WeighedBlock& block, int i,
                              uint32_t weight) const {
    const int32_t id = part_.begin() + chosen.block * kBlock + i;
    if (is_greedy_) {
      write_result(p_, row_, id, 0.0F, SampleError::kNone);
    } else {
      write_token_of_block(p_, row_, id, weight, block.sum, chosen.mass, chosen.total);
    }
  }

  const SampleParams& p_;
  int32_t row_;
  uint64_t* entries_;
  Mailbox& mail_;
  int num_blocks_;
  int blocks_of_cta_;
  RowPart<kDType, false> part_;
  int num_fetchable_;  // blocks of the part that consist of words
  bool is_greedy_ = false;
  sampling::Scale scale_{};  // of the row
  int fetched_ = -1;         // the block in words_
  Word<kDType, kVec> words_[kWords];
};

/// In a kernel that also draws from rows with filters: a function of its own, so that the registers
/// it needs do not make the rest of the kernel spill others.
template <DType kDType>
__device__ __noinline__ void draw_plain(const SampleParams& p, int32_t row, SampleShared& shared) {
  SamplePlain<kDType, false>(p, row, shared.plain_entries, shared.lists).run();
}

}  // namespace flashplan::cuda
