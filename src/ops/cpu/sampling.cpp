// SPDX-License-Identifier: Apache-2.0
// sample() on the CPU. Threads share the rows. Results are written only after all rows are known to
// have no error.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>

#include "common/error.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#include "ops/cpu/kernels.h"
#include "ops/operators.h"

namespace flashplan::cpu {
namespace {

SampleRow widest_sample_row() noexcept {
  switch (widest_isa()) {
#if defined(FLASHPLAN_HAVE_AVX512)
    case Isa::kAvx512: return avx512::sample_row;
#endif
#if defined(FLASHPLAN_HAVE_AVX2)
    case Isa::kAvx2: return avx2::sample_row;
#endif
    default: return baseline::sample_row;
  }
}

/// Whether a row of the logits gets a bias of NaN or +inf.
bool has_bad_bias(const SampleParams& p, int32_t row) {
  if (p.bias == nullptr || row < 0) return false;
  const float* bias = p.bias + row * p.bias_stride;
  const auto is_bad = [](float x) { return !(x < std::numeric_limits<float>::infinity()); };
  return std::any_of(bias, bias + p.vocab, is_bad);
}

Status row_error(const SampleParams& p, int32_t row, SampleError code) {
  const auto invalid = [&](const char* name, const char* expected, double got) {
    return error(StatusCode::kInvalidArgument, "%s[%d]: expected %s, got %g", name, row, expected,
                 got);
  };
  switch (code) {
    case SampleError::kTemperature:
      return invalid("temperature", "a finite number >= 0", double{p.temperature.of(row)});
    case SampleError::kTopK: return invalid("top_k", ">= 1", p.top_k.of(row));
    case SampleError::kTopP: return invalid("top_p", "in (0, 1]", double{p.top_p.of(row)});
    case SampleError::kMinP: return invalid("min_p", "in [0, 1]", double{p.min_p.of(row)});
    case SampleError::kRow:
      return error(StatusCode::kInvalidArgument,
                   "rows[%d]: expected one of the %d rows of logits, got %lld", row,
                   p.num_logit_rows, static_cast<long long>(p.given_row(row)));
    case SampleError::kNotANumber:
      if (has_bad_bias(p, p.logits_row(row))) {
        return error(StatusCode::kInvalidArgument,
                     "logit_bias: expected numbers below infinity for row %d, got NaN or +inf",
                     p.logits_row(row));
      }
      return error(StatusCode::kInvalidArgument,
                   "logits[%d]: expected numbers below infinity, got NaN or +inf",
                   p.logits_row(row));
    case SampleError::kNoToken:
      return error(StatusCode::kInvalidArgument,
                   "logits[%d]: expected a finite number, got nothing but -inf", p.logits_row(row));
    default:
      return error(StatusCode::kInvalidArgument,
                   "logits[%d]: expected probabilities >= 0 with the sum 1, got others",
                   p.logits_row(row));
  }
}

}  // namespace

Status sample(const SampleParams& params) noexcept {
  static const SampleRow sample_row = widest_sample_row();
  const std::unique_ptr<SampleResult[]> results(
      new (std::nothrow) SampleResult[static_cast<size_t>(params.num_rows)]);
  if (results == nullptr) {
    return error(StatusCode::kOutOfMemory, "logits: expected memory for %d results, got none",
                 params.num_rows);
  }
  struct Job {
    const SampleParams& params;
    SampleResult* results;
  } job{params, results.get()};
  const auto take = [](void* context, int32_t row, int32_t /*worker*/) noexcept {
    const Job& all = *static_cast<const Job*>(context);
    all.results[row] = sample_row(all.params, row);
  };
  // With less than about 30 us of work, waking a second thread would take longer than it saves.
  constexpr int64_t kLeastElementsToShare = 64 * 1024;
  const bool shared = int64_t{params.num_rows} * params.vocab > kLeastElementsToShare;
  ThreadPool::run(take, &job, params.num_rows, shared ? params.num_rows : 1);
  for (int32_t row = 0; row < params.num_rows; ++row) {
    if (results[static_cast<size_t>(row)].error != SampleError::kNone) {
      return row_error(params, row, results[static_cast<size_t>(row)].error);
    }
  }
  for (int32_t row = 0; row < params.num_rows; ++row) {
    const SampleResult& result = results[static_cast<size_t>(row)];
    params.ids[row] = result.id;
    if (params.logprobs != nullptr) params.logprobs[row] = result.logprob;
    if (params.status != nullptr) params.status[row] = 0;
  }
  return {};
}

}  // namespace flashplan::cpu
