// SPDX-License-Identifier: Apache-2.0
// sample() and what its filters keep, on the CPU. Threads share the rows. Results are written only
// after all rows are known to have no error.
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

struct SamplingKernels {
  SampleRow sample_row;
  FindFilter find_filter;
  WriteFiltered write_filtered;
  ListLogprobs list_logprobs;
};

/// The kernels for the widest instruction set of this machine.
const SamplingKernels& kernels() noexcept {
  static const SamplingKernels kKernels = [] {
    switch (widest_isa()) {
#if defined(FLASHPLAN_HAVE_AVX512)
      case Isa::kAvx512:
        return SamplingKernels{avx512::sample_row, avx512::find_filter, avx512::write_filtered,
                               avx512::list_logprobs};
#endif
#if defined(FLASHPLAN_HAVE_AVX2)
      case Isa::kAvx2:
        return SamplingKernels{avx2::sample_row, avx2::find_filter, avx2::write_filtered,
                               avx2::list_logprobs};
#endif
      default:
        return SamplingKernels{baseline::sample_row, baseline::find_filter,
                               baseline::write_filtered, baseline::list_logprobs};
    }
  }();
  return kKernels;
}

/// Calls body(row) for each request; threads share them.
template <typename Body>
void for_each_row(const SampleParams& p, const Body& body) noexcept {
  const auto take = [](void* context, int32_t row, int32_t /*worker*/) noexcept {
    (*static_cast<const Body*>(context))(row);
  };
  // With less than about 30 us of work, waking a second thread would take longer than it saves.
  constexpr int64_t kLeastElementsToShare = 64 * 1024;
  const bool shared = int64_t{p.num_rows} * p.vocab > kLeastElementsToShare;
  ThreadPool::run(take, const_cast<Body*>(&body), p.num_rows, shared ? p.num_rows : 1);
}

/// Allocates a result for each request; null if memory runs out.
template <typename Result>
std::unique_ptr<Result[]> make_results(const SampleParams& p) noexcept {
  return std::unique_ptr<Result[]>(new (std::nothrow) Result[static_cast<size_t>(p.num_rows)]);
}

Status no_memory(const SampleParams& p) {
  return error(StatusCode::kOutOfMemory, "logits: expected memory for %d results, got none",
               p.num_rows);
}

/// Whether a row of the logits has a bias of NaN or +inf.
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

/// The error of the first request that has one.
template <typename Result>
Status first_error(const SampleParams& p, const Result* results) {
  for (int32_t row = 0; row < p.num_rows; ++row) {
    if (results[row].error != SampleError::kNone) return row_error(p, row, results[row].error);
  }
  return {};
}

}  // namespace

Status sample(const SampleParams& params) noexcept {
  const auto results = make_results<SampleResult>(params);
  if (results == nullptr) return no_memory(params);
  for_each_row(params, [&](int32_t row) {
    results[static_cast<size_t>(row)] = kernels().sample_row(params, row);
  });
  FLASHPLAN_RETURN_IF_ERROR(first_error(params, results.get()));
  for (int32_t row = 0; row < params.num_rows; ++row) {
    const SampleResult& result = results[static_cast<size_t>(row)];
    params.ids[row] = result.id;
    if (params.logprobs != nullptr) params.logprobs[row] = result.logprob;
    if (params.status != nullptr) params.status[row] = 0;
  }
  return {};
}

Status filter_rows(const FilterParams& params) noexcept {
  const auto results = make_results<FilterResult>(params);
  if (results == nullptr) return no_memory(params);
  for_each_row(params, [&](int32_t row) {
    results[static_cast<size_t>(row)] = kernels().find_filter(params, row);
  });
  FLASHPLAN_RETURN_IF_ERROR(first_error(params, results.get()));
  for_each_row(params, [&](int32_t row) {
    kernels().write_filtered(params, row, results[static_cast<size_t>(row)]);
  });
  for (int32_t row = 0; row < params.num_rows && params.status != nullptr; ++row) {
    params.status[row] = 0;
  }
  return {};
}

void list_logprobs(const FilterParams& params) noexcept {
  for_each_row(params, [&](int32_t row) { kernels().list_logprobs(params, row); });
}

}  // namespace flashplan::cpu
