// SPDX-License-Identifier: Apache-2.0
// A row that warps read once, block by block. A warp weighs the elements of a block relative to the
// block's largest value, and sends the block's entry to all CTAs: the key of this value and the sum
// of the weights. The entries of all blocks then tell what each block weighs in the row, and which
// one has the token of a draw without filters: the threads of each CTA together find that block,
// and the warp that has weighed it draws the token.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/block.h"

namespace flashplan::cuda {

constexpr int kMostEntries = 512;  // blocks of a row
constexpr int kMostChosen = 4;     // blocks chosen at once

/// Whether the entries of all blocks of a row have room.
__device__ __host__ inline bool has_room_for_entries(int32_t vocab) {
  return vocab <= kMostEntries * sampling::kBlock;
}

/// The block from which a token is drawn.
struct ChosenBlock {
  int block;
  uint64_t random;  // chooses the element in the block
  uint64_t mass;
};

/// The shared memory of a CTA, at the same place in all CTAs of a cluster.
struct PlainShared {
  Mailbox mail;                          // counts the entries that have come
  uint64_t entries[kMostEntries];        // entries of all blocks of the row
  uint64_t warp_values[kMaxCluster][2];  // values of each warp
  uint32_t warp_keys[kRowWarps];
  ChosenBlock chosen[kMostChosen];
  alignas(16) float last_block[sampling::kBlock];  // see keep_last_block()
};

/// The CTAs of a cluster have parts of the row, which has at most kMostEntries blocks.
template <DType kDType, bool kFromProbs>
class PlainRow {
 public:
  __device__ PlainRow(const SampleParams& p, int32_t row, PlainShared& shared)
      : p_(p),
        row_(row),
        plain_(shared),
        num_blocks_((p.vocab - 1) / kBlock + 1),
        first_block_(cluster_rank() * blocks_of_cta()),
        end_block_(min(first_block_ + blocks_of_cta(), num_blocks_)),
        elements_({p.logits, p.row_stride, p.bias, p.bias_stride}, p.logits_row(row), p.vocab,
                  kFromProbs ? 0.0F : -INFINITY),
        num_fetchable_(elements_.has_words(0, 0) ? p.vocab / kBlock : 0) {}

  /// Draws and writes a token without filters, or the error of the parameters or the row. At the
  /// temperature 0, which is for logits alone, it takes the largest logit.
  __device__ void run() {
    if (threadIdx.x == 0) init_mail();
    cluster_arrive_relaxed();
    start_reading();
    cluster_wait();  // all CTAs have begun: their shared memory can be written to
    read(SeeNothing{}, [](int /*block*/, const WeighedBlock&) {});
    // Computed while the entries of other CTAs are on their way.
    const auto random = sampling::random_of_try(p_, row_, 0);
    SampleError error = receive_entries();
    if (error == SampleError::kNone) {
      weigh_entries();
      error = draw_without_filters(random);
    }
    if (error != SampleError::kNone && is_first_thread_of_cluster()) {
      write_result(p_, row_, -1, NAN, error);
    }
  }

 protected:
  static constexpr int kBlock = sampling::kBlock;
  static constexpr int kVec = kWordElements<kDType>;
  static constexpr int kWords = kBlock / (32 * kVec);
  using OfWarp = BlockOfWarp<kFromProbs, kVec, kWords>;
  using OfWarpInMemory = BlockOfWarp<kFromProbs, kVec, 1>;

  struct SeeNothing {
    __device__ void operator()(const float (&)[kVec]) const {}
  };

  // --- Blocks of the CTA. Their numbers count from the start of the row ---

