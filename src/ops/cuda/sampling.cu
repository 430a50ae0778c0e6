// SPDX-License-Identifier: Apache-2.0
// sample() on CUDA: a cluster of CTAs has a row in its shared memory. All that is added is
// integers, so any order gives the CPU's results.
//
// A threshold of top-k or top-p is found in three steps: a histogram of the row tells the range of
// values that has it; the candidates, which are the elements in that range, go to lists that each
// CTA has of all of them; the threshold is found among them. Where they are too many, the next
// histogram divides their range. For a small k, a lower bound of the k-th largest value is at hand
// from the largest values of warps, and the candidates are what reaches it.
#include <cmath>
#include <cstdint>

#include "flashplan/sampling.h"
#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/row_bins.h"
#include "ops/cuda/row_part.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {
namespace {

using sampling::Cut;

constexpr int kMaxCandidates = 768;  // of a row; each CTA of a cluster has an equal share
constexpr int kValues = 4;           // that CTAs tell each other at once

struct Shared {
  uint64_t values[2][kMaxCluster][kValues];  // of CTAs. Two sets, since a CTA may be a step ahead
  uint64_t warp_values[kMaxCluster][2];      // of warps, or of ranks
  uint32_t warp_keys[kRowWarps][2];
  Bins bins;
  Bin found;
  uint32_t candidates[kMaxCandidates];  // keys: the share of rank 0, of rank 1 ...
  uint32_t num_candidates;              // of this CTA, also those that have found no place
  uint32_t least, most;                 // of its candidates
  uint64_t own_above;                   // the mass above its candidates
  uint64_t wanted;                      // count or mass, for the threshold
  bool goes_on;                         // whether the token is in this CTA
  uint64_t target, ties_before, total;
  float temperature, top_p, min_p;  // of the row
  int32_t top_k;
  int64_t seed, offset;
};

static_assert(sizeof(Shared) <= 11 * 1024, "three CTAs of 16,032 elements must fit an SM");

/// A range of values, as the numbers that the first histogram divides.
struct Range {
  float low;
  float high;  // not in it
};

/// A parameter of `sample` and the split of its rows.
struct KernelParams {
  SampleParams p;
  RowSplit split;
};

/// NaN if one of them is.
__device__ inline float larger_or_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || a > b ? a : b;
#endif
}

/// a * b + c, rounded down.
__device__ inline float fused_down(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rd(a, b, c);
#else
  return std::floor(a * b) + c;  // where the result is a whole number and a * b is exact
#endif
}

/// Of 0, only +0 has a key.
__device__ inline uint32_t key_of(float x) { return sampling::key_of(__fadd_rn(x, 0.0F)); }

/// One row of logits or of probabilities. All threads of the cluster go through all calls together.
template <DType kDType, bool kFromProbs>
class Sampler {
 public:
  __device__ Sampler(const KernelParams& params, int32_t row, Shared& shared, float* memory)
      : p_(params.p),
        row_(row),
        shared_(shared),
        groups_(reinterpret_cast<uint64_t*>(memory + (params.split.held ? params.split.part : 0))),
        part_({params.p.logits, params.p.row_stride, params.p.bias, params.p.bias_stride}, row,
              params.p.vocab, params.split, memory, kFromProbs ? 0.0F : -INFINITY) {}

  __device__ void run() {
    cluster_arrive();
    const SampleError error = choose();
    if (error != SampleError::kNone && cluster_rank() == 0 && threadIdx.x == 0) {
      write(-1, NAN, error);
    }
  }

 private:
  __device__ void write(int32_t id, float logprob, SampleError error) const {
    p_.ids[row_] = id;
    if (p_.logprobs != nullptr) p_.logprobs[row_] = logprob;
    if (p_.status != nullptr) p_.status[row_] = static_cast<int32_t>(error);
  }

