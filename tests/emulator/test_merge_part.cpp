// SPDX-License-Identifier: Apache-2.0
// The counter of a merge that CTAs divide among them, by threads of the host as CTAs: each row is
// merged once, after all states have been written, and the counter is ready for the next run.
#include "kernels/device/merge_part.h"

#include <random>
#include <thread>
#include <vector>

#include "check.h"

namespace flashplan::test {
namespace {

using device::MergePart;

struct Cta {
  bool has_time;
  int64_t delay;         // ns before it arrives
  int64_t most_waiting;  // ns
};

/// One run of a merge. `helped` counts the CTAs that merged rows beside another one.
void run(const std::vector<Cta>& ctas, int32_t num_rows, int32_t* counter, int* helped) {
  Merge merge{};
  merge.rows.num_rows = num_rows;
  merge.num_pieces = static_cast<int32_t>(ctas.size());
  std::vector<int> states(ctas.size(), 0);  // written before the arrival, read by what merges
  std::vector<std::atomic<int>> merged(static_cast<size_t>(num_rows));
  std::vector<std::thread> threads;
  std::atomic<int> num_merging{0};
  std::atomic<bool> begins{false};
  for (size_t c = 0; c < ctas.size(); ++c) {
    threads.emplace_back([&, c] {
      device::kMostClocksOfWait = ctas[c].most_waiting;
      while (!begins) {
      }
      const int64_t begin = device::clock64();
      while (device::clock64() - begin < ctas[c].delay) {
      }
      states[c] = 1;
      const MergePart part = device::arrive_at_merge(counter, merge, ctas[c].has_time);
      if (part.count == 0) return;
      ++num_merging;
      for (const int state : states) CHECK(state == 1);
      for (int32_t row = part.begin(num_rows); row < part.end(num_rows); ++row) {
        ++merged[static_cast<size_t>(row)];
      }
    });
  }
  begins = true;
  for (std::thread& thread : threads) thread.join();
  for (const auto& times : merged) CHECK_EQ(times.load(), 1);
  CHECK_EQ(*counter, 0);
  if (num_merging > 1) *helped += num_merging;
}

/// CTAs with and without other work, that arrive at any time and stop waiting after any time.
TEST(each_row_is_merged_once) {
  std::mt19937 random(std::random_device{}());
  const auto below = [&](uint32_t end) { return static_cast<int32_t>(random() % end); };
  int32_t counter = 0;
  int helped = 0;
  for (int round = 0; round < 1500; ++round) {
    std::vector<Cta> ctas(static_cast<size_t>(1 + below(6)));
    const bool waits_long = below(2) == 0;
    for (Cta& cta : ctas) {
      cta.has_time = below(4) != 0;
      cta.delay = below(2) * below(5000);
      cta.most_waiting = waits_long ? 1'000'000'000 : below(5000);
    }
    run(ctas, 1 + below(64), &counter, &helped);
  }
  CHECK(helped > 50);
}

/// Of CTAs that all wait, each merges a part.
TEST(all_that_wait_merge) {
  int32_t counter = 0;
  int helped = 0;
  const std::vector<Cta> ctas(4, Cta{true, 0, 10'000'000'000});
  for (int round = 0; round < 50; ++round) run(ctas, 64, &counter, &helped);
  CHECK_EQ(helped, 4 * 50);
}

/// Few rows are merged by the last CTA.
TEST(few_rows_are_not_divided) {
  int32_t counter = 0;
  int helped = 0;
  const std::vector<Cta> ctas(4, Cta{true, 0, 10'000'000'000});
  for (int round = 0; round < 50; ++round) run(ctas, 16, &counter, &helped);
  CHECK_EQ(helped, 0);
}

}  // namespace
}  // namespace flashplan::test
