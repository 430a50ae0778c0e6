// SPDX-License-Identifier: Apache-2.0
// speculative_verify() on CUDA: a cluster of CTAs has a request. Whether a draft is accepted where
// no other was rejected before it depends on two numbers, which are read for all drafts at once.
// Only where drafts are rejected, and for the last token, is a row of probabilities read.
#include <cstdint>

#include "flashplan/sampling.h"
#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/row_draw.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {
namespace {

/// A draft that was rejected, and the sum of the row before.
struct Rejected {
  int32_t draft;
  float sum;
};

/// Each CTA of a cluster has a copy of all but the exchange.
struct Shared {
  RowExchange exchange;
  Rejected rejected[kMaxDrafts];
  int32_t tokens[kMaxDrafts];
  int32_t parents[kMaxDrafts];
  int32_t nodes[kMaxDrafts];           // that are accepted
  bool is_accepted_first[kMaxDrafts];  // where no draft of the same parent was rejected
};
static_assert(sizeof(Shared) <= 16 * 1024);

struct KernelParams {
  VerifyParams p;
  RowSplit split;
};

template <DType kDType>
__device__ float probability(const char* row, int64_t i) {
  using Storage = typename Format<kDType>::Storage;
  return __fadd_rn(Format<kDType>::load(reinterpret_cast<const Storage*>(row)[i]), 0.0F);
}

/// The target's probabilities less those of drafts that were rejected.
template <DType kDType>
class Residual {
 public:
  __device__ Residual(const KernelParams& params, int32_t request, const Rejected* rejected,
                      float* memory)
      : params_(params),
        request_(request),
        rejected_(rejected),
        memory_(memory),
        row_(params.p.target_row(request, -1)),
        part_(make_part()) {}

  /// Begins with the target's row after a draft. It is not loaded yet.
  __device__ void begin_row(int32_t node) {
    row_ = params_.p.target_row(request_, node);
    num_rejected = 0;
    part_ = make_part();
  }

  /// Calls body(value) for the target's values.
  template <class Body>
  __device__ void load(const Body& body) {
    num_rejected = 0;
    part_.load(body);
    cluster_sync();  // all CTAs have begun: their shared memory can be written to
  }

  __device__ int32_t begin() const { return part_.begin(); }
  __device__ int32_t count() const { return part_.count(); }

  __device__ float at(int32_t i) const {
    return part_.is_held() ? part_.at(i) : reduced(part_.at(i), part_.begin() + i);
  }
  __device__ void set(int32_t i, float value) {
    if (part_.is_held()) part_.set(i, value);
  }

  /// The value of any id, from memory.
  __device__ float of_id(int32_t id) const { return reduced(probability<kDType>(row_, id), id); }

  int32_t num_rejected = 0;

 private:
  __device__ RowPart<kDType> make_part() const {
    return {{row_, 0, nullptr, 0}, 0, params_.p.vocab, params_.split, memory_, 0.0F};
  }

  __device__ float reduced(float value, int32_t id) const {
    for (int32_t r = 0; r < num_rejected; ++r) {
      const char* draft = params_.p.draft_row(request_, rejected_[r].draft);
      value = sampling::residual(value, rejected_[r].sum, probability<kDType>(draft, id));
    }
    return value;
  }

  const KernelParams& params_;
  int32_t request_;
  const Rejected* rejected_;
  float* memory_;
  const char* row_;
  RowPart<kDType> part_;
};

template <DType kDType>
class Verifier : RowDraw<Residual<kDType>> {
 public:
  __device__ Verifier(const KernelParams& params, int32_t request, Shared& shared, float* memory)
      : Base({params, request, shared.rejected, memory}, shared.exchange),
        p_(params.p),
        request_(request),
        shared_(shared) {}

  __device__ void run() {
    SampleError error = read_drafts();
    if (error == SampleError::kNone) error = walk();
    // A CTA's shared memory must live until all have read it.
    cluster_sync();
    if (cluster_rank() == 0) write(error);
  }

 private:
  using Base = RowDraw<Residual<kDType>>;
  using Base::part_;
  using Base::scale_;

