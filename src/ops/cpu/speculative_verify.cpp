// SPDX-License-Identifier: Apache-2.0
// speculative_verify() on the CPU: threads share the requests, and nothing is written before all
// requests are known to have no error.
#include <cstdint>
#include <memory>
#include <new>

#include "common/error.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#include "ops/cpu/kernels.h"
#include "ops/operators.h"

namespace flashplan::cpu {
namespace {

VerifyRow widest_verify_row() noexcept {
  switch (widest_isa()) {
#if defined(FLASHPLAN_HAVE_AVX512)
    case Isa::kAvx512: return avx512::verify_row;
#endif
#if defined(FLASHPLAN_HAVE_AVX2)
    case Isa::kAvx2: return avx2::verify_row;
#endif
    default: return baseline::verify_row;
  }
}

void write(const VerifyParams& p, int32_t row, const VerifyResult& result, const int32_t* nodes) {
  int32_t* out = p.out + row * p.out_stride;
  for (int32_t i = 0; i <= p.num_drafts; ++i) {
    const bool is_accepted = i < result.num_accepted;
    if (is_accepted) {
      out[i] = static_cast<int32_t>(p.token(row, nodes[i]));
    } else {
      out[i] = i == result.num_accepted ? result.token : -1;
    }
    if (p.nodes != nullptr && i < p.num_drafts) {
      p.nodes[row * p.node_stride + i] = is_accepted ? nodes[i] : -1;
    }
  }
  p.num_accepted[row] = result.num_accepted;
  if (p.status != nullptr) p.status[row] = 0;
}

}  // namespace

Status speculative_verify(const VerifyParams& params) noexcept {
  static const VerifyRow verify_row = widest_verify_row();
  const auto num_rows = static_cast<size_t>(params.num_rows);
  const auto num_drafts = static_cast<size_t>(params.num_drafts);
  const std::unique_ptr<VerifyResult[]> results(new (std::nothrow) VerifyResult[num_rows]);
  const std::unique_ptr<int32_t[]> nodes(new (std::nothrow) int32_t[num_rows * num_drafts]);
  if (results == nullptr || nodes == nullptr) {
    return error(StatusCode::kOutOfMemory, "draft_tokens: expected memory for %d results, got none",
                 params.num_rows);
  }
  struct Job {
    const VerifyParams& params;
    VerifyResult* results;
    int32_t* nodes;

    int32_t* nodes_of(int32_t row) const {
      return nodes + static_cast<int64_t>(row) * params.num_drafts;
    }
  } job{params, results.get(), nodes.get()};
  const auto take = [](void* context, int32_t row, int32_t /*worker*/) noexcept {
    const Job& all = *static_cast<const Job*>(context);
    all.results[row] = verify_row(all.params, row, all.nodes_of(row));
  };
  // If the whole call takes less than about 30 us, waking a second thread costs more than it
  // brings.
  constexpr int64_t kLeastElementsToShare = 64 * 1024;
  const bool shared = int64_t{params.num_rows} * params.vocab > kLeastElementsToShare;
  ThreadPool::run(take, &job, params.num_rows, shared ? params.num_rows : 1);
  for (int32_t row = 0; row < params.num_rows; ++row) {
    const VerifyResult& result = job.results[row];
    if (result.error == SampleError::kNone) continue;
    return error(StatusCode::kInvalidArgument,
                 "%s[%d, %d]: expected probabilities that sum to 1, got others",
                 result.is_of_draft ? "draft_probs" : "target_probs", row, result.bad_row);
  }
  for (int32_t row = 0; row < params.num_rows; ++row) {
    write(params, row, job.results[row], job.nodes_of(row));
  }
  return {};
}

}  // namespace flashplan::cpu
