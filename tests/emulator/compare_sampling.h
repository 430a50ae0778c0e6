// SPDX-License-Identifier: Apache-2.0
// compare() draws tokens by the CUDA kernels of sample(), which the emulator runs, and by the CPU's
// code, and checks that both give the same results. Include it from one file of each test program.
#pragma once

#include "cuda_builtins.h"
#include "dynamic_memory.h"
#include "flashplan/sampling.h"
#include "ops/cpu/kernels.h"
#include "ops/operators.h"
// The library defines this function, too, so the emulated one gets another name.
#define sample emulated_sample
#include "ops/cuda/sample/cluster_kernel.h"
#include "ops/cuda/sample/counted_kernel.h"
#include "ops/cuda/sample/plain_kernel.h"
#include "ops/cuda/sample/sampling.cu"
#include "ops/cuda/sample/stream_kernel.h"
#undef sample

#include <string>
#include <vector>

#include "check.h"
#include "logit_rows.h"

namespace flashplan::test {

using cpu::SampleResult;

struct Settings {
  const char* name;
  float temperature = 1.0F;
  int32_t top_k = INT32_MAX;
  float top_p = 1.0F;
  float min_p = 0.0F;
  bool has_logprobs = true;
  int64_t seed = 0;  // 0: another one for each call
  bool joint = false;
};

inline std::vector<float> probabilities(const std::vector<float>& logits) {
  double largest = -kInfinity;
  for (const float x : logits) largest = std::max<double>(largest, x);
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - largest);
  std::vector<float> result;
  for (const float x : logits) result.push_back(static_cast<float>(std::exp(x - largest) / sum));
  return result;
}

/// Parameters that are tensors, where they are not empty.
struct EachRow {
  std::vector<float> temperatures;
  std::vector<int32_t> top_ks;
  std::vector<float> top_ps;
  std::vector<int32_t> rows;  // of the logits, as many as there are
};

/// Draws from each row by both engines, a launch for all of them.
inline void compare(const Rows& all, const Settings& settings, int32_t vocab,
                    bool from_probs = false, DType dtype = DType::kFloat32,
                    const float* bias = nullptr, int32_t gap = 0, const EachRow& each = {}) {
  const auto num_rows = static_cast<int32_t>(all.rows.size());
  const int64_t stride = vocab + gap;
  const int64_t item = item_size(dtype);
  // On a word of 16 bytes where there is no gap.
  std::vector<float4> memory(static_cast<size_t>(num_rows * stride * item / 16 + 1));
  auto* data = reinterpret_cast<char*>(memory.data());
  for (int32_t r = 0; r < num_rows; ++r) {
    std::vector<float> row = all.rows[static_cast<size_t>(r)];
    if (from_probs && !all.are_probabilities) row = probabilities(row);
    for (int32_t i = 0; i < vocab; ++i) {
      char* to = data + (r * stride + i) * item;
      const float value = row[static_cast<size_t>(i)];
      const uint16_t bits = dtype == DType::kFloat16
                                ? std::bit_cast<uint16_t>(static_cast<_Float16>(value))
                                : __float2bfloat16_rn(value).bits;
      std::memcpy(to, dtype == DType::kFloat32 ? static_cast<const void*>(&value) : &bits,
                  static_cast<size_t>(item));
    }
  }
  std::vector<int32_t> ids(static_cast<size_t>(num_rows), -7);
  std::vector<int32_t> status(static_cast<size_t>(num_rows), -7);
  std::vector<float> logprobs(static_cast<size_t>(num_rows));
  static int64_t seed = 0;
  SampleParams p;
  p.logits = data;
  p.row_stride = stride * item;
  p.bias = bias;
  p.dtype = dtype;
  p.num_rows = num_rows;
  p.vocab = vocab;
  p.from_probs = from_probs;
  p.temperature.all = settings.temperature;
  p.top_k.all = settings.top_k;
  p.top_p.all = settings.top_p;
  p.min_p.all = settings.min_p;
  if (!each.temperatures.empty()) p.temperature.each = each.temperatures.data();
  if (!each.top_ks.empty()) p.top_k.each = each.top_ks.data();
  if (!each.top_ps.empty()) p.top_p.each = each.top_ps.data();
  if (!each.rows.empty()) p.rows = each.rows.data();
  p.num_logit_rows = num_rows;
  p.joint = settings.joint;
  p.seed.all = settings.seed != 0 ? settings.seed : ++seed;
  p.offset.all = 12345;
  p.ids = ids.data();
  p.logprobs = settings.has_logprobs ? logprobs.data() : nullptr;
  p.status = status.data();
  CHECK(cuda::emulated_sample(p, Device{DeviceType::kCuda, 0}, nullptr).ok());
  for (int32_t r = 0; r < num_rows; ++r) {
    const SampleResult wanted = cpu::baseline::sample_row(p, r);
    const auto row = static_cast<size_t>(r);
    const bool same_logprob =
        !settings.has_logprobs ||
        (wanted.error != SampleError::kNone ? std::isnan(logprobs[row])
                                            : std::fabs(logprobs[row] - wanted.logprob) <= 5e-6F);
    if (ids[row] == wanted.id && status[row] == static_cast<int32_t>(wanted.error) &&
        same_logprob) {
      continue;
    }
    check::fail(__FILE__, __LINE__,
                all.names[row] + ", " + settings.name + ", vocabulary " + std::to_string(vocab) +
                    (from_probs ? ", probabilities" : "") + ", dtype " +
                    std::to_string(static_cast<int>(dtype)) + ": id " + std::to_string(ids[row]) +
                    " status " + std::to_string(status[row]) + " logprob " +
                    std::to_string(logprobs[row]) + ", not id " + std::to_string(wanted.id) +
                    " status " + std::to_string(static_cast<int>(wanted.error)) + " logprob " +
                    std::to_string(wanted.logprob));
  }
}

}  // namespace flashplan::test
