// SPDX-License-Identifier: Apache-2.0
// The thread pool, whose callers are made to collide.
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>

#include "check.h"
#include "cpu/thread_pool.h"

namespace flashplan::test {
namespace {

using cpu::ThreadPool;

/// Waits for a flag, but not for ever: a test must end where the pool is wrong.
bool wait_for(const std::atomic<bool>& flag) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!flag.load()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

/// The first caller's tasks hold two threads until the second caller has returned.
struct First {
  std::atomic<int> num_inside{0};
  std::atomic<bool> both_inside{false};
  std::atomic<bool> second_is_done{false};

  static void task(void* context, int32_t, int32_t) noexcept {
    auto& self = *static_cast<First*>(context);
    if (++self.num_inside == 2) self.both_inside = true;
    if (wait_for(self.second_is_done)) return;
    check::fail(__FILE__, __LINE__, "the second caller waits for the first");
    std::_Exit(1);  // neither may ever return
  }
};

/// The second caller's tasks count themselves, and those that another thread took.
struct Second {
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> num_tasks{0};
  std::atomic<int> num_elsewhere{0};

  static void task(void* context, int32_t, int32_t worker) noexcept {
    auto& self = *static_cast<Second*>(context);
    ++self.num_tasks;
    if (worker != 0 || std::this_thread::get_id() != self.caller) ++self.num_elsewhere;
  }
};

TEST(a_second_caller_runs_on_its_own_thread_and_waits_for_nobody) {
  ThreadPool::set_num_threads(2);
  for (int round = 0; round < 3; ++round) {
    First first;
    std::thread thread([&] { ThreadPool::run(&First::task, &first, 2, 2); });
    CHECK(wait_for(first.both_inside));
    Second second;
    ThreadPool::run(&Second::task, &second, 100, 2);
    first.second_is_done = true;
    thread.join();
    CHECK_EQ(first.num_inside.load(), 2);
    CHECK_EQ(second.num_tasks.load(), 100);
    CHECK_EQ(second.num_elsewhere.load(), 0);
  }
}

TEST(no_more_threads_work_than_were_set) {
  std::atomic<int32_t> most{0};
  const auto task = [](void* context, int32_t, int32_t worker) noexcept {
    auto& highest = *static_cast<std::atomic<int32_t>*>(context);
    for (int32_t seen = highest; worker > seen && !highest.compare_exchange_weak(seen, worker);) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));  // so that others take tasks too
  };
  ThreadPool::set_num_threads(2);
  ThreadPool::run(task, &most, 100, 8);
  CHECK(most.load() <= 1);
}

/// What fegetround() says may be of other instructions than those that are used.
bool rounds_upward() noexcept {
  const volatile float one = 1.0F, little = 1e-20F;
  return one + little > one;
}

TEST(tasks_round_to_nearest_whatever_their_caller_does) {
  std::fesetround(FE_UPWARD);
  std::atomic<int> num_wrong{0};
  const auto task = [](void* wrong, int32_t, int32_t) noexcept {
    if (rounds_upward()) ++*static_cast<std::atomic<int>*>(wrong);
  };
  for (const int32_t num_threads : {1, 2, 6}) {  // of which some are started now
    ThreadPool::set_num_threads(num_threads);
    ThreadPool::run(task, &num_wrong, 1000, num_threads);
    CHECK(rounds_upward());
  }
  std::fesetround(FE_TONEAREST);
  ThreadPool::run(task, &num_wrong, 1, 1);
  CHECK_EQ(num_wrong.load(), 0);
  CHECK(!rounds_upward());
}

}  // namespace
}  // namespace flashplan::test
