// SPDX-License-Identifier: Apache-2.0
// What kernels.cpp and kernels_sampling.cpp export, once for each instruction set that they are
// compiled for: operators on rows [begin, end), or on one row.
#pragma once

#include <cstdint>

#include "flashplan/sampling.h"
#include "ops/mla_params.h"
#include "ops/params.h"
#include "ops/sampling_math.h"

namespace flashplan::cpu {

struct OperatorKernels {
  void (*norm)(const NormParams& params, int32_t begin, int32_t end) noexcept;
  void (*gated_activation)(const ActivationParams& params, int32_t begin, int32_t end) noexcept;
  void (*rope)(const RopeParams& params, int32_t begin, int32_t end) noexcept;
  /// Raises the scales to those that rows [begin, end) need.
  void (*raise_scales)(const QuantizeParams& params, int32_t begin, int32_t end) noexcept;
  void (*quantize)(const QuantizeParams& params, int32_t begin, int32_t end) noexcept;
  void (*softmax)(const SoftmaxParams& params, int32_t begin, int32_t end) noexcept;
  void (*append)(const AppendParams& params, int32_t begin, int32_t end) noexcept;
  void (*rope_append)(const RopeAppendParams& params, int32_t begin, int32_t end) noexcept;
  void (*append_mla)(const MlaAppendParams& params, int32_t begin, int32_t end) noexcept;
  void (*gather_mla)(const MlaGatherParams& params, int32_t begin, int32_t end) noexcept;
};

/// The result of sample() for one request.
struct SampleResult {
  int32_t id = -1;
  float logprob = 0.0F;
  SampleError error = SampleError::kNone;
};

/// The result of speculative_verify() for one request.
struct VerifyResult {
  int32_t num_accepted = 0;
  int32_t token = -1;  // the token after the accepted drafts
  SampleError error = SampleError::kNone;
  // The row with the error, of draft_probs if is_of_draft, else of target_probs.
  int32_t bad_row = 0;
  bool is_of_draft = false;
};

/// What filters keep of a row.
struct FilterResult {
  sampling::Cut cut{};
  sampling::Scale scale{};
  uint64_t total = 0;  // sum of the kept weights
  SampleError error = SampleError::kNone;
};

// Functions of kernels_sampling.cpp, which is compiled without contraction of a * b + c, so that
// they give the same bits as the GPU.
using SampleRow = SampleResult (*)(const SampleParams& params, int32_t row) noexcept;
using FindFilter = FilterResult (*)(const FilterParams& params, int32_t row) noexcept;
/// Writes the row of params.out.
using WriteFiltered = void (*)(const FilterParams& params, int32_t row,
                               const FilterResult& filter) noexcept;
/// Writes the log-probabilities of the row's drawn token and of its likeliest tokens.
using ListLogprobs = void (*)(const FilterParams& params, int32_t row) noexcept;
/// `nodes` [num_drafts] receives the drafts that are accepted.
using VerifyRow = VerifyResult (*)(const VerifyParams& params, int32_t row,
                                   int32_t* nodes) noexcept;

namespace baseline {
const OperatorKernels& operator_kernels() noexcept;
SampleResult sample_row(const SampleParams& params, int32_t row) noexcept;
FilterResult find_filter(const FilterParams& params, int32_t row) noexcept;
void write_filtered(const FilterParams& params, int32_t row, const FilterResult& filter) noexcept;
void list_logprobs(const FilterParams& params, int32_t row) noexcept;
VerifyResult verify_row(const VerifyParams& params, int32_t row, int32_t* nodes) noexcept;
}  // namespace baseline
namespace avx2 {
const OperatorKernels& operator_kernels() noexcept;
SampleResult sample_row(const SampleParams& params, int32_t row) noexcept;
FilterResult find_filter(const FilterParams& params, int32_t row) noexcept;
void write_filtered(const FilterParams& params, int32_t row, const FilterResult& filter) noexcept;
void list_logprobs(const FilterParams& params, int32_t row) noexcept;
VerifyResult verify_row(const VerifyParams& params, int32_t row, int32_t* nodes) noexcept;
}  // namespace avx2
namespace avx512 {
const OperatorKernels& operator_kernels() noexcept;
SampleResult sample_row(const SampleParams& params, int32_t row) noexcept;
FilterResult find_filter(const FilterParams& params, int32_t row) noexcept;
void write_filtered(const FilterParams& params, int32_t row, const FilterResult& filter) noexcept;
void list_logprobs(const FilterParams& params, int32_t row) noexcept;
VerifyResult verify_row(const VerifyParams& params, int32_t row, int32_t* nodes) noexcept;
}  // namespace avx512

}  // namespace flashplan::cpu