  /// One thread calls it, before the cluster's first barrier.
  __device__ void init_mail() {
    plain_.mail.init();
    Mailbox::fence_init();
    plain_.mail.expect(static_cast<uint32_t>(num_blocks_) * sizeof(uint64_t));
  }
  /// Starts to load the first block of each warp. read() must follow. All threads call it; it may
  /// have a barrier.
  __device__ void start_reading() {
    if (first_of_warp() < end_block_) fetch(first_of_warp());
    const float temperature = p_.temperature.of(row_);
    is_greedy_ = !kFromProbs && temperature == 0.0F;
    scale_ =
        kFromProbs ? sampling::absolute_scale() : sampling::make_scale(0.0F, temperature, false);
    if (num_fetchable_ < num_blocks_) keep_last_block();
  }
  /// The smallest and the largest of the elements that start_reading() has loaded for this thread.
  /// Without any, the smallest one is infinity and the largest one -infinity.
  __device__ Range range_loaded() const {
    Range range{INFINITY, -INFINITY};
    if (fetched_ < 0) return range;
#pragma unroll
    for (int u = 0; u < kWords; ++u) {
      float x[kVec];
      unpack<kDType, kVec>(words_[u], x);
#pragma unroll
      for (int e = 0; e < kVec; ++e) range = {fminf(range.low, x[e]), fmaxf(range.high, x[e])};
    }
    return range;
  }
  /// Reads the CTA's blocks, and sends the entries of these blocks to all CTAs. The threads of a
  /// warp call see(x) for kVec values at a time, and after each block end_block(its number, its
  /// weights).
  template <class See, class EndBlock>
  __device__ void read(const See& see, const EndBlock& end_block) {
#pragma unroll 1
    for (int block = first_of_warp(); block < end_block_; block += kRowWarps) {
      const WeighedBlock weighed =
          block < num_fetchable_ ? weigh_fetched(see) : weigh_elements(block, see);
      const uint64_t entry = uint64_t{weighed.key} << 32 | sampling::rounded_sum(weighed.sum);
      const int rank = lane_of_thread();
      if (rank < cluster_size()) plain_.mail.send(plain_.entries + block, entry, rank);
      end_block(block, weighed);
    }
  }
  /// Reads the CTA's blocks a second time. The threads of a warp together call body(x, i) for kVec
  /// values at a time, of which the first is element i of the row. Values behind the end of the row
  /// are -infinity, or 0 where the row has probabilities.
  template <class Body>
  __device__ void read_again(const Body& body) {
    if (first_of_warp() < end_block_) fetch(first_of_warp());
#pragma unroll 1
    for (int block = first_of_warp(); block < end_block_; block += kRowWarps) {
      if (block >= num_fetchable_) {
#pragma unroll 1
        for (int u = 0; u < OfWarpInMemory::kWords; ++u) {
          float x[kVec];
          read_elements(block, u, x);
          body(x, block * kBlock + OfWarp::first_of(u));
        }
        continue;
      }
      const NextBlock next = start_next();
#pragma unroll
      for (int u = 0; u < kWords; ++u) {
        float x[kVec];
        unpack<kDType, kVec>(words_[u], x);
        body(x, block * kBlock + OfWarp::first_of(u));
        next.load(u, words_);
      }
    }
  }
  /// Reads word u of a block that does not consist of words.
  __device__ void read_elements(int block, int u, float (&x)[kVec]) const {
    const int first = OfWarp::first_of(u);
    if (block < num_blocks_ - 1) {
      elements_.read_elements(block * kBlock + first, x);
      return;
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) x[e] = plain_.last_block[first + e];
  }

  __device__ int blocks_of_cta() const { return (num_blocks_ - 1) / cluster_size() + 1; }
  __device__ int first_of_warp() const { return first_block_ + warp_of_thread(); }
  __device__ bool is_of_warp(int block) const {
    return block >= first_block_ && block < end_block_ &&
           (block - first_block_) % kRowWarps == warp_of_thread();
  }

  // --- Entries of blocks: the largest value's key and, in the low half, the sum of weights ---

