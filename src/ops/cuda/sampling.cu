// SPDX-License-Identifier: Apache-2.0
// sample() on CUDA: a cluster of CTAs has a row in its shared memory. Thresholds of top-k and top-p
// are found digit by digit of the ordered float (radix selection), by histograms of counts or of
// integer weights. All that is added is integers, so any order gives the CPU's results.
#include <cmath>
#include <cstdint>

#include "flashplan/sampling.h"
#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/row_part.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {
namespace {

using sampling::Cut;

constexpr int kBins = 256;
constexpr int kCopies = 4;            // of a histogram, by lane: lanes meet less often at a bin
constexpr int kMostAtOnce = 1 << 15;  // elements whose 16-bit halves of weights fit a 32-bit sum
static_assert(kBins <= kRowThreads);

/// What the CTAs of a cluster tell each other: two sets, since a CTA may be a step ahead.
struct Exchange {
  uint64_t values[2][kMaxCluster][3];
  uint64_t bins[2][kBins];
};

struct Shared {
  Exchange exchange;
  uint32_t low[kCopies][kBins];
  uint32_t high[kCopies][kBins];
  uint64_t merged[kBins];
  uint64_t warp_values[kRowWarps][3];
  uint64_t found[2];
};

static_assert(sizeof(Shared) <= 16 * 1024);

struct Sum {
  static __device__ uint64_t of(uint64_t a, uint64_t b) { return a + b; }
};
struct Max {
  static __device__ uint64_t of(uint64_t a, uint64_t b) { return a > b ? a : b; }
};

template <class Op>
__device__ uint64_t reduce_warp(uint64_t value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = Op::of(value, __shfl_xor_sync(~0U, value, distance));
  }
  return value;
}

/// A parameter of `sample` and the split of its rows.
struct KernelParams {
  SampleParams p;
  RowSplit split;
};

/// One row. All threads of the cluster go through all calls together.
template <DType kDType>
class Sampler {
 public:
  __device__ Sampler(const KernelParams& params, int32_t row, Shared& shared, float* memory)
      : p_(params.p),
        row_(row),
        shared_(shared),
        part_(params.p.logits + row * params.p.row_stride,
              params.p.bias == nullptr ? nullptr : params.p.bias + row * params.p.bias_stride,
              params.p.vocab, params.split, memory) {}

  __device__ void run() {
    const SampleError error = choose();
    // A CTA's shared memory must live until all have read it.
    cluster_sync();
    if (threadIdx.x != 0) return;
    if (error != SampleError::kNone && cluster_rank() == 0) write(-1, NAN, error);
  }

 private:
  __device__ void write(int32_t id, float logprob, SampleError error) const {
    p_.ids[row_] = id;
    if (p_.logprobs != nullptr) p_.logprobs[row_] = logprob;
    if (p_.status != nullptr) p_.status[row_] = static_cast<int32_t>(error);
  }

  /// Draws and writes the token, or returns why there is none.
  __device__ SampleError choose() {
    const float temperature = p_.temperature.of(row_);
    const int32_t top_k = p_.top_k.of(row_);
    const float top_p = p_.top_p.of(row_);
    const float min_p = p_.min_p.of(row_);
    if (!(temperature >= 0.0F && temperature < INFINITY)) return SampleError::kTemperature;
    if (top_k < 1) return SampleError::kTopK;
    if (!(top_p > 0.0F && top_p <= 1.0F)) return SampleError::kTopP;
    if (!(min_p >= 0.0F && min_p <= 1.0F)) return SampleError::kMinP;

    const SampleError error = load();
    if (error != SampleError::kNone) return error;
    if (temperature == 0.0F) return take_largest();
    scale_ = sampling::make_scale(largest_, temperature, p_.from_probs);
    if (p_.from_probs) {
      if (!sampling::sums_to_one(total_mass(sampling::keep_all(0)), largest_)) {
        return SampleError::kProbabilities;
      }
    }

    Cut cut = sampling::keep_all(sampling::least_weight(min_p));
    if (top_k < p_.vocab) {
      const uint64_t above = find_threshold<false>(&cut, static_cast<uint64_t>(top_k));
      cut.num_ties = static_cast<uint32_t>(top_k - above);
    }
    if (top_p < 1.0F) {
      uint64_t above = total_mass(cut);
      const uint64_t total = above + uint64_t{cut.num_ties} * weight_of_tie(cut);
      const uint64_t wanted = sampling::part_of(top_p, total);
      if (above >= wanted) {
        above = find_threshold<true>(&cut, wanted);
        cut.num_ties = 1;
      }
      cut.num_ties = sampling::ties_to_reach(wanted, above, weight_of_tie(cut));
    }
    draw(cut);
    return SampleError::kNone;
  }

