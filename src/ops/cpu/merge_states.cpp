// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/float_formats.h"
#include "cpu/float_mode.h"
#include "ops/operators.h"

namespace flashplan::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

float lse_at(const AttentionState& state, int64_t token, int64_t head) {
  return static_cast<const float*>(
      state.lse.data)[token * state.lse.stride[0] + head * state.lse.stride[1]];
}

template <typename Format>
auto* row_at(const AttentionState& state, int64_t token, int64_t head) {
  return static_cast<typename Format::Storage*>(state.o.data) + token * state.o.stride[0] +
         head * state.o.stride[1];
}

template <typename Format>
void merge_row(const AttentionState* states, int32_t num_states, const AttentionState& out,
               float ln_base, int64_t token, int64_t head) {
  float largest = kMinusInfinity;  // ignores NaN, which makes the total NaN
  for (int32_t i = 0; i < num_states; ++i)
    largest = std::fmax(largest, lse_at(states[i], token, head));
  const int64_t head_dim = out.o.shape[2];
  auto* to = row_at<Format>(out, token, head);
  float total = 0.0F;
  for (int32_t i = 0; i < num_states; ++i) {
    const float lse = lse_at(states[i], token, head);
    if (lse != kMinusInfinity) total += std::exp((lse - largest) * ln_base);
  }
  // o is merged in blocks, each of which is read whole before it is written, because `out` may be
  // one of the inputs.
  constexpr int64_t kBlock = 64;
  for (int64_t begin = 0; begin < head_dim; begin += kBlock) {
    const int64_t count = head_dim - begin < kBlock ? head_dim - begin : kBlock;
    float sum[kBlock] = {};
    for (int32_t i = 0; i < num_states; ++i) {
      const float lse = lse_at(states[i], token, head);
      if (lse == kMinusInfinity) continue;  // a state without keys, whose o may be anything
      const float weight = std::exp((lse - largest) * ln_base) / total;
      const auto* from = row_at<Format>(states[i], token, head) + begin;
      for (int64_t d = 0; d < count; ++d) sum[d] += weight * Format::load(from[d]);
    }
    for (int64_t d = 0; d < count; ++d) to[begin + d] = Format::store(sum[d]);
  }
  static_cast<float*>(out.lse.data)[token * out.lse.stride[0] + head * out.lse.stride[1]] =
      total == 0.0F ? kMinusInfinity : largest + std::log(total) / ln_base;
}

}  // namespace

void merge_states(const AttentionState* states, int32_t num_states, const AttentionState& out,
                  float ln_base) noexcept {
  const DefaultFloatMode mode;
  dispatch_format(out.o.dtype, [&](auto format) {
    for (int64_t token = 0; token < out.o.shape[0]; ++token) {
      for (int64_t head = 0; head < out.o.shape[1]; ++head) {
        merge_row<decltype(format)>(states, num_states, out, ln_base, token, head);
      }
    }
  });
}

}  // namespace flashplan::cpu
