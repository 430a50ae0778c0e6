// SPDX-License-Identifier: Apache-2.0
// A row that sample() draws from, as a cluster of CTAs has it: its values, their weights, and what
// the CTAs tell each other. All that is added is integers, so any order gives the CPU's results.
#pragma once

#include <cmath>
#include <cstdint>

#include "flashplan/sampling.h"
#include "ops/cuda/formats.h"
#include "ops/cuda/sample/exchange.h"
#include "ops/cuda/sample/row_bins.h"
#include "ops/cuda/sample/row_part.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {

using sampling::Cut;

constexpr int kMaxCandidates = 768;  // candidates of a row; each CTA may list an equal share
constexpr int kMostFew = 160;        // the most candidates that are compared each with each
constexpr int kFewPadding = 32;      // zeros behind these candidates, for unrolled loops to read
constexpr int kValues = 4;           // values that a CTA sends in a step of Exchange

/// The shared memory of a CTA.
struct SampleShared {
  BulkBarrier arrived[kBulks];           // for the copies that load the CTA's part
  Mailbox mail[2];                       // of even and odd exchanges: a CTA may be one ahead
  Mailbox lists;                         // for the lists of candidates
  Mailbox gathered_mail;                 // for `gathered`, in the first CTA of the row
  uint64_t warp_values[kMaxCluster][2];  // two values of each warp, or of each CTA
  uint32_t warp_keys[kRowWarps];
  union {
    Bins bins;
    uint64_t gathered[kMaxCandidates];  // keys and ids of all CTAs' candidates
  };
  Bin group;  // the group of bins that find_bin_of_row() finds
  Bin found;  // the bin in this group
  union {
    alignas(16) uint32_t candidates[kMaxCandidates];  // keys: the list of CTA 0, of CTA 1 ...
    uint64_t largest[kMaxCluster][kRowWarps];         // the two largest keys of each warp
    uint4 few[kMostFew + kFewPadding];  // ~id, key, weight, and again the weight if it is kept
    uint64_t sums[kRowWarps][kValues];  // sums of each warp
  };
  uint32_t num_candidates;  // this CTA's candidates, with those that have no place in its list
  KeyRange keys;            // smallest and largest key of its candidates
  uint32_t selected[2];     // the ends of a range of bins
  uint64_t own_above;       // the mass of this CTA's elements above the candidates
  uint64_t wanted;          // the count or mass that the threshold must reach
  bool goes_on;             // whether the token is in this CTA's part
  int32_t tie_end;          // the ties of this CTA's part before this place are kept
  uint64_t target, ties_before, total;
  uint64_t counted;  // the mass of which top-p keeps a part; 0: that of what other filters keep
  float temperature, top_p, min_p;  // the row's parameters
  int32_t top_k;
  uint64_t random;
};

static_assert(sizeof(SampleShared) <= 10 * 1024, "three CTAs of 16,128 elements must fit an SM");

/// The dynamic shared memory that SampleRow::exchange needs for each CTA of the cluster: what that
/// CTA sends in two steps.
constexpr int kBytesOfRank = 2 * kValues * sizeof(uint64_t);

/// -0 has the key of +0.
__device__ inline uint32_t key_of(float x) { return sampling::key_of(__fadd_rn(x, 0.0F)); }

/// The larger one, or NaN if one of them is NaN.
__device__ inline float larger_or_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || a > b ? a : b;
#endif
}

/// log(part / all). It is not inlined: it is as much code as a loop over a row, and only draws with
/// log-probabilities need it.
__device__ __noinline__ inline float log_of_ratio(double part, double all) {
  return static_cast<float>(log(part / all));
}

/// Writes the result of a row.
__device__ inline void write_result(const SampleParams& p, int32_t row, int32_t id, float logprob,
                                    SampleError error) {
  p.ids[row] = id;
  if (p.logprobs != nullptr) p.logprobs[row] = logprob;
  if (p.status != nullptr) p.status[row] = static_cast<int32_t>(error);
}

/// Writes a token, and the logarithm of its probability, part / all.
__device__ inline void write_token(const SampleParams& p, int32_t row, int32_t id, double part,
                                   double all) {
  const float logprob = p.logprobs != nullptr ? log_of_ratio(part, all) : 0.0F;
  write_result(p, row, id, logprob, SampleError::kNone);
}

/// Whether a request has no row of the logits to draw from; writes the error.
__device__ inline bool is_without_row(const SampleParams& p, int32_t row) {
  if (p.logits_row(row) >= 0) return false;
  if (is_first_thread_of_cluster()) write_result(p, row, -1, NAN, SampleError::kRow);
  return true;
}

