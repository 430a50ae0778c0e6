// SPDX-License-Identifier: Apache-2.0
// apply_penalties() on the CPU: each thread has a counter for every token of the vocabulary, and
// sets the counters to 0 again after each request.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "common/error.h"
#include "cpu/float_formats.h"
#include "cpu/thread_pool.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cpu {
namespace {

template <typename Format>
void penalise_row(const PenaltyParams& p, int32_t row, int32_t* counts) {
  using Storage = typename Format::Storage;
  auto* logits = reinterpret_cast<Storage*>(p.logits + row * p.row_stride);
  const Penalties penalties = p.penalties_of(row);
  // Lengths and ids have been checked, but another thread of the caller may change them meanwhile.
  // So both are kept in range here.
  const int32_t len = std::min(p.history_lens[row], p.max_len);
  const auto is_token = [&](int64_t id) { return id >= 0 && id < p.vocab; };
  for (int32_t i = 0; i < len; ++i) {
    const int64_t id = p.token(row, i);
    if (is_token(id)) ++counts[id];
  }
  for (int32_t i = 0; i < len; ++i) {
    const int64_t id = p.token(row, i);
    // A count of 0 means that the id came before, and that its logit is changed already.
    if (!is_token(id) || counts[id] == 0) continue;
    logits[id] = Format::store(
        sampling::penalised(Format::load(logits[id]), static_cast<float>(counts[id]), penalties));
    counts[id] = 0;
  }
}

}  // namespace

Status apply_penalties(const PenaltyParams& params) noexcept {
  // If the whole call takes less than about 30 us, waking a second thread costs more than it
  // brings.
  constexpr int64_t kLeastTokensToShare = 16 * 1024;
  int64_t num_tokens = 0;
  for (int32_t row = 0; row < params.num_rows; ++row) num_tokens += params.history_lens[row];
  if (num_tokens == 0) return {};
  const int32_t workers =
      num_tokens < kLeastTokensToShare ? 1 : std::min(params.num_rows, ThreadPool::num_threads());
  const auto vocab = static_cast<size_t>(params.vocab);
  const std::unique_ptr<int32_t[]> counts(new (std::nothrow)
                                              int32_t[static_cast<size_t>(workers) * vocab]());
  if (counts == nullptr) {
    return error(StatusCode::kOutOfMemory, "logits: expected memory for %d counters, got none",
                 params.vocab);
  }
  struct Job {
    const PenaltyParams& params;
    int32_t* counts;
  } job{params, counts.get()};
  const auto take = [](void* context, int32_t row, int32_t worker) noexcept {
    const Job& all = *static_cast<const Job*>(context);
    int32_t* own = all.counts + static_cast<int64_t>(worker) * all.params.vocab;
    dispatch_wide_format(all.params.dtype, [&](auto format) {
      penalise_row<decltype(format)>(all.params, row, own);
    });
  };
  ThreadPool::run(take, &job, params.num_rows, workers);
  return {};
}

}  // namespace flashplan::cpu
