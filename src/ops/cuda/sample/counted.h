// SPDX-License-Identifier: Apache-2.0
// sample() with top-p or top-k alone, of a row that a cluster of CTAs reads once. With top-p the
// cluster draws tokens as if there were no filter, until top-p keeps one (see "Draws with top-p
// alone" in ops/sampling_math.h). Each CTA sums up the weights of its part of the row by bins of
// values while it reads the part. These sums bound the mass of the elements that come before a
// token, and so nearly always tell whether top-p keeps it. Where they do not, the cluster reads the
// row again and computes that mass exactly. What needs the threshold itself is in kept.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/exchange.h"
#include "ops/cuda/sample/summed_row.h"

namespace flashplan::cuda {

/// What SampleCounted has found out about a row.
template <bool kFromProbs>
struct CountedRow {
  bool is_done;     // the row's result is written
  uint64_t token;   // the drawn token: its key and, in the low half, its id; 0: none is drawn
  uint64_t random;  // if no token is drawn: the random number to draw one with
  ValueBins<kFromProbs> bins;
  sampling::Scale scale;  // scale of the weights that filters compare
  uint64_t total;         // mass of the row
  uint64_t listed_mass;   // mass of the elements of the last bin, in the units of bins.mass()
};

template <DType kDType, bool kFromProbs>
class SampleCounted : SummedRow<kDType, kFromProbs> {
  using Base = SummedRow<kDType, kFromProbs>;
  using typename Base::Values;

 public:
  using Base::Base;

  /// Reads the row and draws the token, if that is possible without the threshold of the filter.
  /// Writes the token, unless its log-probability needs the threshold; or writes an error.
  __device__ CountedRow<kFromProbs> run() {
    this->read_row();
    CountedRow<kFromProbs> counted{};
    counted.is_done = true;
    const SampleError error = this->find_error();
    if (error != SampleError::kNone) {
      if (is_first_thread_of_cluster()) write_result(p_, row_, -1, NAN, error);
      return counted;
    }
    const int32_t top_k = p_.top_k.of(row_);
    const float top_p = p_.top_p.of(row_);
    if (is_greedy_ || !sampling::has_filters(top_k, top_p, 0.0F, p_.vocab)) {
      this->draw_without_filters(shared_.randoms[0]);
      return counted;
    }
    uint64_t random = shared_.randoms[0].first;
    if (sampling::is_tried(top_k, top_p, 0.0F, p_.vocab)) {
      random = sampling::random_of_try(p_, row_, sampling::kMostTries).first;
      counted.token = try_tokens();
      if (counted.token != 0 && p_.logprobs == nullptr) {
        const auto id = static_cast<int32_t>(static_cast<uint32_t>(counted.token));
        if (is_first_thread_of_cluster()) write_result(p_, row_, id, 0.0F, SampleError::kNone);
        return counted;
      }
    }
    return {false, counted.token, random, bins_, exact_, total_, this->listed_mass_before(0)};
  }

 private:
  using Base::bins_;
  using Base::elements_;
  using Base::end_block_;
  using Base::exact_;
  using Base::first_block_;
  using Base::is_greedy_;
  using Base::kBlock;
  using Base::kLastSummed;
  using Base::kMostTries;
  using Base::kVec;
  using Base::mass_of_bin;
  using Base::p_;
  using Base::place_of_base_;
  using Base::place_of_largest_;
  using Base::plain_;
  using Base::row_;
  using Base::scale_;
  using Base::shared_;
  using Base::total_;
  using Base::weight_of;

  static_assert(kMostTries % kTriesAtOnce == 0 && kTriesAtOnce <= kMostChosen);
  static constexpr uint32_t kDropped = 0;
  static constexpr uint32_t kKept = 1;
  static constexpr uint32_t kUnknown = 2;

  // --- Tries ---

  using BoundsExchange = Exchange<2 * kTriesAtOnce>;

  /// Returns the first tried token that top-p keeps: its key and, in the low half, its id. Returns
  /// 0 if top-p drops all tried tokens.
  __device__ uint64_t try_tokens() {
    BoundsExchange exchange(shared_.bounds_mail, &shared_.bounds[0][0][0]);
#pragma unroll 1
    for (int begin = 0; begin < kMostTries; begin += kTriesAtOnce) {
      judge(begin, exchange);
#pragma unroll 1
      for (int t = 0; t < kTriesAtOnce; ++t) {
        const uint32_t verdict = shared_.verdicts[t];
        const uint64_t token = shared_.tokens[t];
        if (verdict == kKept || (verdict == kUnknown && is_kept(token, exchange))) return token;
      }
      __syncthreads();  // verdicts and tokens have been read
    }
    return 0;
  }