  /// Loads the part; finds the row's largest value and what is wrong with the row.
  __device__ SampleError load() {
    float largest = -INFINITY;
    float smallest = INFINITY;
    bool has_nan = false;
    part_.load([&](float x) {
      largest = fmaxf(largest, x);  // passes over NaN
      smallest = fminf(smallest, x);
      has_nan = has_nan || x != x;
    });
    uint64_t values[3] = {sampling::key_of(largest), ~sampling::key_of(smallest),
                          has_nan ? 1U : 0U};
    all_reduce<Max>(values);
    largest_ = sampling::value_of(static_cast<uint32_t>(values[0]));
    smallest = sampling::value_of(~static_cast<uint32_t>(values[1]));
    if (values[2] != 0) return SampleError::kNotANumber;
    if (p_.from_probs) {
      const bool fits = smallest >= 0.0F && largest_ > 0.0F && largest_ <= 1.01F;
      return fits ? SampleError::kNone : SampleError::kProbabilities;
    }
    if (largest_ == INFINITY) return SampleError::kNotANumber;
    return largest_ == -INFINITY ? SampleError::kNoToken : SampleError::kNone;
  }

  /// The first id of the largest value.
  __device__ SampleError take_largest() {
    uint32_t first = ~0U;
    for (int i = static_cast<int>(threadIdx.x); i < part_.count(); i += kRowThreads) {
      if (part_.at(i) == largest_) first = min(first, static_cast<uint32_t>(part_.begin() + i));
    }
    uint64_t values[3] = {~first, 0, 0};
    all_reduce<Max>(values);
    if (cluster_rank() == 0 && threadIdx.x == 0) {
      write(static_cast<int32_t>(~static_cast<uint32_t>(values[0])), 0.0F, SampleError::kNone);
    }
    return SampleError::kNone;
  }

  __device__ uint32_t weight_of_tie(const Cut& cut) const {
    if (cut.num_ties == 0) return 0;
    const uint32_t weight = sampling::weight_of(sampling::value_of(cut.key), scale_);
    return weight >= cut.min_weight ? weight : 0;
  }

  /// The weights above the cut's key, over the row.
  __device__ uint64_t total_mass(const Cut& cut) {
    uint64_t values[3] = {};
    for (int i = static_cast<int>(threadIdx.x); i < part_.count(); i += kRowThreads) {
      const float x = part_.at(i);
      const uint32_t weight = sampling::weight_of(x, scale_);
      if (sampling::key_of(x) > cut.key && weight >= cut.min_weight) values[0] += weight;
    }
    all_reduce<Sum>(values);
    return values[0];
  }