  /// Draws and writes the token, or returns why there is none. After the last barrier of the
  /// cluster no CTA touches the memory of another one, so each may end when it likes.
  __device__ SampleError choose() {
    if (threadIdx.x == 0) {  // these may come from memory, beside the logits
      shared_.temperature = p_.temperature.of(row_);
      shared_.top_k = p_.top_k.of(row_);
      shared_.top_p = p_.top_p.of(row_);
      shared_.min_p = p_.min_p.of(row_);
      shared_.seed = p_.seed.of(row_);
      shared_.offset = p_.offset.of(row_);
    }
    const SampleError of_row = load();
    const SampleError error = error_of_parameters();
    if (error != SampleError::kNone) return error;
    if (of_row != SampleError::kNone) return of_row;
    if (shared_.temperature == 0.0F) return take_largest();

    scale_ = sampling::make_scale(largest_, shared_.temperature, kFromProbs);
    Cut cut = sampling::keep_all(sampling::least_weight(shared_.min_p));
    const bool filters = shared_.top_k < p_.vocab || shared_.top_p < 1.0F || cut.min_weight > 0;
    if (kFromProbs && filters) {
      sum_segments(sampling::keep_all(0));
      publish_sums();
      const uint64_t total = sum_of_warp(value_of_rank(0));
      if (!sampling::sums_to_one(total, largest_)) return SampleError::kProbabilities;
    }
    // Parameters are read again where they are used, to save registers.
    if (shared_.top_k < p_.vocab) {
      const Threshold threshold = find_threshold<false>(
          &cut, [&](uint64_t /*all*/) { return static_cast<uint64_t>(shared_.top_k); });
      cut.num_ties = static_cast<uint32_t>(threshold.wanted - threshold.above);
    }
    if (shared_.top_p < 1.0F) {
      const Threshold threshold = find_threshold<true>(&cut, [&](uint64_t all) {
        return sampling::part_of(shared_.top_p, all + uint64_t{cut.num_ties} * weight_of_tie(cut));
      });
      cut.num_ties = sampling::ties_to_reach(threshold.wanted, threshold.above, weight_of_tie(cut));
    }
    return draw(cut, kFromProbs && !filters);
  }

  __device__ SampleError error_of_parameters() const {
    if (!(shared_.temperature >= 0.0F && shared_.temperature < INFINITY)) {
      return SampleError::kTemperature;
    }
    if (shared_.top_k < 1) return SampleError::kTopK;
    if (!(shared_.top_p > 0.0F && shared_.top_p <= 1.0F)) return SampleError::kTopP;
    if (!(shared_.min_p >= 0.0F && shared_.min_p <= 1.0F)) return SampleError::kMinP;
    return SampleError::kNone;
  }

  /// Loads the part; finds the row's largest value and what is wrong with the row.
  __device__ SampleError load() {
    float largest = -INFINITY;  // NaN if there is one
    float smallest = INFINITY;
    part_.load([&](float x) {
      largest = larger_or_nan(largest, x);
      if (kFromProbs) smallest = fminf(smallest, x);
    });
    uint32_t keys[kValues] = {key_of(largest), ~key_of(smallest), 0U, 0U};
    reduce_warps(keys);
    if (warp_of_thread() == 0) keys[2] = ~bound_of_cta(keys[0], shared_.top_k);
    cluster_wait();  // all CTAs have begun: their shared memory can be written to
    exchange_keys(keys);
    largest_ = sampling::value_of(keys[0]);
    smallest = sampling::value_of(~keys[1]);
    bound_ = ~keys[2];
    if (largest_ != largest_) return SampleError::kNotANumber;
    if (kFromProbs) {
      const bool fits = smallest >= 0.0F && largest_ > 0.0F && largest_ <= 1.01F;
      return fits ? SampleError::kNone : SampleError::kProbabilities;
    }
    if (largest_ == INFINITY) return SampleError::kNotANumber;
    return largest_ == -INFINITY ? SampleError::kNoToken : SampleError::kNone;
  }

  /// A key that at least `top_k` values of the row reach, if all CTAs reach such a one; 0 if there
  /// is none. `largest` is that of the warp whose number the lane has.
  __device__ uint32_t bound_of_cta(uint32_t largest, int32_t top_k) const {
    const int lane = lane_of_thread();
    const int share = static_cast<int>((int64_t{top_k} + cluster_size() - 1) / cluster_size());
    if (share > kRowWarps) return 0;
    int larger = 0;
#pragma unroll 4
    for (int other = 0; other < kRowWarps; ++other) {
      const uint32_t key = __shfl_sync(~0U, largest, other);
      larger += key > largest || (key == largest && other < lane) ? 1 : 0;
    }
    return __reduce_max_sync(~0U, larger >= share - 1 && lane < kRowWarps ? largest : 0U);
  }