  /// Draws the tokens of the next kTriesAtOnce tries and decides about each of them. Stores them in
  /// shared_.tokens and the decisions in shared_.verdicts. Each CTA draws all of these tokens
  /// itself, also from blocks that other CTAs have read, which saves an exchange between the CTAs.
  __device__ void judge(int begin, BoundsExchange& exchange) {
    const int warp = warp_of_thread();
    exchange.expect(kTriesAtOnce * sizeof(Bounds));
#pragma unroll 1
    for (int t = 0; t < kTriesAtOnce; ++t) this->choose(t, shared_.randoms[begin + t]);
    __syncthreads();
    if (warp < kTriesAtOnce) send(exchange, warp, bounds_of(draw(warp)));
    exchange.receive();
    if (warp < kTriesAtOnce) {
      const uint32_t verdict = verdict_of(received(exchange, warp));
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

  /// Bounds of the mass of the elements that come before a token. In is_kept(), `least` is that
  /// mass itself, and `most` is the mass of the row.
  struct Bounds {
    uint64_t least, most;
  };
  /// Sends the bounds of a token to all CTAs. One warp calls it.
  __device__ void send(BoundsExchange& exchange, int token, const Bounds& bounds) const {
    const int rank = lane_of_thread();
    uint64_t* to = exchange.own_values() + 2 * token;
    if (rank < cluster_size()) exchange.mail().send(to, bounds.least, bounds.most, rank);
  }
  /// The sums, over the CTAs, of the bounds that they have sent for a token in the last exchange.
  __device__ Bounds received(const BoundsExchange& exchange, int token) const {
    return {sum_of_warp(exchange.value_of_rank(2 * token)),
            sum_of_warp(exchange.value_of_rank(2 * token + 1))};
  }

  /// Bounds of the mass of those elements of the CTA's part that come before a token: larger ones,
  /// and equal ones with a smaller id. One warp calls it.
  __device__ Bounds bounds_of(uint64_t token) const {
    const float value = sampling::value_of(static_cast<uint32_t>(token >> 32));
    const int bin = bins_.bin_of(value);
    // The elements of the last bin are listed, so each can be compared with the token.
    const bool is_listed = bin == Values::kBins - 1;
    Bounds bounds;
    bounds.least = this->listed_mass_before(is_listed ? token ^ 0xffffffffU : 0);
    bounds.most = bounds.least;
    if (!is_listed) {
      const int thread = (Values::kBins - 1 - bin) / kBinsOfThread;
      const int own = min(first_bin(thread), kLastSummed) - lane_of_thread();
      const float from_base = bins_.unit_in(place_of_base_, place_of_largest_);
      bounds.least += static_cast<uint64_t>(shared_.above[thread] * from_base);
      bounds.least += sum_of_warp(own > bin ? mass_of_bin(own) : 0);
      // The sum of the bin has the token's own weight, but the token does not come before itself.
      const auto block = static_cast<int>(static_cast<uint32_t>(token)) / kBlock;
      const bool is_own = block >= first_block_ && block < end_block_ && bin != 0;
      const uint32_t others = shared_.bins[bin] - (is_own ? bins_.amount_of(value) : 0U);
      bounds.most =
          bounds.least + static_cast<uint64_t>(bins_.mass(others, bin, place_of_largest_));
      if (bin == 0) bounds.most = uint64_t{1} << 53;  // bin 0 has no sum
    }
    const bool has_places = Values::is_place(place_of_base_) && Values::is_place(place_of_largest_);
    if (has_places && shared_.num_listed <= kMostAboveBins) return bounds;
    return {0, uint64_t{1} << 53};
  }

  /// Whether top-p keeps a token, as far as the bounds tell. Top-p keeps it if the mass of the
  /// elements before it is less than top_p times the mass of the row.
  __device__ uint32_t verdict_of(const Bounds& before) const {
    const double rounding = rounding_of_row<kFromProbs>(p_.vocab, scale_.largest);
    const double error = Values::kError;
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

  /// Whether top-p keeps a token, from exact weights: the cluster reads the row again. All threads
  /// of the cluster call it.
  __device__ bool is_kept(uint64_t token, BoundsExchange& exchange) {
    const auto key = static_cast<uint32_t>(token >> 32);
    const auto id = static_cast<int>(static_cast<uint32_t>(token));
    const float value = sampling::value_of(key);
    const float above = sampling::value_of(key + 1);  // the next larger value
    uint64_t before = 0;
    uint64_t all = 0;
    this->read_again([&](const float (&x)[kVec], int i) {
      const float least = i + kVec <= id ? value : above;
#pragma unroll
      for (int e = 0; e < kVec; e += 2) {
        const uint32_t first = weight_of(x[e]);
        const uint32_t second = weight_of(x[e + 1]);
        all += first + second;
        before += (x[e] >= least ? first : 0U) + (x[e + 1] >= least ? second : 0U);
      }
    });
    if (is_first_thread_of_cluster()) {
      // Adds elements that equal the token and come before it in its own word, left out above.
      for (int i = id / kVec * kVec; i < id; ++i) {
        if (elements_.at(i) == value) before += weight_of(value);
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
      exchange.expect(sizeof(Bounds));
      send(exchange, 0,
           {sum_of_warp(is_warp ? plain_.warp_values[lane][0] : 0),
            sum_of_warp(is_warp ? plain_.warp_values[lane][1] : 0)});
    }
    exchange.receive();
    const Bounds sum = received(exchange, 0);
    return sum.least < sampling::part_of(p_.top_p.of(row_), sum.most);
  }
};

/// Whether SampleCounted can draw from rows of this length.
__device__ __host__ inline bool is_countable(const SampleParams& p) {
  return has_room_for_entries(p.vocab) &&
         p.vocab <=
             (p.from_probs ? ValueBins<true>::kMostElements : ValueBins<false>::kMostElements);
}

}  // namespace flashplan::cuda