  /// The largest key such that the values from it on have a count, or a mass, of `wanted`, which
  /// values above cut->key reach; it replaces that. Returns the count or mass above the new key.
  template <bool kByWeight>
  __device__ uint64_t find_threshold(Cut* cut, uint64_t wanted) {
    uint32_t prefix = 0;
    uint64_t above = 0;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
      make_histogram<kByWeight>(*cut, prefix, shift);
      find_bin(wanted, above);
      above = shared_.found[0];
      prefix |= static_cast<uint32_t>(shared_.found[1]) << shift;
    }
    cut->key = prefix;
    return above;
  }

  /// Leaves in shared_.merged the histogram, over the row, of the digit at `shift` of the keys that
  /// begin with `prefix`.
  template <bool kByWeight>
  __device__ void make_histogram(const Cut& cut, uint32_t prefix, int shift) {
    const int thread = static_cast<int>(threadIdx.x);
    const uint32_t mask = shift == 24 ? 0U : ~0U << (shift + 8);
    const int set = step_ % 2;
    if (thread < kBins) shared_.exchange.bins[set][thread] = 0;
    for (int begin = 0; begin < part_.count(); begin += kMostAtOnce) {
      for (int i = thread; i < kBins * kCopies; i += kRowThreads) {
        (&shared_.low[0][0])[i] = 0;
        (&shared_.high[0][0])[i] = 0;
      }
      __syncthreads();
      const int end = min(begin + kMostAtOnce, part_.count());
      for (int first = begin; first < end; first += kRowThreads) {
        const int i = first + thread;
        const float x = i < end ? part_.at(i) : 0.0F;
        const uint32_t key = sampling::key_of(x);
        bool takes_part = i < end && (key & mask) == prefix;
        uint32_t amount = 1;
        if constexpr (kByWeight) {
          amount = takes_part && key > cut.key ? sampling::weight_of(x, scale_) : 0U;
          takes_part = amount != 0 && amount >= cut.min_weight;
        }
        count<kByWeight>(takes_part, (key >> shift) & (kBins - 1), amount);
      }
      __syncthreads();
      if (thread < kBins) {
        uint64_t sum = 0;
        for (int copy = 0; copy < kCopies; ++copy) {
          sum += shared_.low[copy][thread] + (uint64_t{shared_.high[copy][thread]} << 16);
        }
        shared_.exchange.bins[set][thread] += sum;
      }
      __syncthreads();
    }
    cluster_sync();
    if (thread < kBins) {
      uint64_t sum = 0;
      for (int rank = 0; rank < cluster_size(); ++rank) {
        sum += *shared_of(&shared_.exchange.bins[set][thread], rank);
      }
      shared_.merged[thread] = sum;
    }
    ++step_;
    __syncthreads();
  }

  /// Adds `amount` to a bin. Lanes of one bin, as of equal values, are added up first.
  template <bool kByWeight>
  __device__ void count(bool takes_part, uint32_t bin, uint32_t amount) {
    const unsigned lanes = __ballot_sync(~0U, takes_part);
    if (lanes == 0) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int leader = __ffs(static_cast<int>(lanes)) - 1;
    const uint32_t bin_of_leader = __shfl_sync(~0U, bin, leader);
    uint32_t low = takes_part ? amount & 0xffffU : 0U;
    uint32_t high = takes_part ? amount >> 16 : 0U;
    if (__all_sync(~0U, !takes_part || bin == bin_of_leader)) {
      low = __reduce_add_sync(~0U, low);
      if (kByWeight) high = __reduce_add_sync(~0U, high);
      takes_part = lane == leader;
    }
    if (!takes_part) return;
    atomicAdd(&shared_.low[lane % kCopies][bin], low);
    if (kByWeight && high != 0) atomicAdd(&shared_.high[lane % kCopies][bin], high);
  }

  /// shared_.found = {what is above the bin, the bin} at which the histogram, from its end, and
  /// `above` reach `wanted`.
  __device__ void find_bin(uint64_t wanted, uint64_t above) {
    constexpr int kOfLane = kBins / 32;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < 32) {
      // Lane 0 has the last bins.
      uint64_t sums[kOfLane];
      uint64_t own = 0;
      for (int i = 0; i < kOfLane; ++i) {
        sums[i] = shared_.merged[kBins - 1 - thread * kOfLane - i];
        own += sums[i];
      }
      uint64_t before = own;
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t other = __shfl_up_sync(~0U, before, distance);
        if (thread >= distance) before += other;
      }
      before += above - own;
      const unsigned reached = __ballot_sync(~0U, before + own >= wanted);
      if (reached != 0 && thread == __ffs(static_cast<int>(reached)) - 1) {
        int i = 0;
        while (i < kOfLane - 1 && before + sums[i] < wanted) before += sums[i++];
        shared_.found[0] = before;
        shared_.found[1] = static_cast<uint64_t>(kBins - 1 - thread * kOfLane - i);
      }
    }
    __syncthreads();
  }

  /// Draws from what the cut keeps and writes the token: kept weights are added in the order of
  /// ids, over CTAs, then over warps, each of which has a segment of the part, then in the segment.
  __device__ void draw(const Cut& cut) {
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32;
    const int lane = thread % 32;
    const int segment = (part_.count() + kRowThreads - 1) / kRowThreads * 32;
    const int begin = min(warp * segment, part_.count());
    const int end = min(begin + segment, part_.count());
    uint64_t mass = 0;
    uint64_t ties = 0;
    for (int i = begin + lane; i < end; i += 32) {
      const float x = part_.at(i);
      const uint32_t key = sampling::key_of(x);
      const uint32_t weight = sampling::weight_of(x, scale_);
      if (key > cut.key && weight >= cut.min_weight) mass += weight;
      ties += key == cut.key ? 1 : 0;
    }
    mass = reduce_warp<Sum>(mass);
    ties = reduce_warp<Sum>(ties);
    if (lane == 0) {
      shared_.warp_values[warp][0] = mass;
      shared_.warp_values[warp][1] = ties;
    }
    __syncthreads();
    uint64_t of_cta[3] = {};
    for (int w = 0; w < kRowWarps; ++w) {
      of_cta[0] += shared_.warp_values[w][0];
      of_cta[1] += shared_.warp_values[w][1];
    }
    const int set = step_ % 2;
    publish(of_cta, set);
    cluster_sync();
    ++step_;

    const uint32_t tie = weight_of_tie(cut);
    const auto kept = [&](uint64_t above, uint64_t num_ties, uint64_t ties_before) {
      return above +
             uint64_t{sampling::kept_ties(cut, ties_before, static_cast<uint32_t>(num_ties))} * tie;
    };
    uint64_t total = 0;
    uint64_t ties_before = 0;
    for (int rank = 0; rank < cluster_size(); ++rank) {
      const uint64_t* of_rank = shared_.exchange.values[set][rank];
      total += kept(of_rank[0], of_rank[1], ties_before);
      ties_before += of_rank[1];
    }
    const uint64_t random =
        sampling::random_bits(p_.seed.of(row_), p_.offset.of(row_), p_.stream(row_), 0);
    uint64_t target = sampling::high_product(random, total);
    ties_before = 0;
    for (int rank = 0; rank < cluster_rank(); ++rank) {
      const uint64_t* of_rank = shared_.exchange.values[set][rank];
      const uint64_t passed = kept(of_rank[0], of_rank[1], ties_before);
      if (target < passed) return;  // the token is in a CTA before
      target -= passed;
      ties_before += of_rank[1];
    }
    if (target >= kept(of_cta[0], of_cta[1], ties_before)) return;
    for (int w = 0; w < warp; ++w) {
      const uint64_t passed =
          kept(shared_.warp_values[w][0], shared_.warp_values[w][1], ties_before);
      if (target < passed) return;
      target -= passed;
      ties_before += shared_.warp_values[w][1];
    }
    if (target >= kept(mass, ties, ties_before)) return;

    for (int first = begin; first < end; first += 32) {
      const int i = first + lane;
      const float x = i < end ? part_.at(i) : 0.0F;
      const uint32_t key = i < end ? sampling::key_of(x) : 0U;
      const uint32_t weight = i < end ? sampling::weight_of(x, scale_) : 0U;
      const bool is_tie = i < end && key == cut.key;
      const unsigned tie_lanes = __ballot_sync(~0U, is_tie);
      const auto tie_rank =
          ties_before + static_cast<uint64_t>(__popc(tie_lanes & ((1U << lane) - 1)));
      uint64_t own = 0;
      if (i < end && key > cut.key && weight >= cut.min_weight) own = weight;
      if (is_tie && tie_rank < cut.num_ties) own = tie;
      uint64_t passed = own;
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t other = __shfl_up_sync(~0U, passed, distance);
        if (lane >= distance) passed += other;
      }
      const unsigned reached = __ballot_sync(~0U, passed > target);
      if (reached != 0) {
        if (lane == __ffs(static_cast<int>(reached)) - 1) {
          const double chance = static_cast<double>(own) / static_cast<double>(total);
          write(part_.begin() + i, static_cast<float>(log(chance)), SampleError::kNone);
        }
        return;
      }
      target -= __shfl_sync(~0U, passed, 31);
      ties_before += static_cast<uint64_t>(__popc(tie_lanes));
    }
  }

  /// Reduces over all threads of the cluster; all get the results.
  template <class Op>
  __device__ void all_reduce(uint64_t (&values)[3]) {
    const int thread = static_cast<int>(threadIdx.x);
    for (uint64_t& value : values) value = reduce_warp<Op>(value);
    if (thread % 32 == 0) {
      for (int v = 0; v < 3; ++v) shared_.warp_values[thread / 32][v] = values[v];
    }
    __syncthreads();
    for (int v = 0; v < 3; ++v) {
      values[v] = shared_.warp_values[0][v];
      for (int w = 1; w < kRowWarps; ++w) {
        values[v] = Op::of(values[v], shared_.warp_values[w][v]);
      }
    }
    const int set = step_ % 2;
    publish(values, set);
    cluster_sync();  // warp_values may be written again, too
    ++step_;
    for (int v = 0; v < 3; ++v) {
      values[v] = shared_.exchange.values[set][0][v];
      for (int rank = 1; rank < cluster_size(); ++rank) {
        values[v] = Op::of(values[v], shared_.exchange.values[set][rank][v]);
      }
    }
  }

  /// Writes this CTA's values to all CTAs; a cluster_sync() is still due. A set is written again
  /// two steps later: by then all have passed the barrier of the step between, and read this one.
  __device__ void publish(const uint64_t (&values)[3], int set) {
    const int rank = static_cast<int>(threadIdx.x);
    if (rank >= cluster_size()) return;
    uint64_t* to = shared_of(&shared_.exchange.values[set][cluster_rank()][0], rank);
    for (int v = 0; v < 3; ++v) to[v] = values[v];
  }

  const SampleParams& p_;
  int32_t row_;
  Shared& shared_;
  RowPart<kDType> part_;
  sampling::Scale scale_{};
  float largest_ = 0.0F;
  int step_ = 0;  // of the exchange
};

template <DType kDType>
__global__ void __launch_bounds__(kRowThreads)
    sample_kernel(const __grid_constant__ KernelParams params) {
  __shared__ Shared shared;
  extern __shared__ float4 memory[];
  Sampler<kDType>(params, row_of_cluster(), shared, reinterpret_cast<float*>(memory)).run();
}

}  // namespace

Status sample(const SampleParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    KernelParams params{p, {}};
    const Grid grid = split_rows(p.num_rows, p.vocab, device, &params.split);
    return launch(sample_kernel<decltype(dtype)::value>, grid, device, stream, params);
  });
}

}  // namespace flashplan::cuda
