// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "common/forks.h"
#include "common/processors.h"
#include "cpu/float_mode.h"

namespace flashplan::cpu {
namespace {

std::atomic<int32_t> wanted_threads{0};  // 0: not set, so default_num_threads() applies

/// The state that the workers share. It is never destroyed, because detached workers may outlive
/// main().
class Workers {
 public:
  static constexpr uint32_t kInvitedBits = 10;
  static constexpr uint32_t kMaxInvited = (1U << kInvitedBits) - 1;

  /// Held by the thread that calls run(), so that callers do not overlap.
  std::mutex caller;

  void run(ThreadPool::Task task, void* context, int32_t num_tasks, int32_t num_workers) noexcept {
    num_workers = std::min(num_workers, 1 + start(num_workers - 1));
    task_ = task;
    context_ = context;
    num_tasks_ = num_tasks;
    next_task_.store(0, std::memory_order_relaxed);
    const auto num_invited = static_cast<uint32_t>(num_workers - 1);
    num_busy_.store(num_workers - 1, std::memory_order_relaxed);
    if (num_invited > 0) {
      const uint32_t number = (round_.load(std::memory_order_relaxed) >> kInvitedBits) + 1;
      round_.store((number << kInvitedBits) | num_invited, std::memory_order_release);
      round_.notify_all();
    }
    take_tasks(0);
    for (int32_t busy = num_busy_.load(std::memory_order_acquire); busy != 0;
         busy = num_busy_.load(std::memory_order_acquire)) {
      num_busy_.wait(busy, std::memory_order_acquire);
    }
  }

 private:
  /// Starts threads up to `count`; returns how many there are.
  int32_t start(int32_t count) noexcept {
    try {
      while (num_started_ < count) {
        const uint32_t round = round_.load(std::memory_order_relaxed);
        std::thread([this, id = num_started_, round] { serve(id, round); }).detach();
        ++num_started_;
      }
    } catch (const std::exception&) {
      // There are no more threads, or there is no memory for one, so the existing ones do the work.
    }
    return num_started_;
  }

  void serve(int32_t id, uint32_t seen) noexcept {
    while (true) {
      round_.wait(seen, std::memory_order_acquire);
      seen = round_.load(std::memory_order_acquire);
      // Each call of run() is a round. Its number and the number of invited workers are one word,
      // so that a worker that wakes late can not take one round's invitation for another's. A round
      // ends only when every invited worker is done.
      if (id >= static_cast<int32_t>(seen & kMaxInvited)) continue;
      take_tasks(id + 1);
      if (num_busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) num_busy_.notify_one();
    }
  }

  void take_tasks(int32_t worker) noexcept {
    for (int32_t t = next_task_.fetch_add(1, std::memory_order_relaxed); t < num_tasks_;
         t = next_task_.fetch_add(1, std::memory_order_relaxed)) {
      task_(context_, t, worker);
    }
  }

  // The number of the round (a call of run() with workers), and in the low kInvitedBits how many
  // workers take part in it.
  std::atomic<uint32_t> round_{0};
  std::atomic<int32_t> num_busy_{0};
  std::atomic<int32_t> next_task_{0};
  ThreadPool::Task task_ = nullptr;
  void* context_ = nullptr;
  int32_t num_tasks_ = 0;
  int32_t num_started_ = 0;
};

}  // namespace

void ThreadPool::run(Task task, void* context, int32_t num_tasks, int32_t max_workers) noexcept {
  constexpr auto kMostWorkers = static_cast<int32_t>(Workers::kMaxInvited) + 1;
  const int32_t num_workers = std::min({num_tasks, max_workers, num_threads(), kMostWorkers});
  const DefaultFloatMode mode;
  if (num_workers > 1) {
    // A forked child has none of its parent's threads, so it makes workers of its own.
    if (auto* const workers = of_this_process<Workers>()) {
      if (std::unique_lock lock(workers->caller, std::try_to_lock); lock.owns_lock()) {
        workers->run(task, context, num_tasks, num_workers);
        return;
      }
    }
  }
  for (int32_t t = 0; t < num_tasks; ++t) task(context, t, 0);
}

void ThreadPool::set_num_threads(int32_t num_threads) noexcept {
  wanted_threads.store(num_threads, std::memory_order_relaxed);
}

int32_t ThreadPool::num_threads() noexcept {
  const int32_t wanted = wanted_threads.load(std::memory_order_relaxed);
  return wanted > 0 ? wanted : default_num_threads();
}

}  // namespace flashplan::cpu
