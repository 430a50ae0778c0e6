// SPDX-License-Identifier: Apache-2.0
// How tests run the CTAs of an attention kernel.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "abi/params.h"
#include "check.h"
#include "simt.h"

namespace flashplan::test {

/// Runs CTAs one after the other, in this order, each as CTA 0.
inline void run_one_by_one(AttentionParams& params, const std::vector<int32_t>& order,
                           int32_t num_threads, const std::function<void()>& kernel) {
  static simt::Machine machine;
  const QueueStart* const starts = params.schedule.starts;
  for (const int32_t cta : order) {
    params.schedule.starts = starts + cta;
    machine.run(1, 1, num_threads, kernel);
  }
  params.schedule.starts = starts;
}

/// 0, 1, ...
inline std::vector<int32_t> in_order(int32_t num_ctas) {
  std::vector<int32_t> order(static_cast<size_t>(num_ctas));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

inline bool equal_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline void expect_error_below(double most, double error, const std::string& what) {
  if (!(error < most)) {
    check::fail(__FILE__, __LINE__, what + ": error " + std::to_string(error));
  }
}

inline void expect_equal_bits(const std::vector<float>& a, const std::vector<float>& b,
                              const std::string& what) {
  if (!equal_bits(a, b)) check::fail(__FILE__, __LINE__, what);
}

/// Runs the CTAs of a batch one after the other, then in the other order.
template <typename Batch>
void check_one_by_one(Batch& batch, int32_t num_ctas, double most_error, const std::string& what) {
  std::vector<int32_t> order = in_order(num_ctas);
  batch.run(order);
  const std::vector<float> first = batch.results();
  expect_error_below(most_error, batch.error(), what);
  if (num_ctas == 1) return;
  std::reverse(order.begin(), order.end());
  batch.run(order);
  expect_equal_bits(first, batch.results(), what + ": other bits in another order");
}

}  // namespace flashplan::test
