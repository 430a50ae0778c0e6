// SPDX-License-Identifier: Apache-2.0
// Runs kernels of src/ops/cuda and of sm80 on the CPU, compiled as C++: each CTA of a cluster is a
// thread, each of its CUDA threads a fiber of it. Values are exact, so results can be compared to
// the bit; time means nothing. cuda_builtins.h has what the kernels use of CUDA.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

namespace simt {

constexpr int kMaxThreads = 512;
constexpr int kMaxCtas = 16;
constexpr size_t kStack = 64 * 1024;
constexpr size_t kDynamicBytes = 256 * 1024;

/// Saves the registers that a call keeps on the stack `*from` and goes on with those of `to`.
extern "C" void simt_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
  .text
  .type simt_switch, @function
simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
  .size simt_switch, .-simt_switch
)");
#endif

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated kernel: %s\n", what);
  std::abort();
}
[[noreturn]] inline void fail(const std::string& what) { fail(what.c_str()); }

/// Counts what happens in any CTA that others may wait for.
inline std::atomic<uint64_t> num_events = 0;
inline void note_event() { num_events.fetch_add(1, std::memory_order_relaxed); }

/// How warps are scheduled: one after the other, thread by thread, or in a random order that
/// `random` begins, some of them rarely for a while.
inline bool shuffles_warps = false;
inline unsigned first_random = 1;

/// CTAs that share their memory.
struct Cluster {
  int size = 1;
  unsigned block = 0;  // the first CTA's
  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0;
  int phase = 0;
  char* anchors[kMaxCtas] = {};  // the same variable of each thread
  std::atomic<bool> ended[kMaxCtas] = {};
};

struct Warp {
  int arrived = 0;
  int size = 0;
  uint64_t phase = 0;
  uint64_t values[2][32] = {};
};

struct Fiber {
  void* stack_pointer = nullptr;
  bool is_done = false;
  int cluster_phase = 0;
};

struct Cta {
  Cluster* cluster = nullptr;
  int rank = 0;
  int size = 0;  // threads
  int current = 0;
  int num_done = 0;
  int sync_arrived = 0;
  int sync_phase = 0;
  int cluster_arrived = 0;
  int cluster_phase = 0;  // that all threads have arrived at
  bool any = false;       // of __syncthreads_or()
  uint64_t num_switches = 0;
  uint64_t events_seen = 0;  // at `seen`
  std::chrono::steady_clock::time_point seen;
  std::mt19937 random;
  uint32_t slow_warps = 0;                   // a bit for each
  const char* waits[kMaxThreads / 32] = {};  // what a warp waits for, and in which phase of it
  uint32_t places[kMaxThreads / 32] = {};
  uint32_t parities[kMaxThreads / 32] = {};
  void* outside = nullptr;
  const std::function<void()>* kernel = nullptr;
  Fiber fibers[kMaxThreads];
  Warp warps[kMaxThreads / 32];
  std::unique_ptr<char[]> stacks{new char[kMaxThreads * kStack]};
};

inline thread_local Cta* cta = nullptr;
inline thread_local char anchor = 0;

inline dim3 thread_index() { return {static_cast<unsigned>(cta->current), 0, 0}; }
/// Of a grid of one cluster.
inline dim3 grid_size() { return {static_cast<unsigned>(cta->cluster->size)}; }
inline dim3 block_index() { return {cta->cluster->block + static_cast<unsigned>(cta->rank), 0, 0}; }

/// Says what each warp of the CTA has waited for last. Set by tests that know more.
inline void (*describe_waits)() = nullptr;

/// Fails if nothing has happened in any CTA for a long time.
inline void look_for_events() {
  Cta& c = *cta;
  const uint64_t events = num_events.load(std::memory_order_relaxed);
  const auto now = std::chrono::steady_clock::now();
  if (events != c.events_seen) {
    c.events_seen = events;
    c.seen = now;
  } else if (now - c.seen > std::chrono::seconds(10)) {
    if (describe_waits != nullptr) describe_waits();
    fail("threads wait for each other, or for what nobody does");
  }
  if (c.cluster->size > 1) std::this_thread::yield();
}

/// The thread that goes on after the current one. With shuffled warps, these are the threads of the
/// warp, then those of another one.
inline int next_thread() {
  Cta& c = *cta;
  int next = c.current;
  if (shuffles_warps) {
    while (++next % 32 != 0) {
      if (!c.fibers[next].is_done) return next;
    }
    if (c.random() % 1024 == 0) c.slow_warps = c.random() & c.random();
    do {
      next = static_cast<int>(c.random() % static_cast<unsigned>(c.size / 32)) * 32;
    } while ((c.slow_warps >> (next / 32) & 1) != 0 && c.random() % 64 != 0);
    --next;
  }
  do {
    next = (next + 1) % c.size;
  } while (c.fibers[next].is_done);
  return next;
}

/// Goes on with another thread that has not ended.
[[gnu::noinline]] inline void yield() {
  Cta& c = *cta;
  if (++c.num_switches % (1 << 16) == 0) look_for_events();
  const int from = c.current;
  c.current = next_thread();
  if (c.current == from) return;
  simt_switch(&c.fibers[from].stack_pointer, c.fibers[c.current].stack_pointer);
}