/// The sums of a value over the threads of the CTA before this one, and over all.
struct SumsOfCta {
  uint64_t before;
  uint64_t all;
};
/// Adds up `own` over the threads; the sum must be below 2^54. `of_warps` is shared memory. All
/// threads of the CTA call it; a barrier is inside, and one is due before `of_warps` is written
/// again.
__device__ inline SumsOfCta sums_of_cta(uint64_t own, uint64_t (&of_warps)[kMaxCluster][2]) {
  const uint64_t to_lane = sum_to_lane(own);
  const int lane = lane_of_thread();
  const int warp = warp_of_thread();
  if (lane == 31) of_warps[warp][0] = to_lane;
  __syncthreads();
  const uint64_t of_warp = lane < kRowWarps ? of_warps[lane][0] : 0;
  return {sum_of_warp(lane < warp ? of_warp : 0) + to_lane - own, sum_of_warp(of_warp)};
}

/// The sum of a value over the threads of the CTA, which must be below 2^54. `of_warps` is shared
/// memory. All threads of the CTA call it. It ends with a barrier, so `of_warps` may be written
/// again at once.
__device__ inline uint64_t sum_of_cta(uint64_t value, uint64_t (&of_warps)[kMaxCluster][2]) {
  value = sum_of_warp(value);
  const int lane = lane_of_thread();
  if (lane == 0) of_warps[warp_of_thread()][0] = value;
  __syncthreads();
  value = sum_of_warp(lane < kRowWarps ? of_warps[lane][0] : 0);
  __syncthreads();
  return value;
}

/// Extends shared.keys to the keys that all threads of the CTA have in `own`. All of them call it,
/// and see the result when it returns.
__device__ inline void share_keys(SampleShared& shared, const KeyRange& own) {
  const uint32_t least = ~__reduce_max_sync(~0U, ~own.least);
  const uint32_t most = __reduce_max_sync(~0U, own.most);
  if (lane_of_thread() == 0) {
    atomicMin(&shared.keys.least, least);
    atomicMax(&shared.keys.most, most);
  }
  __syncthreads();
}

/// The error of a row of logits whose largest element is `largest`, or NaN if an element is NaN.
__device__ inline SampleError error_of_logits(float largest) {
  if (!(largest < INFINITY)) return SampleError::kNotANumber;
  return largest == -INFINITY ? SampleError::kNoToken : SampleError::kNone;
}

__device__ inline SampleError error_of_parameters(float temperature, int32_t top_k, float top_p,
                                                  float min_p) {
  if (!(temperature >= 0.0F && temperature < INFINITY)) return SampleError::kTemperature;
  if (top_k < 1) return SampleError::kTopK;
  if (!(top_p > 0.0F && top_p <= 1.0F)) return SampleError::kTopP;
  if (!(min_p >= 0.0F && min_p <= 1.0F)) return SampleError::kMinP;
  return SampleError::kNone;
}

/// A row and the state of its draw. All threads of the cluster call its functions together, and
/// also the functions of other files that take a Row, which are the steps of sample().
template <DType kDType, bool kFromProbs, bool kHeld>
struct SampleRow {
  static constexpr bool kIsFromProbs = kFromProbs;

  __device__ SampleRow(const SampleParams& p, const RowSplit& split, SampleShared& shared,
                       float* memory)
      : p(p),
        shared(shared),
        exchange(shared.mail, reinterpret_cast<uint64_t*>(memory + (kHeld ? split.part : 0))),
        groups(exchange.end()),
        part({p.logits, p.row_stride, p.bias, p.bias_stride}, p.logits_row(index()), p.vocab, split,
             memory, kFromProbs ? 0.0F : -INFINITY) {}

  /// The number of the request. It is not stored, which saves a register.
  __device__ static int32_t index() { return row_of_cluster(); }

  __device__ void write(int32_t id, float logprob, SampleError error) const {
    write_result(p, index(), id, logprob, error);
  }

  /// Reads the row's parameters. One thread calls it, and the others see them after a barrier.
  /// Parameters that are tensors are loaded while the logits are on their way.
  __device__ void read_parameters() {
    shared.temperature = p.temperature.of(index());
    shared.top_k = p.top_k.of(index());
    shared.top_p = p.top_p.of(index());
    shared.min_p = p.min_p.of(index());
    shared.counted = 0;
    shared.random = sampling::random_of_try(p, index(), 0).first;
  }

  __device__ SampleError error_of_parameters() const {
    return cuda::error_of_parameters(shared.temperature, shared.top_k, shared.top_p, shared.min_p);
  }
  __device__ bool has_filters() const {
    return sampling::has_filters(shared.top_k, shared.top_p, shared.min_p, p.vocab);
  }

  // --- Elements and their weights ---

  __device__ void read(int i, float (&x)[4]) const {
    const float4 word = part.word(i);
    x[0] = word.x;
    x[1] = word.y;
    x[2] = word.z;
    x[3] = word.w;
  }

