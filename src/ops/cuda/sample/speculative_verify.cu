// SPDX-License-Identifier: Apache-2.0
// speculative_verify() on CUDA: a cluster of CTAs verifies the drafts of one request. If no draft
// with the same parent was rejected before, two numbers decide whether a draft is accepted: the
// probability of the draft's token in the target's row, and its probability in the draft's row. So
// the kernel first reads these two numbers for all drafts at once. It reads whole rows only after
// it has rejected a draft, to subtract the draft's row from the target's, and to draw the last
// token.
#include <cstdint>

#include "flashplan/sampling.h"
#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/sample/exchange.h"
#include "ops/cuda/sample/row_bins.h"
#include "ops/cuda/sample/verify_residual.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {
namespace {

/// How many values a CTA sends to each CTA of its cluster in a step of Exchange.
constexpr int kValues = 2;

/// The shared memory of a CTA. From `rejected` on, its members have equal values in all CTAs of a
/// cluster.
struct Shared {
  Mailbox mail[2];
  alignas(16) uint64_t values[2][kMaxCluster][kValues];  // what each CTA sent in the last two steps
  uint64_t warp_values[kRowWarps][kValues];
  Rejected rejected[kMaxDrafts];
  int32_t tokens[kMaxDrafts];
  int32_t parents[kMaxDrafts];
  int32_t nodes[kMaxDrafts];           // accepted nodes
  bool is_accepted_first[kMaxDrafts];  // by draft: accepted if no sibling was rejected before it
};
static_assert(sizeof(Shared) <= 16 * 1024);

/// Verifies the drafts of one request. All threads of the cluster make all calls together.
template <DType kDType, bool kHeld>
class Verifier {
 public:
  __device__ Verifier(const RowParams<VerifyParams>& params, int32_t request, Shared& shared,
                      float* memory)
      : p_(params.p),
        request_(request),
        shared_(shared),
        part_(params, request, shared.rejected, memory),
        exchange_(shared.mail, &shared.values[0][0][0]) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      for (Mailbox& mailbox : shared_.mail) mailbox.init();
      Mailbox::fence_init();
    }
    cluster_arrive_relaxed();
    SampleError error = read_drafts();
    cluster_wait();  // all CTAs have begun: their shared memory can be written to
    if (error == SampleError::kNone) error = walk();
    if (cluster_rank() == 0) write(error);
  }

 private:
  __device__ uint64_t random(uint32_t use) const {
    return sampling::random_bits(p_.seed_of(request_), p_.offset_of(request_), p_.stream(request_),
                                 use);
  }

  /// Reads the drafts into shared memory. Returns the error of a wrong draft, if there is one.
  __device__ SampleError read_drafts() {
    bool is_wrong = false;
    for (int i = static_cast<int>(threadIdx.x); i < p_.num_drafts; i += kRowThreads) {
      const auto id = static_cast<int32_t>(p_.token(request_, i));
      const int32_t parent = p_.parent(request_, i);
      shared_.tokens[i] = id;
      shared_.parents[i] = parent;
      if (p_.is_wrong(request_, i)) {
        is_wrong = true;
      } else if (id >= 0) {
        const float p = probability<kDType>(p_.target_row(request_, parent), id);
        const float q = probability_of_draft<kDType>(p_, request_, i, id);
        shared_.is_accepted_first[i] = sampling::is_accepted(random_of(i), p, q);
      }
    }
    return __syncthreads_or(is_wrong ? 1 : 0) != 0 ? SampleError::kDraft : SampleError::kNone;
  }

  __device__ uint64_t random_of(int32_t draft) const {
    return random(sampling::kUseDraft + static_cast<uint32_t>(draft));
  }

  /// Follows accepted drafts and draws the token behind them. All threads take the same branches.
  __device__ SampleError walk() {
    for (int32_t node = -1;;) {
      part_.begin_row(node);
      float sum = 1.0F;
      int32_t accepted = -1;
      for (int32_t draft = node + 1; draft < p_.num_drafts && accepted < 0; ++draft) {
        const int32_t id = shared_.tokens[draft];
        if (id < 0 || shared_.parents[draft] != node) continue;
        bool is_accepted = shared_.is_accepted_first[draft];
        if (part_.num_rejected > 0) {
          if (largest_ == 0.0F) break;
          scale_ = sampling::make_scale(largest_, 1.0F, true);
          sum = sampling::sum_of_weights(total_weight(), largest_);
          const float q = probability_of_draft<kDType>(p_, request_, draft, id);
          const float p = sampling::ratio(part_.of_id(id), sum);
          is_accepted = sampling::is_accepted(random_of(draft), p, q);
        }
        if (is_accepted) {
          accepted = draft;
        } else if (!reject(draft, sum)) {
          return SampleError::kProbabilities;
        }
      }
      if (accepted < 0) break;
      if (threadIdx.x == 0) shared_.nodes[num_accepted_] = accepted;
      ++num_accepted_;
      node = accepted;
    }
    return draw_token();
  }

  /// Loads the target's row. False: it is no distribution.
  __device__ bool load_target() {
    float largest = 0.0F;
    bool fits = true;
    uint64_t total = 0;
    part_.load([&](float x) {
      largest = fmaxf(largest, x);
      fits = fits && sampling::is_probability(x);
      total += sampling::weight_of_probability(x, sampling::absolute_scale());
    });
    return is_distribution(largest, fits, total);
  }

  /// Reduces over the cluster what its threads found of a row, and sets largest_. Returns whether
  /// the row is a distribution.
  __device__ bool is_distribution(float largest, bool fits, uint64_t total) {
    constexpr uint32_t kKeyOfMisfit = ~0U;
    const KeyAndSum found = reduce({fits ? sampling::key_of(largest) : kKeyOfMisfit, total});
    largest_ = sampling::value_of(found.key);
    return found.key != kKeyOfMisfit && sampling::sums_to_one(found.sum, 1.0F);
  }

  /// Subtracts a draft's distribution from the target's row, whose values sum to `sum`. False: the
  /// target's or the draft's row is no distribution.
  __device__ bool reject(int32_t draft, float sum) {
    if (threadIdx.x == 0) part_.prefetch_draft(draft);
    if (part_.num_rejected == 0 && !load_target()) return false;
    float largest = 0.0F;
    bool fits = true;
    uint64_t total = 0;
    part_.subtract(draft, sum, [&](float rest, float q) {
      largest = fmaxf(largest, rest);
      fits = fits && sampling::is_probability(q);
      total += sampling::weight_of_probability(q, sampling::absolute_scale());
    });
    const bool is_right = is_distribution(largest, fits, total);
    // All threads have read shared_.rejected before the barriers in is_distribution().
    if (threadIdx.x == 0) shared_.rejected[part_.num_rejected] = {draft, sum};
    ++part_.num_rejected;
    __syncthreads();
    return is_right;
  }

  __device__ SampleError draw_token() {
    if (part_.num_rejected == 0 && !load_target()) return SampleError::kProbabilities;
    if (largest_ == 0.0F) load_target();  // rounding has left nothing: draw from the target's row
    scale_ = sampling::make_scale(largest_, 1.0F, true);
    draw(random(sampling::kUseVerify), p_.out + request_ * p_.out_stride + num_accepted_);
    return SampleError::kNone;
  }

  /// Writes all results but the token that was drawn, which draw() writes.
  __device__ void write(SampleError error) const {
    const bool is_right = error == SampleError::kNone;
    const int32_t num_accepted = is_right ? num_accepted_ : 0;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    for (int32_t i = thread; i <= p_.num_drafts; i += kRowThreads) {
      const int32_t node = i < num_accepted ? shared_.nodes[i] : -1;
      if (i != num_accepted || !is_right) {
        p_.out[request_ * p_.out_stride + i] = node < 0 ? -1 : shared_.tokens[node];
      }
      if (p_.nodes != nullptr && i < p_.num_drafts) {
        p_.nodes[request_ * p_.node_stride + i] = node;
      }
    }
    if (thread != 0) return;
    p_.num_accepted[request_] = num_accepted;
    if (p_.status != nullptr) p_.status[request_] = static_cast<int32_t>(error);
  }

  // --- Sums over the row, and the draw ---

  __device__ uint32_t weight(int32_t i) const {
    return sampling::weight_of_probability(part_.at(i), scale_);
  }

  __device__ uint64_t total_weight() {
    uint64_t sum = 0;
    for (int i = static_cast<int>(threadIdx.x); i < part_.count(); i += kRowThreads) {
      sum += weight(i);
    }
    return reduce({0, sum}).sum;
  }

  /// Draws a token from the row; the thread that finds the token writes it. The search goes over
  /// sums of weights in the order of ids: those of the CTAs, of the CTA's warps, and of the warp's
  /// lanes; then over the weights of the lane's share, which is consecutive elements.
  __device__ void draw(uint64_t random, int32_t* to) {
    const int lane = lane_of_thread();
    // An odd number, so that the lanes of a warp read different banks of shared memory.
    const int share = (part_.count() / kRowThreads + 1) | 1;
    const int begin = min(static_cast<int>(threadIdx.x) * share, part_.count());
    const int end = min(begin + share, part_.count());
    uint64_t sum = 0;
    for (int i = begin; i < end; ++i) sum += weight(i);
    reduce({0, sum});
    const uint64_t of_rank = exchange_.value_of_rank(1);
    uint64_t target = sampling::high_product(random, sum_of_warp(of_rank));
    const BinOfLanes cta = find_lane(of_rank, 0, target + 1);
    if (cta.lane != cluster_rank()) return;
    const uint64_t of_warp = lane < kRowWarps ? shared_.warp_values[lane][1] : 0;
    const BinOfLanes warp = find_lane(of_warp, cta.above, target + 1);
    if (warp.lane != warp_of_thread()) return;
    const BinOfLanes own = find_lane(sum, warp.above, target + 1);
    if (own.lane != lane) return;
    target -= own.above;
    int i = begin;
    for (uint64_t passed = weight(i); passed <= target && i + 1 < end; passed += weight(i)) ++i;
    *to = part_.begin() + i;
  }

  struct KeyAndSum {
    uint32_t key;
    uint64_t sum;
  };
  /// The largest key and the sum, below 2^54, over all threads of the cluster, which all call it.
  /// Leaves the key and the sum of each warp of this CTA in shared_.warp_values.
  __device__ KeyAndSum reduce(KeyAndSum own) {
    const int lane = lane_of_thread();
    own = reduce_warp(own);
    if (lane == 0) {
      shared_.warp_values[warp_of_thread()][0] = own.key;
      shared_.warp_values[warp_of_thread()][1] = own.sum;
    }
    __syncthreads();
    if (warp_of_thread() == 0) {
      const uint64_t (&of_warp)[kValues] = shared_.warp_values[min(lane, kRowWarps - 1)];
      own = reduce_warp({static_cast<uint32_t>(of_warp[0]), lane < kRowWarps ? of_warp[1] : 0});
      exchange_.publish({own.key, own.sum});
    }
    exchange_.receive();
    return reduce_warp(
        {static_cast<uint32_t>(exchange_.value_of_rank(0)), exchange_.value_of_rank(1)});
  }
  static __device__ KeyAndSum reduce_warp(const KeyAndSum& own) {
    return {__reduce_max_sync(~0U, own.key), sum_of_warp(own.sum)};
  }

  const VerifyParams& p_;
  int32_t request_;
  Shared& shared_;
  Residual<kDType, kHeld> part_;
  sampling::Scale scale_{};
  int32_t num_accepted_ = 0;
  float largest_ = 0.0F;
  Exchange<kValues> exchange_;
};

constexpr int kVerifyCtasOfSm = 2;  // with a third, registers would be spilled

template <DType kDType, bool kHeld>
__global__ void __launch_bounds__(kRowThreads, kVerifyCtasOfSm)
    verify_kernel(const __grid_constant__ RowParams<VerifyParams> params) {
  __shared__ Shared shared;
  extern __shared__ float4 memory[];
  Verifier<kDType, kHeld>(params, row_of_cluster(), shared, reinterpret_cast<float*>(memory)).run();
}

}  // namespace

Status speculative_verify(const VerifyParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    constexpr RowKernels<VerifyParams> kKernels{verify_kernel<kDType, true>,
                                                verify_kernel<kDType, false>};
    // With more CTAs in a launch, smaller clusters are faster.
    const int most_ctas = num_sms(device) * 3 / 2;
    return launch_rows(kKernels, p, device, stream,
                       {.cluster = ctas_that_hold(p.num_rows, p.vocab, device, most_ctas),
                        .multiple = sampling::kBlock});
  });
}

}  // namespace flashplan::cuda