inline void fiber_main() {
  (*cta->kernel)();
  Cta& c = *cta;
  Fiber& fiber = c.fibers[c.current];
  fiber.is_done = true;
  ++c.num_done;
  --c.warps[c.current / 32].size;
  note_event();
  if (c.sync_arrived != 0) fail("a thread ends while others wait for it");
  if (c.num_done == c.size) {
    simt_switch(&fiber.stack_pointer, c.outside);
  } else {
    yield();
  }
  fail("a thread goes on after its end");
}

/// Runs a CTA to its end.
inline void run_cta(Cta& c, Cluster& cluster, int rank, int size,
                    const std::function<void()>& kernel) {
  cta = &c;
  c.cluster = &cluster;
  c.rank = rank;
  c.size = size;
  c.kernel = &kernel;
  c.current = c.num_done = c.sync_arrived = c.sync_phase = c.cluster_arrived = c.cluster_phase = 0;
  c.num_switches = 0;
  c.events_seen = 0;
  c.seen = std::chrono::steady_clock::now();
  c.random.seed(first_random * 1000 + cluster.block + static_cast<unsigned>(rank));
  c.slow_warps = 0;
  for (const char*& what : c.waits) what = nullptr;
  for (int w = 0; w < size / 32; ++w) c.warps[w] = {.size = 32};
  for (int t = 0; t < size; ++t) {
    char* top = c.stacks.get() + static_cast<size_t>(t + 1) * kStack;
    auto* frame =
        reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15}) - 64);
    // Six registers, then the address to return to; the stack is as after a call.
    for (int i = 0; i < 6; ++i) frame[i] = nullptr;
    frame[6] = reinterpret_cast<void*>(&fiber_main);
    frame[7] = nullptr;
    c.fibers[t] = {.stack_pointer = frame};
  }
  simt_switch(&c.outside, c.fibers[0].stack_pointer);
  cluster.ended[rank] = true;
}

/// Waits until all threads of the warp bring a value; all see all of them.
inline const uint64_t* share(uint64_t value) {
  Warp& warp = cta->warps[cta->current / 32];
  const uint64_t phase = warp.phase;
  uint64_t* values = warp.values[phase % 2];
  values[cta->current % 32] = value;
  if (++warp.arrived == warp.size) {
    warp.arrived = 0;
    ++warp.phase;
  } else {
    while (warp.phase == phase) yield();
  }
  return values;
}

template <class T>
uint64_t to_bits(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void cluster_arrive() {
  Cta& c = *cta;
  ++c.fibers[c.current].cluster_phase;
  if (++c.cluster_arrived < c.size) return;
  c.cluster_arrived = 0;
  ++c.cluster_phase;
  note_event();
  Cluster& cluster = *c.cluster;
  const std::lock_guard lock(cluster.mutex);
  if (++cluster.arrived < cluster.size) return;
  cluster.arrived = 0;
  ++cluster.phase;
  cluster.changed.notify_all();
}

inline void cluster_wait() {
  Cta& c = *cta;
  const int phase = c.fibers[c.current].cluster_phase;
  while (c.cluster_phase < phase) yield();
  Cluster& cluster = *c.cluster;
  std::unique_lock lock(cluster.mutex);
  cluster.changed.wait(lock, [&] { return cluster.phase >= phase; });
}

/// Runs `kernel` as clusters of CTAs, one cluster after another. The threads, and with them what
/// was left in shared memory, stay for the next call.
class Machine {
 public:
  void run(unsigned num_ctas, int cluster_size, int num_threads,
           const std::function<void()>& kernel) {
    for (unsigned block = 0; block < num_ctas; block += static_cast<unsigned>(cluster_size)) {
      Cluster cluster;
      cluster.size = cluster_size;
      cluster.block = block;
      run_cluster(cluster, num_threads, kernel);
    }
  }

  Machine() {
    for (int rank = 0; rank < kMaxCtas; ++rank) threads_.emplace_back([this, rank] { work(rank); });
  }
  ~Machine() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
      ++round_;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void run_cluster(Cluster& cluster, int num_threads, const std::function<void()>& kernel) {
    std::unique_lock lock(mutex_);
    cluster_ = &cluster;
    num_threads_ = num_threads;
    kernel_ = &kernel;
    num_ctas_ = num_ready_ = num_running_ = cluster.size;
    ++round_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return num_running_ == 0; });
    num_ctas_ = 0;  // for threads that wake up late
  }

  void work(int rank) {
    Cta own;
    uint64_t round = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return round_ != round; });
      round = round_;
      if (is_over_) return;
      if (rank >= num_ctas_) continue;
      Cluster& cluster = *cluster_;
      cluster.anchors[rank] = &anchor;
      if (--num_ready_ == 0) changed_.notify_all();
      changed_.wait(lock, [&] { return num_ready_ == 0; });
      lock.unlock();
      run_cta(own, cluster, rank, num_threads_, *kernel_);
      lock.lock();
      if (--num_running_ == 0) changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Cluster* cluster_ = nullptr;
  int num_threads_ = 0;
  const std::function<void()>* kernel_ = nullptr;
  uint64_t round_ = 0;
  bool is_over_ = false;
  int num_ctas_ = 0;
  int num_ready_ = 0;
  int num_running_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace simt
