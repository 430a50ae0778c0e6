// SPDX-License-Identifier: Apache-2.0
// sample() on CUDA: a cluster of CTAs has a row in its shared memory. Thresholds of top-k and top-p
// are found digit by digit of the ordered float (radix selection), by histograms of counts or of
// integer weights. All that is added is integers, so any order gives the CPU's results.
#include <cmath>
#include <cstdint>

#include "flashplan/sampling.h"
#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/row_draw.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {
namespace {

constexpr int kBins = 256;
constexpr int kCopies = 4;            // of a histogram, by lane: lanes meet less often at a bin
constexpr int kMostAtOnce = 1 << 15;  // elements whose 16-bit halves of weights fit a 32-bit sum
static_assert(kBins <= kRowThreads);

struct Shared {
  RowExchange exchange;
  uint64_t bins[2][kBins];  // of the CTAs of a cluster, two sets as in `exchange`
  uint32_t low[kCopies][kBins];
  uint32_t high[kCopies][kBins];
  uint64_t merged[kBins];
  uint64_t found[2];
};

static_assert(sizeof(Shared) <= 16 * 1024);

/// A parameter of `sample` and the split of its rows.
struct KernelParams {
  SampleParams p;
  RowSplit split;
};

/// One row. All threads of the cluster go through all calls together.
template <DType kDType>
class Sampler : RowDraw<RowPart<kDType>> {
 public:
  __device__ Sampler(const KernelParams& params, int32_t row, Shared& shared, float* memory)
      : Base({params.p.logits + row * params.p.row_stride,
              params.p.bias == nullptr ? nullptr : params.p.bias + row * params.p.bias_stride,
              params.p.vocab, params.split, memory},
             shared.exchange),
        p_(params.p),
        row_(row),
        shared_(shared) {}

  __device__ void run() {
    const SampleError error = choose();
    // A CTA's shared memory must live until all have read it.
    cluster_sync();
    if (threadIdx.x != 0) return;
    if (error != SampleError::kNone && cluster_rank() == 0) write(-1, NAN, error);
  }

 private:
  using Base = RowDraw<RowPart<kDType>>;
  using Base::part_;
  using Base::scale_;
  using Base::step_;

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
      if (!sampling::sums_to_one(this->total_mass(sampling::keep_all(0)), largest_)) {
        return SampleError::kProbabilities;
      }
    }

    Cut cut = sampling::keep_all(sampling::least_weight(min_p));
    if (top_k < p_.vocab) {
      const uint64_t above = find_threshold<false>(&cut, static_cast<uint64_t>(top_k));
      cut.num_ties = static_cast<uint32_t>(top_k - above);
    }
    if (top_p < 1.0F) {
      uint64_t above = this->total_mass(cut);
      const uint64_t total = above + uint64_t{cut.num_ties} * this->weight_of_tie(cut);
      const uint64_t wanted = sampling::part_of(top_p, total);
      if (above >= wanted) {
        above = find_threshold<true>(&cut, wanted);
        cut.num_ties = 1;
      }
      cut.num_ties = sampling::ties_to_reach(wanted, above, this->weight_of_tie(cut));
    }
    const uint64_t random = sampling::random_bits(p_.seed.of(row_), p_.offset.of(row_),
                                                  p_.stream(row_), sampling::kUseSample);
    this->draw(cut, random, [&](int32_t id, uint64_t weight, uint64_t total) {
      const double chance = static_cast<double>(weight) / static_cast<double>(total);
      write(id, static_cast<float>(log(chance)), SampleError::kNone);
    });
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
    this->template all_reduce<Max>(values);
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
    this->template all_reduce<Max>(values);
    if (cluster_rank() == 0 && threadIdx.x == 0) {
      write(static_cast<int32_t>(~static_cast<uint32_t>(values[0])), 0.0F, SampleError::kNone);
    }
    return SampleError::kNone;
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
    if (thread < kBins) shared_.bins[set][thread] = 0;
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
        shared_.bins[set][thread] += sum;
      }
      __syncthreads();
    }
    cluster_sync();
    if (thread < kBins) {
      uint64_t sum = 0;
      for (int rank = 0; rank < cluster_size(); ++rank) {
        sum += *shared_of(&shared_.bins[set][thread], rank);
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

  const SampleParams& p_;
  int32_t row_;
  Shared& shared_;
  float largest_ = 0.0F;
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