  /// Calls body(i) for those of this thread's words that have an element of at least `low`. Word n
  /// begins at element i = begin + n * step, which is below `end`. A thread tests 32 words before
  /// it calls body() for those that it found. So the lanes of a warp are in body() at the same
  /// time, even if their words have different numbers n.
  template <class Body>
  __device__ void for_words_from(float low, int begin, int end, int step, const Body& body) const {
    constexpr int kAtOnce = 32;
#pragma unroll 1
    for (; begin < end; begin += kAtOnce * step) {
      unsigned words = 0;
      const int last = min(begin + kAtOnce * step, end);
#pragma unroll 2
      for (int i = begin, word = 0; i < last; i += step, ++word) {
        float x[4];
        read(i, x);
        const bool reaches = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) >= low;
        words |= reaches ? 1U << word : 0U;
      }
#pragma unroll 1
      for (; words != 0; words &= words - 1) {
        body(begin + (__ffs(static_cast<int>(words)) - 1) * step);
      }
    }
  }

  __device__ uint32_t weight_of(float x) const {
    return kFromProbs ? sampling::weight_of_probability(x, scale)
                      : sampling::weight_of_logit(x, scale);
  }
  /// The weight of an element of value x; 0 if min-p drops it.
  __device__ uint32_t kept_weight_of(float x, const Cut& cut) const {
    const uint32_t weight = weight_of(x);
    return weight >= cut.min_weight ? weight : 0U;
  }

  /// The largest distance below the row's largest logit at which min-p may keep a logit. The weight
  /// at this distance rounds to `min_weight`, which is not 0.
  __device__ float depth_of_min_p(uint32_t min_weight) const {
    const float distance = (30.0F - log2f(static_cast<float>(min_weight) - 0.5F)) / 32.0F;
    return __fdiv_rn(distance * 1.0001F + 1e-6F, scale.factor);
  }
  /// A lower bound of the values that min-p keeps.
  __device__ float least_of_min_p(uint32_t min_weight) const {
    if (!kFromProbs) return largest - depth_of_min_p(min_weight);
    return (static_cast<float>(min_weight) - 1.0F) * 0.9999F / 1073741824.0F * largest;
  }

  __device__ uint32_t weight_of_tie(const Cut& cut) const {
    if (cut.num_ties == 0) return 0;
    return kept_weight_of(sampling::value_of(cut.key), cut);
  }

  // --- What CTAs tell each other ---

  /// The largest key over the cluster. All threads call it; a barrier of the CTA is inside.
  __device__ uint32_t largest_of_cluster(uint32_t key) {
    const int lane = lane_of_thread();
    key = __reduce_max_sync(~0U, key);
    if (lane == 0) shared.warp_keys[warp_of_thread()] = key;
    __syncthreads();
    if (warp_of_thread() == 0) {
      const uint32_t of_warp = lane < kRowWarps ? shared.warp_keys[lane] : 0;
      exchange.publish({__reduce_max_sync(~0U, of_warp), 0, 0, 0});
    }
    exchange.receive();
    return __reduce_max_sync(~0U, static_cast<uint32_t>(exchange.value_of_rank(0)));
  }

  __device__ uint64_t sum_of_cta(uint64_t value) const {
    return cuda::sum_of_cta(value, shared.warp_values);
  }
  /// The memory for a search by this CTA alone. Of `groups` it has only this CTA's place, because
  /// other CTAs may already be sending to their places.
  __device__ KeySearch search() const {
    return {shared.bins, groups + cluster_rank() * kGroups, shared.found};
  }

  /// Tells all CTAs the sums of shared.warp_values over the warps.
  __device__ void publish_sums() {
    const int lane = lane_of_thread();
    __syncthreads();
    if (warp_of_thread() == 0) {
      uint64_t values[kValues] = {};
      for (int v = 0; v < 2; ++v) {
        values[v] = sum_of_warp(lane < kRowWarps ? shared.warp_values[lane][v] : 0);
      }
      exchange.publish(values);
    }
    exchange.receive();
  }

  const SampleParams& p;
  SampleShared& shared;
  Exchange<kValues> exchange;
  uint64_t* groups;  // sums of the groups of bins of each CTA
  RowPart<kDType, kHeld> part;
  sampling::Scale scale{};
  float largest = 0.0F;

  // For the search of a threshold (see threshold.h).
  KeyRange keys{};  // those that a histogram divides, or those of the candidates
  uint32_t num_gathers = 0;
  bool lists_have_bins = false;  // the memory of the lists has bins, which CTAs may still read
  bool has_too_many = false;     // the lists have no room for all candidates, so some are missing
  bool has_candidates = false;   // the lists have all, and the mass above these is known
  bool has_all_candidates = false;  // besides, no kept element is above the candidates
};

}  // namespace flashplan::cuda