  /// Waits for the entries of all blocks, and finds the row's largest value. Returns the error of
  /// the parameters or of the row. All threads call it; a barrier is inside.
  __device__ SampleError receive_entries() {
    plain_.mail.wait(0);
    uint32_t key = 0;
#pragma unroll 1
    for (int block = static_cast<int>(threadIdx.x); block < num_blocks_; block += kRowThreads) {
      key = max(key, static_cast<uint32_t>(plain_.entries[block] >> 32));
    }
    key = largest_of_cta(key);
    scale_.largest = OfWarp::value_of(key);
    const SampleError error = error_of_parameters(p_.temperature.of(row_), p_.top_k.of(row_),
                                                  p_.top_p.of(row_), p_.min_p.of(row_));
    if (error != SampleError::kNone) return error;
    if (kFromProbs) {
      if (key == OfWarp::kKeyOfNan) return SampleError::kNotANumber;
      return key == OfWarp::kKeyOfError ? SampleError::kProbabilities : SampleError::kNone;
    }
    return error_of_logits(scale_.largest);
  }
  /// The largest key of the CTA's threads. All threads call it. It has a barrier; another one must
  /// come before the next call, which uses the same shared memory.
  __device__ uint32_t largest_of_cta(uint32_t key) {
    key = __reduce_max_sync(~0U, key);
    const int lane = lane_of_thread();
    if (lane == 0) plain_.warp_keys[warp_of_thread()] = key;
    __syncthreads();
    return __reduce_max_sync(~0U, lane < kRowWarps ? plain_.warp_keys[lane] : 0);
  }

  /// Computes the mass of each block relative to the row's largest value. Each thread takes an
  /// equal share of consecutive blocks. All threads call it after receive_entries(); it has a
  /// barrier.
  __device__ void weigh_entries() {
    const int share = (num_blocks_ - 1) / kRowThreads + 1;
    first_entry_ = static_cast<int>(threadIdx.x) * share;
    own_ = 0;
#pragma unroll 1
    for (int b = first_entry_; b < min(first_entry_ + share, num_blocks_); ++b) own_ += mass_of(b);
    const SumsOfCta sums = sums_of_cta(own_, plain_.warp_values);
    before_ = sums.before;
    total_ = sums.all;
  }
  __device__ uint64_t mass_of(int block) const {
    const uint64_t entry = plain_.entries[block];
    const float largest = OfWarp::value_of(static_cast<uint32_t>(entry >> 32));
    if (is_greedy_) return largest == scale_.largest ? 1 : 0;
    return sampling::mass_of_block(largest, static_cast<uint32_t>(entry),
                                   {scale_.largest, scale_.factor, kFromProbs});
  }

  /// Chooses the block of a token. The one thread of the CTA that has this block in its share (see
  /// weigh_entries()) stores it in plain_.chosen[index]; the others may read it after a barrier.
  /// All threads call it.
  __device__ void choose(int index, const sampling::RandomPair& random) {
    uint64_t target = is_greedy_ ? 0 : sampling::high_product(random.first, total_);
    if (target < before_ || target - before_ >= own_) return;
    target -= before_;
    int block = first_entry_;
    uint64_t mass = mass_of(block);
    while (target >= mass) {
      target -= mass;
      mass = mass_of(++block);
    }
    plain_.chosen[index] = {block, random.second, mass};
  }

  /// Draws an element of a block. One warp calls it, and one of its threads calls found(id, weight,
  /// block).
  template <class Found>
  __device__ void draw_from(const ChosenBlock& chosen, const Found& found) {
    if (chosen.block < num_fetchable_) {
      draw_from_words(chosen, found);
    } else {
      draw_from_elements(chosen, found);
    }
  }

  /// Draws and writes a token without filters, or returns why there is none. All threads of the
  /// cluster call it after weigh_entries(). The warp that has weighed the token's block writes it.
  __device__ SampleError draw_without_filters(const sampling::RandomPair& random) {
    if (kFromProbs && !sampling::masses_sum_to_one(total_)) return SampleError::kProbabilities;
    choose(0, random);
    __syncthreads();
    const ChosenBlock& chosen = plain_.chosen[0];
    if (!is_of_warp(chosen.block)) return SampleError::kNone;
    draw_from(chosen, [&](int32_t id, uint32_t weight, const WeighedBlock& block) {
      if (is_greedy_) {
        write_result(p_, row_, id, 0.0F, SampleError::kNone);
      } else {
        write_token_of_block(p_, row_, id, weight, block.sum, chosen.mass, total_);
      }
    });
    return SampleError::kNone;
  }