  /// The first id of the largest value.
  __device__ SampleError take_largest() {
    uint32_t first = ~0U;
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      read(i, x);
#pragma unroll
      for (int e = 3; e >= 0; --e) {
        if (x[e] == largest_) first = min(first, static_cast<uint32_t>(part_.begin() + i + e));
      }
    }
    uint32_t keys[kValues] = {~first, 0U, 0U, 0U};
    reduce_warps(keys);
    exchange_keys(keys);
    if (cluster_rank() == 0 && threadIdx.x == 0) {
      write(static_cast<int32_t>(~keys[0]), 0.0F, SampleError::kNone);
    }
    return SampleError::kNone;
  }

  // --- Elements and their weights ---

  __device__ void read(int i, float (&x)[4]) const {
    const float4 word = part_.word(i);
    x[0] = word.x;
    x[1] = word.y;
    x[2] = word.z;
    x[3] = word.w;
  }

  __device__ uint32_t weight_of(float x) const {
    return kFromProbs ? sampling::weight_of_probability(x, scale_)
                      : sampling::weight_of_logit(x, scale_);
  }

  /// Weights, 0 for what min-p drops.
  __device__ void weigh(const float (&x)[4], uint32_t min_weight, uint32_t (&weights)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t weight = weight_of(x[e]);
      weights[e] = weight >= min_weight ? weight : 0U;
    }
  }

  __device__ uint32_t weight_of_tie(const Cut& cut) const {
    if (cut.num_ties == 0) return 0;
    const uint32_t weight = weight_of(sampling::value_of(cut.key));
    return weight >= cut.min_weight ? weight : 0;
  }

  /// What a candidate adds to a count or, by weight, to the mass above the cut.
  template <bool kByWeight>
  __device__ uint32_t amount_of_key(uint32_t key, const Cut& cut) const {
    if (!kByWeight) return 1;
    if (key <= cut.key) return 0;
    const uint32_t weight = weight_of(sampling::value_of(key));
    return weight >= cut.min_weight ? weight : 0;
  }

  /// Grows with x; the first histogram divides it: the weight's exponent, or the weight of a
  /// probability, whose bits are much like an exponent.
  __device__ float position_of(float x) const {
    if (!kFromProbs) return sampling::exponent(x, scale_);
    const float part = sampling::times(x, scale_.factor);
    return sampling::times(part < 1.0F ? part : 1.0F, 1073741824.0F);
  }

  // The first histogram has 32 bins for each power of two; the first bin has all that is below.
  static constexpr uint32_t kFirstBits =
      (157U << 5) - (kBins - 1);  // of a weight, without the last 18

  __device__ int bin_of_position(float position) const {
    if (kFromProbs) {
      const float lowest = sampling::float_of(kFirstBits << 18);
      const float clamped = position > lowest ? position : lowest;
      return static_cast<int>((sampling::bits_of(clamped) >> 18) - kFirstBits);
    }
    constexpr float kMagic = 12582912.0F;  // leaves a whole number in the low bits
    constexpr float kLowest = -static_cast<float>(kBins - 1) / 32.0F;
    const float shifted = fused_down(position > kLowest ? position : kLowest, 32.0F, kMagic);
    return static_cast<int>(sampling::bits_of(shifted) - sampling::bits_of(kMagic)) + kBins - 1;
  }

  __device__ Range range_of_bin(int bin) const {
    if (kFromProbs) {
      const uint32_t bits = (static_cast<uint32_t>(bin) + kFirstBits) << 18;
      return {bin == 0 ? -INFINITY : sampling::float_of(bits),
              sampling::float_of(bits + (1U << 18))};
    }
    const float low = static_cast<float>(bin - (kBins - 1)) / 32.0F;
    return {bin == 0 ? -INFINITY : low, low + 1.0F / 32.0F};
  }

  // --- Thresholds ---

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
    constexpr uint32_t kKeyOfLowest = 0x007fffffU;  // -inf
    const bool has_bound = !kByWeight && bound_ > kKeyOfLowest;
    Range range{-INFINITY, INFINITY};
    Bin bin{0, 0, 0, wanted_of(0)};
    if (has_bound) {
      range.low = position_of(sampling::value_of(bound_));
    } else {
      fill_bins<kByWeight>(*cut);
      bin = find_bin(shared_.bins, groups_, true, 0, wanted_of, shared_.found);
      if (bin.index < 0) {
        bins_are_read_ = true;
        return {bin.wanted, bin.above};
      }
      range = range_of_bin(bin.index);
    }
    if (threadIdx.x == 0) {
      shared_.own_above = bin.own_above;
      shared_.wanted = bin.wanted;
    }
    gather<false>(range);
    while (has_too_many_) {
      if (least_ == most_) {
        cut->key = least_;
        cut->num_ties = 1;
        return {shared_.wanted, bin.above};
      }
      const int shift = shift_of_keys();
      fill_bins_by_key<kByWeight>(*cut, shift);
      bin = find_bin(
          shared_.bins, groups_, true, bin.above, [&](uint64_t /*all*/) { return shared_.wanted; },
          shared_.found);
      if (threadIdx.x == 0) shared_.own_above += bin.own_above;
      narrow(bin.index, shift);
      gather<true>(range);
    }
    has_candidates_ = kByWeight || bin.above == 0;
    has_all_candidates_ = !kByWeight && bin.above == 0;
    const uint64_t wanted = shared_.wanted;
    return {wanted, select<kByWeight>(cut, wanted, bin.above)};
  }

  /// So that the keys from least_ to most_ are divided into at most 2^kLogKeyBins bins.
  __device__ int shift_of_keys() const {
    return max(32 - __clz(static_cast<int>(most_ - least_)) - kLogKeyBins, 0);
  }

  __device__ void narrow(int bin, int shift) {
    least_ += static_cast<uint32_t>(bin) << shift;
    most_ = min(most_, least_ + ((1U << shift) - 1));
  }

  /// Begins a histogram of the cluster.
  __device__ void clear_bins() {
    // Other CTAs may still read what is there.
    if (bins_are_read_) cluster_sync();
    bins_are_read_ = false;
    shared_.bins.clear();
    __syncthreads();
  }

  /// A histogram of the part by position.
  template <bool kByWeight>
  __device__ void fill_bins(const Cut& cut) {
    clear_bins();
    const float cut_value = cut.key == 0 ? -INFINITY : sampling::value_of(cut.key);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      int bins[4];
      uint32_t amounts[4];
      read(i, x);
      if (kByWeight) weigh(x, cut.min_weight, amounts);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        bins[e] = bin_of_position(position_of(x[e]));
        if (kByWeight) {
          if (!(x[e] > cut_value)) amounts[e] = 0;
        } else {
          amounts[e] = i + e < part_.count() ? 1 : 0;
        }
      }
      shared_.bins.add(bins, amounts);
    }
  }

  /// A histogram of the part's keys from least_ to most_.
  template <bool kByWeight>
  __device__ void fill_bins_by_key(const Cut& cut, int shift) {
    clear_bins();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      int bins[4];
      uint32_t amounts[4];
      read(i, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t key = key_of(x[e]);
        const bool takes_part = key >= least_ && key <= most_ && i + e < part_.count();
        bins[e] = takes_part ? static_cast<int>((key - least_) >> shift) : 0;
        amounts[e] = takes_part ? amount_of_key<kByWeight>(key, cut) : 0U;
      }
      shared_.bins.add(bins, amounts);
    }
  }

  /// Puts the elements of a range, by key those from least_ to most_, in the lists of all CTAs, and
  /// tells these the CTA's mass above. After it least_ and most_ are the range's smallest and
  /// largest key, and has_too_many_ whether a CTA has more than its share of the lists.
  template <bool kByKey>
  __device__ void gather(const Range& range) {
    const int share = share_of_rank();
    uint32_t* own = shared_.candidates + cluster_rank() * share;
    if (threadIdx.x == 0) {
      shared_.num_candidates = 0;
      shared_.least = ~0U;
      shared_.most = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      bool is_in[4];
      read(i, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (kByKey) {
          const uint32_t key = key_of(x[e]);
          is_in[e] = key >= least_ && key <= most_;
        } else {
          const float position = position_of(x[e]);
          is_in[e] = position >= range.low && position < range.high;
        }
      }
      if (!(is_in[0] || is_in[1] || is_in[2] || is_in[3])) continue;
#pragma unroll 1
      for (int e = 0; e < 4; ++e) {
        const bool takes_part = e == 0   ? is_in[0]
                                : e == 1 ? is_in[1]
                                : e == 2 ? is_in[2]
                                         : is_in[3];
        if (!takes_part || i + e >= part_.count()) continue;
        const uint32_t key = key_of(e == 0 ? x[0] : e == 1 ? x[1] : e == 2 ? x[2] : x[3]);
        atomicMin(&shared_.least, key);
        atomicMax(&shared_.most, key);
        const uint32_t place = atomicAdd(&shared_.num_candidates, 1U);
        if (place < static_cast<uint32_t>(share)) own[place] = key;
      }
    }
    __syncthreads();
    const auto num_own = static_cast<int>(shared_.num_candidates);
    const int num_sent = num_own <= share ? num_own : 0;
    const int lane = lane_of_thread();
    for (int rank = warp_of_thread(); rank < cluster_size(); rank += kRowWarps) {
      if (rank == cluster_rank()) continue;
      for (int c = lane; c < num_sent; c += 32) *shared_of(own + c, rank) = own[c];
    }
    if (warp_of_thread() == 0) {
      const uint64_t values[kValues] = {static_cast<uint64_t>(num_own), ~uint64_t{shared_.least},
                                        shared_.most, shared_.own_above};
      publish(values);
    }
    cluster_sync();
    ++step_;
    bins_are_read_ = false;
    has_too_many_ = __reduce_max_sync(~0U, static_cast<uint32_t>(value_of_rank(0))) >
                    static_cast<uint32_t>(share);
    least_ = ~__reduce_max_sync(~0U, static_cast<uint32_t>(value_of_rank(1)));
    most_ = __reduce_max_sync(~0U, static_cast<uint32_t>(value_of_rank(2)));
  }

  /// Candidates that the lists have place for, of each CTA of the cluster.
  __device__ int share_of_rank() const {
    return kMaxCandidates >> (__ffs(cluster_size()) - 1);  // it is a power of two
  }

  /// Calls body(key) for the candidates of this thread, which are of all CTAs.
  template <class Body>
  __device__ void for_each_candidate(const Body& body) const {
    const int share = share_of_rank();
    for (int c = static_cast<int>(threadIdx.x); c < kMaxCandidates; c += kRowThreads) {
      const int rank = c * cluster_size() / kMaxCandidates;
      if (c - rank * share < num_candidates_of(rank)) {
        body(shared_.candidates[c]);
      }
    }
  }

  __device__ int num_candidates_of(int rank) const {
    return static_cast<int>(shared_.values[(step_ - 1) % 2][rank][0]);
  }

  /// find_threshold() among the candidates, with what is above them.
  template <bool kByWeight>
  __device__ uint64_t select(Cut* cut, uint64_t wanted, uint64_t above) {
    const Cut before = *cut;
    const uint32_t most = most_;
    const uint32_t least = least_;
    for (;;) {
      const int shift = shift_of_keys();
      shared_.bins.clear();
      __syncthreads();
      for_each_candidate([&](uint32_t key) {
        if (key < least_ || key > most_) return;
        const int bins[4] = {static_cast<int>((key - least_) >> shift), 0, 0, 0};
        const uint32_t amounts[4] = {amount_of_key<kByWeight>(key, before), 0U, 0U, 0U};
        shared_.bins.add(bins, amounts);
      });
      const Bin bin = find_bin(
          shared_.bins, groups_, false, above, [=](uint64_t /*all*/) { return wanted; },
          shared_.found);
      above = bin.above;
      narrow(bin.index, shift);
      if (shift == 0) break;
    }
    cut->key = least_;
    cut->num_ties = 1;
    least_ = least;
    most_ = most;
    return above;
  }

  /// Of those above the cut, and of all CTAs.
  __device__ uint64_t mass_of_candidates(const Cut& cut) {
    uint64_t mass = 0;
    for_each_candidate([&](uint32_t key) { mass += amount_of_key<true>(key, cut); });
    mass = sum_of_warp(mass);
    if (lane_of_thread() == 0) shared_.warp_values[warp_of_thread()][0] = mass;
    __syncthreads();
    const int lane = lane_of_thread();
    mass = sum_of_warp(lane < kRowWarps ? shared_.warp_values[lane][0] : 0);
    __syncthreads();
    return mass;
  }

  // --- The draw ---

  /// Draws from what the cut keeps and writes the token: kept weights are added in the order of
  /// ids, over CTAs, then over warps, each of which has a segment of the part, then in the segment.
  __device__ SampleError draw(const Cut& cut, bool is_checked) {
    const int warp = warp_of_thread();
    const int lane = lane_of_thread();
    const uint32_t tie = weight_of_tie(cut);
    if (has_candidates_) {
      sum_candidates(cut);
      __syncthreads();
    } else {
      sum_segments(cut);
      publish_sums();
    }
    if (warp == 0) {
      uint64_t mass = value_of_rank(0);
      uint64_t ties = value_of_rank(1);
      if (has_candidates_) {
        const bool is_rank = lane < cluster_size();
        mass = is_rank ? value_of_rank(3) + shared_.warp_values[lane][0] : 0;
        ties = is_rank ? shared_.warp_values[lane][1] : 0;
      }
      const Place place = pick(mass, ties, 0, cut, tie, [&](uint64_t total) {
        return sampling::high_product(sampling::random_bits(shared_.seed, shared_.offset,
                                                            p_.stream(row_), sampling::kUseSample),
                                      total);
      });
      if (lane == 0) {
        shared_.total = place.total;
        shared_.target = place.target;
        shared_.ties_before = place.ties_before;
        shared_.goes_on = place.index == cluster_rank();
      }
    }
    __syncthreads();
    if (is_checked && !sampling::sums_to_one(shared_.total, largest_)) {
      return SampleError::kProbabilities;
    }
    if (!shared_.goes_on) return SampleError::kNone;
    if (has_candidates_) {
      sum_segments(cut);
      __syncthreads();
    }
    if (warp != 0) return SampleError::kNone;
    const bool is_warp = lane < kRowWarps;
    const Place place =
        pick(is_warp ? shared_.warp_values[lane][0] : 0, is_warp ? shared_.warp_values[lane][1] : 0,
             shared_.ties_before, cut, tie, [&](uint64_t /*total*/) { return shared_.target; });
    search(place, cut, tie);
    return SampleError::kNone;
  }

  struct Place {
    int index;
    uint64_t target;       // left at its begin
    uint64_t ties_before;  // its begin
    uint64_t total;
  };

  /// The first lane at which the kept weights of the lanes pass target_of(their sum).
  template <class TargetOf>
  __device__ Place pick(uint64_t mass, uint64_t ties, uint64_t ties_before, const Cut& cut,
                        uint32_t tie, const TargetOf& target_of) const {
    if (tie != 0) {
      ties_before += sum_to_lane(ties) - ties;
      mass += uint64_t{sampling::kept_ties(cut, ties_before, static_cast<uint32_t>(ties))} * tie;
    }
    const uint64_t passed = sum_to_lane(mass);
    const uint64_t total = __shfl_sync(~0U, passed, 31);
    const uint64_t target = target_of(total);
    const unsigned lanes = __ballot_sync(~0U, passed > target);
    const int index = lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1 : 31;
    return {index, target - __shfl_sync(~0U, passed - mass, index),
            __shfl_sync(~0U, ties_before, index), total};
  }

  /// Segments are of whole words of a warp.
  __device__ int begin_of_segment(int warp) const {
    const int segment = (part_.count() + kRowThreads * 4 - 1) / (kRowThreads * 4) * 128;
    return min(warp * segment, part_.count());
  }

  /// Leaves in shared_.warp_values the mass above the cut, and the ties, of the warps' segments.
  __device__ void sum_segments(const Cut& cut) {
    const int warp = warp_of_thread();
    const int end = begin_of_segment(warp + 1);
    uint64_t mass = 0;
    uint32_t ties = 0;
    const bool keeps_all = cut.key == 0;
    const float cut_value = sampling::value_of(cut.key);
#pragma unroll 1
    for (int i = begin_of_segment(warp) + lane_of_thread() * 4; i < end; i += 128) {
      float x[4];
      uint32_t weights[4];
      read(i, x);
      if (!keeps_all) {
#pragma unroll
        for (int e = 0; e < 4; ++e) ties += x[e] == cut_value ? 1U : 0U;
        const float largest = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
        if (!(largest > cut_value)) continue;
      }
      weigh(x, cut.min_weight, weights);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!keeps_all && !(x[e] > cut_value)) weights[e] = 0;
      }
      mass += weights[0] + weights[1];
      mass += weights[2] + weights[3];
    }
    mass = sum_of_warp(mass);
    ties = __reduce_add_sync(~0U, ties);
    if (lane_of_thread() == 0) {
      shared_.warp_values[warp][0] = mass;
      shared_.warp_values[warp][1] = ties;
    }
  }

  /// Leaves in shared_.warp_values the same of the candidates of each rank.
  __device__ void sum_candidates(const Cut& cut) {
    for (int rank = warp_of_thread(); rank < cluster_size(); rank += kRowWarps) {
      const uint32_t* keys = shared_.candidates + rank * share_of_rank();
      uint64_t mass = 0;
      uint32_t ties = 0;
      for (int c = lane_of_thread(); c < num_candidates_of(rank); c += 32) {
        mass += amount_of_key<true>(keys[c], cut);
        ties += keys[c] == cut.key ? 1U : 0U;
      }
      mass = sum_of_warp(mass);
      ties = __reduce_add_sync(~0U, ties);
      if (lane_of_thread() == 0) {
        shared_.warp_values[rank][0] = mass;
        shared_.warp_values[rank][1] = ties;
      }
    }
  }

  /// Finds and writes the token, in the segment of place.index; one warp.
  __device__ void search(const Place& place, const Cut& cut, uint32_t tie) {
    const int lane = lane_of_thread();
    const int end = begin_of_segment(place.index + 1);
    uint64_t target = place.target;
    uint64_t ties_before = place.ties_before;
#pragma unroll 1
    for (int i = begin_of_segment(place.index) + lane * 4; i - lane * 4 < end; i += 128) {
      float x[4] = {part_.after_end(), part_.after_end(), part_.after_end(), part_.after_end()};
      uint32_t weights[4];
      if (i < end) read(i, x);
      weigh(x, cut.min_weight, weights);
      bool is_tie[4];
      uint32_t ties = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t key = key_of(x[e]);
        if (key <= cut.key) weights[e] = 0;
        is_tie[e] = tie != 0 && key == cut.key;
        ties += is_tie[e] ? 1U : 0U;
      }
      if (tie != 0) {
        const uint64_t up_to_lane = ties_before + sum_to_lane(ties);
        uint64_t rank = up_to_lane - ties;
        ties_before = __shfl_sync(~0U, up_to_lane, 31);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (is_tie[e] && rank++ < cut.num_ties) weights[e] = tie;
        }
      }
      const uint64_t own = uint64_t{weights[0]} + weights[1] + weights[2] + weights[3];
      const uint64_t sum = sum_of_warp(own);
      if (target >= sum && i - lane * 4 + 128 < end) {
        target -= sum;
        continue;
      }
      const uint64_t passed = sum_to_lane(own);
      const unsigned lanes = __ballot_sync(~0U, passed > target);
      if (lanes != 0 && lane == __ffs(static_cast<int>(lanes)) - 1) {
        uint64_t reached = passed - own;
        int e = 0;
        uint32_t weight = weights[0];
#pragma unroll
        for (int next = 1; next < 4; ++next) {
          if (reached + weight <= target && e == next - 1) {
            reached += weight;
            weight = weights[next];
            e = next;
          }
        }
        float logprob = 0.0F;
        if (p_.logprobs != nullptr) {
          const double chance = static_cast<double>(weight) / static_cast<double>(shared_.total);
          logprob = static_cast<float>(log(chance));
        }
        write(part_.begin() + i + e, logprob, SampleError::kNone);
      }
      return;
    }
  }

  // --- What CTAs tell each other ---

  /// Warp 0 gets the largest of each value over the CTA, and in values[0] that of the warp whose
  /// number the lane has. A barrier of the CTA is inside.
  __device__ void reduce_warps(uint32_t (&values)[kValues]) {
    const int lane = lane_of_thread();
    for (int v = 0; v < 2; ++v) {
      const uint32_t value = __reduce_max_sync(~0U, values[v]);
      if (lane == 0) shared_.warp_keys[warp_of_thread()][v] = value;
    }
    __syncthreads();
    for (int v = 0; v < 2; ++v) values[v] = lane < kRowWarps ? shared_.warp_keys[lane][v] : 0U;
  }

  /// From what reduce_warps() leaves to the largest over the cluster, for all threads.
  __device__ void exchange_keys(uint32_t (&values)[kValues]) {
    if (warp_of_thread() == 0) {
      uint64_t wide[kValues];
      for (int v = 0; v < kValues; ++v) wide[v] = __reduce_max_sync(~0U, values[v]);
      publish(wide);
    }
    cluster_sync();
    ++step_;
    for (int v = 0; v < kValues; ++v) {
      values[v] = __reduce_max_sync(~0U, static_cast<uint32_t>(value_of_rank(v)));
    }
  }

  /// Tells all CTAs the sums of shared_.warp_values.
  __device__ void publish_sums() {
    const int lane = lane_of_thread();
    __syncthreads();
    if (warp_of_thread() == 0) {
      uint64_t values[kValues] = {};
      for (int v = 0; v < 2; ++v) {
        values[v] = sum_of_warp(lane < kRowWarps ? shared_.warp_values[lane][v] : 0);
      }
      publish(values);
    }
    cluster_sync();
    ++step_;
  }

  /// Writes values to all CTAs, by one warp; a cluster_sync() and ++step_ are due. A set is written
  /// again two steps later: by then all have passed the barrier of the step between, and read this
  /// one.
  __device__ void publish(const uint64_t (&values)[kValues]) {
    const int rank = lane_of_thread();
    if (rank >= cluster_size()) return;
    uint64_t* to = shared_of(&shared_.values[step_ % 2][cluster_rank()][0], rank);
    for (int v = 0; v < kValues; ++v) to[v] = values[v];
  }

  /// Of the last step, of the rank that the lane has; 0 where there is none.
  __device__ uint64_t value_of_rank(int v) const {
    const int lane = lane_of_thread();
    return lane < cluster_size() ? shared_.values[(step_ - 1) % 2][lane][v] : 0;
  }

  const SampleParams& p_;
  int32_t row_;
  Shared& shared_;
  uint64_t* groups_;  // of the bins of each rank
  RowPart<kDType> part_;
  sampling::Scale scale_{};
  float largest_ = 0.0F;
  uint32_t bound_ = 0;  // a key that top_k values reach, or at most that of -inf
  uint32_t least_ = 0;  // of the candidates
  uint32_t most_ = 0;
  bool has_too_many_ = false;        // candidates: the lists do not have all
  bool has_candidates_ = false;      // and the masses above them of each CTA
  bool has_all_candidates_ = false;  // nothing that is kept is above them
  bool bins_are_read_ = false;       // by other CTAs
  unsigned step_ = 0;                // of the exchange
};

template <DType kDType, bool kFromProbs>
__global__ void __launch_bounds__(kRowThreads, kRowCtasOfSm)
    sample_kernel(const __grid_constant__ KernelParams params) {
  __shared__ Shared shared;
  extern __shared__ float4 memory[];
  Sampler<kDType, kFromProbs>(params, row_of_cluster(), shared, reinterpret_cast<float*>(memory))
      .run();
}

}  // namespace

Status sample(const SampleParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    KernelParams params{p, {}};
    // Few rows: as many CTAs as run at once. Many: fewer barriers for an element.
    const int64_t most = int64_t{kRowCtasOfSm} * device_facts(device.index).num_sms;
    const bool is_large = int64_t{p.num_rows} * kMaxCluster <= most;
    const Grid grid =
        split_rows(p.num_rows, p.vocab, device, is_large ? kMaxCluster : kMaxCluster / 2,
                   kGroups * static_cast<int>(sizeof(uint64_t)), &params.split);
    constexpr DType kDType = decltype(dtype)::value;
    return launch(p.from_probs ? sample_kernel<kDType, true> : sample_kernel<kDType, false>, grid,
                  device, stream, params);
  });
}

}  // namespace flashplan::cuda
