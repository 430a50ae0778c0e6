// SPDX-License-Identifier: Apache-2.0
// Runs the CTAs of a Hopper kernel at the same time, and their warps in a random order.
#pragma once

#include <cstring>
#include <functional>
#include <vector>

#include "kernels/device/sm90/hopper.h"
#include "run_ctas.h"

namespace flashplan::test {

/// `begin` runs before the kernel in the first thread of each CTA, whose shared memory is NaN.
inline void run_together(int32_t num_ctas, int32_t num_threads, unsigned seed,
                         const std::function<void()>& begin, const std::function<void()>& kernel) {
  static simt::Machine machine;
  simt::shuffles_warps = true;
  simt::first_random = seed;
  simt::describe_waits = device::describe_mbarriers;
  machine.run(static_cast<unsigned>(num_ctas), num_ctas, num_threads, [&] {
    if (threadIdx.x == 0) {
      std::memset(device::smem, 0xff, sizeof(device::smem));
      device::reset_copy_engine(seed + blockIdx.x);
      device::reset_named_barriers();
      device::mbarrier_facts().clear();
      begin();
    }
    kernel();
    device::bulk_store_wait();
  });
}

/// Runs the queues of a kernel of pairs of CTAs one after the other, in this order, each as queue
/// 0.
inline void run_pairs(AttentionParams& params, const std::vector<int32_t>& order,
                      int32_t num_threads, unsigned seed, const std::function<void()>& begin,
                      const std::function<void()>& kernel) {
  const QueueStart* const starts = params.schedule.starts;
  for (const int32_t queue : order) {
    params.schedule.starts = starts + queue;
    run_together(2, num_threads, seed + static_cast<unsigned>(queue), begin, [&] {
      kernel();
      // Arrivals that nobody waits for must not come in the next run.
      if (threadIdx.x == 0) device::reset_copy_engine(seed);
    });
  }
  simt::shuffles_warps = false;
  params.schedule.starts = starts;
}

/// Runs a batch twice, with warps in different orders.
template <typename Batch>
void check_together(Batch& batch, double most_error, const std::string& what) {
  batch.run(1);
  const std::vector<float> first = batch.results();
  expect_error_below(most_error, batch.error(), what);
  batch.run(2);
  expect_equal_bits(first, batch.results(), what + ": other bits in another order");
}

}  // namespace flashplan::test
