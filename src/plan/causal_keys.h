// SPDX-License-Identifier: Apache-2.0
// An estimate of a request's work below the causal mask.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashplan {

/// The number of keys that a query sees below the causal mask, on average over the queries of a
/// request. All queries see the keys before the first query's position; of the later keys a query
/// sees half, on average.
constexpr int64_t mean_causal_keys(int32_t qo_len, int32_t kv_len) noexcept {
  return std::max(int64_t{kv_len} - qo_len / 2, int64_t{kv_len} / 2);
}

}  // namespace flashplan