  const SampleParams& p_;
  int32_t row_;
  PlainShared& plain_;
  int num_blocks_;
  int first_block_, end_block_;      // the CTA's blocks; it may have none
  RowPart<kDType, false> elements_;  // the whole row
  bool is_greedy_ = false;
  sampling::Scale scale_{};  // of the row's weights
  uint64_t total_ = 0;       // mass of the row, known after weigh_entries()

 private:
  /// Loads a block that consists of whole aligned words.
  __device__ void fetch(int block) {
    if (block >= num_fetchable_) return;
    fetched_ = block;
    const auto* from = elements_.words_at(block * kBlock + OfWarp::first_of(0));
#pragma unroll
    for (int u = 0; u < kWords; ++u) words_[u] = __ldcs(from + u * 32);
  }
  /// Loads the row's last block into shared memory, since it does not consist of words: its warp
  /// would load a few elements at a time and wait for them. Each CTA may draw from this block.
  __device__ void keep_last_block() {
    static_assert(kBlock <= kRowThreads * kVec);
    const int first = static_cast<int>(threadIdx.x) * kVec;
    if (first < kBlock) {
      float x[kVec];
      elements_.read_elements((num_blocks_ - 1) * kBlock + first, x);
#pragma unroll
      for (int e = 0; e < kVec; ++e) plain_.last_block[first + e] = x[e];
    }
    __syncthreads();
  }
  /// A block that is loaded while the fetched one is used: when word u of the fetched block has
  /// been used, load(u, words_) replaces it by word u of this block.
  struct NextBlock {
    bool exists;
    const Word<kDType, kVec>* words;

    __device__ void load(int u, Word<kDType, kVec> (&into)[kWords]) const {
      if (exists) into[u] = __ldcs(words + u * 32);
    }
  };
  /// Returns the warp's next block, which becomes the fetched one; it does not exist if the warp
  /// has no further block that consists of words.
  __device__ NextBlock start_next() {
    const int next = fetched_ + kRowWarps;
    const bool exists = next < min(end_block_, num_fetchable_);
    if (exists) fetched_ = next;
    return {exists, elements_.words_at(next * kBlock + OfWarp::first_of(0))};
  }
  /// Weighs the fetched block, and meanwhile loads the warp's next one.
  template <class See>
  __device__ WeighedBlock weigh_fetched(const See& see) {
    const NextBlock next = start_next();
    return OfWarp::weigh(
        scale_.factor, [&](int u, float (&x)[kVec]) { unpack<kDType, kVec>(words_[u], x); },
        [&](const uint32_t (&)[kVec], int u) {
          float x[kVec];
          unpack<kDType, kVec>(words_[u], x);
          see(x);
          next.load(u, words_);
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

  template <class Found>
  __device__ void draw_from_words(const ChosenBlock& chosen, const Found& found) {
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
        [&](int i, uint32_t weight) { found(chosen.block * kBlock + i, weight, block); });
  }

  template <class Found>
  __device__ void draw_from_elements(const ChosenBlock& chosen, const Found& found) {
    const WeighedBlock block = weigh_elements(chosen.block, SeeNothing{});
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
        [&](int i, uint32_t weight) { found(chosen.block * kBlock + i, weight, block); });
  }

  /// The weight with which an element is drawn, from its weight in the block. At the temperature 0
  /// it is 1 for logits that are equal to the largest one, and 0 for all others.
  __device__ uint32_t chance_of(uint32_t weight) const {
    constexpr uint32_t kWeightOfLargest = 1U << 27;
    const uint32_t is_largest = weight == kWeightOfLargest ? 1U : 0U;
    return is_greedy_ ? is_largest : weight;
  }
  __device__ uint64_t target_in(const WeighedBlock& block, const ChosenBlock& chosen) const {
    return is_greedy_ ? 0 : sampling::high_product(chosen.random, block.sum);
  }

  int num_fetchable_;  // blocks of the row that consist of whole aligned words
  int fetched_ = -1;   // the block in words_
  Word<kDType, kVec> words_[kWords];
  // The thread's share of blocks in weigh_entries(): the first of them, their mass, and the mass of
  // the row's blocks before them.
  int first_entry_ = 0;
  uint64_t own_ = 0;
  uint64_t before_ = 0;
};

}  // namespace flashplan::cuda