  __device__ uint64_t random(uint32_t use) const {
    return sampling::random_bits(p_.seed.of(request_), p_.offset.of(request_), p_.stream(request_),
                                 use);
  }

  /// Fills what is shared of the drafts.
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
        const float q = probability<kDType>(p_.draft_row(request_, i), id);
        shared_.is_accepted_first[i] = sampling::is_accepted(random_of(i), p, q);
      }
    }
    return __syncthreads_or(is_wrong ? 1 : 0) != 0 ? SampleError::kDraft : SampleError::kNone;
  }

  __device__ uint64_t random_of(int32_t draft) const {
    return random(sampling::kUseDraft + static_cast<uint32_t>(draft));
  }

  /// Follows accepted drafts and draws the token behind them. All threads take the same way.
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
          sum = sampling::sum_of_weights(this->total_mass(sampling::keep_all(0)), largest_);
          const float q = probability<kDType>(p_.draft_row(request_, draft), id);
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

  /// Reduces over the cluster what its threads found; leaves the largest value.
  __device__ bool is_distribution(float largest, bool fits, uint64_t total) {
    uint64_t extremes[3] = {sampling::key_of(largest), fits ? 0U : 1U, 0U};
    uint64_t totals[3] = {total, 0U, 0U};
    this->template all_reduce<Max>(extremes);
    this->template all_reduce<Sum>(totals);
    largest_ = sampling::value_of(static_cast<uint32_t>(extremes[0]));
    return extremes[1] == 0 && sampling::sums_to_one(totals[0], 1.0F);
  }

  /// Takes a draft's distribution off the row, whose sum is `sum`. False: a row is no distribution.
  __device__ bool reject(int32_t draft, float sum) {
    if (part_.num_rejected == 0 && !load_target()) return false;
    const char* row = p_.draft_row(request_, draft);
    float largest = 0.0F;
    bool fits = true;
    uint64_t total = 0;
    for (int i = static_cast<int>(threadIdx.x); i < part_.count(); i += kRowThreads) {
      const float q = probability<kDType>(row, part_.begin() + i);
      const float rest = sampling::residual(part_.at(i), sum, q);
      part_.set(i, rest);
      largest = fmaxf(largest, rest);
      fits = fits && sampling::is_probability(q);
      total += sampling::weight_of_probability(q, sampling::absolute_scale());
    }
    const bool is_right = is_distribution(largest, fits, total);
    // All threads have passed the barriers of the reductions, and so all that they read before.
    if (threadIdx.x == 0) shared_.rejected[part_.num_rejected] = {draft, sum};
    ++part_.num_rejected;
    __syncthreads();
    return is_right;
  }

  __device__ SampleError draw_token() {
    if (part_.num_rejected == 0 && !load_target()) return SampleError::kProbabilities;
    if (largest_ == 0.0F) load_target();  // rounding has left nothing
    scale_ = sampling::make_scale(largest_, 1.0F, true);
    int32_t* to = p_.out + request_ * p_.out_stride + num_accepted_;
    this->draw(sampling::keep_all(0), random(sampling::kUseVerify),
               [&](int32_t id, uint64_t /*weight*/, uint64_t /*total*/) { *to = id; });
    return SampleError::kNone;
  }

  /// All but the token that was drawn.
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

  const VerifyParams& p_;
  int32_t request_;
  Shared& shared_;
  int32_t num_accepted_ = 0;
  float largest_ = 0.0F;
};

template <DType kDType>
__global__ void __launch_bounds__(kRowThreads)
    verify_kernel(const __grid_constant__ KernelParams params) {
  __shared__ Shared shared;
  extern __shared__ float4 memory[];
  Verifier<kDType>(params, row_of_cluster(), shared, reinterpret_cast<float*>(memory)).run();
}

}  // namespace

Status speculative_verify(const VerifyParams& p, Device device, Stream stream) noexcept {
  return with_float(p.dtype, [&](auto dtype) {
    KernelParams params{p, {}};
    const Grid grid = split_rows(p.num_rows, p.vocab, device, kMaxCluster / 2, 0, &params.split);
    return launch(verify_kernel<decltype(dtype)::value>, grid, device, stream, params);
  });
}

}  // namespace flashplan::cuda
