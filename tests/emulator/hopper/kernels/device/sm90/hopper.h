// SPDX-License-Identifier: Apache-2.0
// In place of the library's hopper.h, for fibers of the emulator. Bulk copies spoil their target
// when they start, and arrive in any order while threads wait for mbarriers.
#pragma once

#include <array>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>

#include "emulated_map.h"
#include "kernels/device/ptx.h"

namespace flashplan::device {

/// The word of an mbarrier.
struct Mbarrier {
  uint16_t count;
  uint16_t pending : 15;
  uint16_t parity : 1;
  int32_t bytes;  // that are expected and have not come
};
static_assert(sizeof(Mbarrier) == 8);

/// Copies under way.
struct CopyEngine {
  std::vector<std::function<void()>> copies;
  std::vector<std::function<void()>> late;  // those to other CTAs, which take long
  std::mt19937 random{1};

  /// Takes what other CTAs of the cluster have sent to this one.
  void take_from_others();
  bool is_idle() const { return copies.empty() && late.empty(); }
  void finish_one() {
    const bool is_late = !late.empty() && random() % 8192 == 0;
    std::vector<std::function<void()>>& from = is_late ? late : copies;
    if (from.empty()) return;
    std::swap(from[random() % from.size()], from.back());
    const std::function<void()> copy = std::move(from.back());
    from.pop_back();
    simt::note_event();
    copy();
  }
};
inline CopyEngine& copy_engine() {
  static thread_local CopyEngine engine;
  return engine;
}

/// What CTAs of a cluster have sent to one of them. Its own thread does it.
struct Inbox {
  std::mutex mutex;
  std::vector<std::function<void()>> sent;
};
inline Inbox& inbox(int rank) {
  static Inbox all[simt::kMaxCtas];
  return all[rank];
}
inline void CopyEngine::take_from_others() {
  Inbox& own = inbox(simt::cta->rank);
  const std::lock_guard lock(own.mutex);
  for (auto& sent : own.sent) copies.push_back(std::move(sent));
  own.sent.clear();
}
/// As at the begin of a CTA: what was sent to one before came too late.
inline void reset_copy_engine(unsigned seed) {
  CopyEngine& engine = copy_engine();
  engine.take_from_others();
  engine.copies.clear();
  engine.late.clear();
  engine.random.seed(seed);
}

/// What the emulator knows about an mbarrier besides its word.
struct MbarrierFacts {
  const char* name = "mbarrier";
  uint32_t index = 0;
  // Of memory that is filled and freed in turn, the mbarriers for both name each other.
  uint32_t full = 0;        // where this is that for empty; 0: none
  uint32_t empty = 0;       // where this is that for full; 0: none
  uint32_t num_phases = 0;  // that are complete
  std::vector<int> came;    // threads, in this phase
};
inline std::unordered_map<uint32_t, MbarrierFacts>& mbarrier_facts() {
  static thread_local std::unordered_map<uint32_t, MbarrierFacts> facts;
  return facts;
}
[[noreturn]] inline void fail_at(uint32_t barrier, const char* what) {
  const MbarrierFacts& facts = mbarrier_facts()[barrier];
  if (simt::describe_waits != nullptr) simt::describe_waits();
  simt::fail(std::string(what) + ": " + facts.name + "[" + std::to_string(facts.index) +
             "], phase " + std::to_string(facts.num_phases) + ", thread " +
             std::to_string(simt::cta->current) + " running in CTA " +
             std::to_string(simt::cta->rank));
}
/// Names two mbarriers, before they are initialised: for memory that is full, and that is empty.
inline void name_mbarriers(const char* full_name, uint32_t full, const char* empty_name,
                           uint32_t empty, uint32_t index) {
  mbarrier_facts()[full] = {full_name, index, 0, empty, 0, {}};
  mbarrier_facts()[empty] = {empty_name, index, full, 0, 0, {}};
}
/// Writes what each warp of the CTA has waited for last.
inline void describe_mbarriers() {
  const simt::Cta& c = *simt::cta;
  for (int w = 0; w < c.size / 32; ++w) {
    const char* what = c.waits[w] != nullptr ? c.waits[w] : "nothing";
    std::fprintf(stderr, "  CTA %d, warp %d (%d threads): %s", c.rank, w, c.warps[w].size, what);
    if (c.waits[w] != nullptr && std::strcmp(what, "mbarrier") == 0) {
      const MbarrierFacts& facts = mbarrier_facts()[c.places[w]];
      const Mbarrier& word = *at_shared<Mbarrier>(c.places[w]);
      std::fprintf(stderr, " %s[%u], parity %u; %u phases complete, %d to come, %d bytes",
                   facts.name, facts.index, c.parities[w], facts.num_phases, word.pending,
                   word.bytes);
    } else {
      std::fprintf(stderr, " %u", c.places[w]);
    }
    std::fprintf(stderr, "\n");
  }
}

inline void mbarrier_init(uint32_t barrier, int count) {
  MbarrierFacts& facts = mbarrier_facts()[barrier];
  facts.num_phases = 0;
  facts.came.clear();
  *at_shared<Mbarrier>(barrier) = {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0,
                                   0};
}
inline void mbarrier_fence_init() {}
inline void complete_if_all_came(uint32_t at) {
  Mbarrier& barrier = *at_shared<Mbarrier>(at);
  simt::note_event();
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count & 0x7fff;
  barrier.parity ^= 1;
  MbarrierFacts& facts = mbarrier_facts()[at];
  ++facts.num_phases;
  facts.came.clear();
}
/// `thread`: who arrives. Threads of other CTAs, which count from kMaxThreads on, may have read
/// their own memory before that of this CTA is full.
inline void arrive_of(int thread, uint32_t at, int count) {
  Mbarrier& barrier = *at_shared<Mbarrier>(at);
  MbarrierFacts& facts = mbarrier_facts()[at];
  if (barrier.pending < count) fail_at(at, "too many arrive");
  if (std::find(facts.came.begin(), facts.came.end(), thread) != facts.came.end()) {
    fail_at(at, "a thread arrives twice in one phase");
  }
  facts.came.push_back(thread);
  if (facts.empty != 0 && mbarrier_facts()[facts.empty].num_phases < facts.num_phases) {
    fail_at(at, "filled before it is free");
  }
  if (facts.full != 0 && thread < simt::kMaxThreads &&
      mbarrier_facts()[facts.full].num_phases <= facts.num_phases) {
    fail_at(at, "freed before it is full");
  }
  barrier.pending = static_cast<uint16_t>(barrier.pending - count) & 0x7fff;
  complete_if_all_came(at);
}
inline void mbarrier_arrive(uint32_t at, int count = 1) {
  arrive_of(simt::cta->current, at, count);
}
inline void mbarrier_expect(uint32_t at, uint32_t bytes) {
  at_shared<Mbarrier>(at)->bytes += static_cast<int32_t>(bytes);
}
inline void mbarrier_arrive_expect(uint32_t at, uint32_t bytes, int count = 1) {
  mbarrier_expect(at, bytes);
  mbarrier_arrive(at, count);
}
inline void mbarrier_arrive_after_copies(uint32_t at) {
  AsyncGroups& groups = async_groups();
  std::vector<AsyncCopy> all;
  for (const auto& group : groups) all.insert(all.end(), group.begin(), group.end());
  groups.clear();
  copy_engine().copies.emplace_back([all = std::move(all), at, thread = simt::cta->current] {
    copy_now(all);
    arrive_of(thread, at, 1);
  });
}
inline bool mbarrier_test(uint32_t at, uint32_t parity) {
  return at_shared<Mbarrier>(at)->parity != parity;
}
inline bool mbarrier_try_wait(uint32_t at, uint32_t parity) {
  if (mbarrier_test(at, parity)) return true;
  note_wait("mbarrier", at, parity);
  copy_engine().take_from_others();
  copy_engine().finish_one();
  return mbarrier_test(at, parity);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!__all_sync(0xffffffffU, mbarrier_try_wait(barrier, parity))) {
  }
}
struct MbarrierPhase {
  uint32_t barrier;
  uint32_t parity;
};
inline void mbarrier_wait(MbarrierPhase a, MbarrierPhase b) {
  mbarrier_wait(a.barrier, a.parity);
  mbarrier_wait(b.barrier, b.parity);
}
inline void receive(uint32_t barrier, int bytes) {
  at_shared<Mbarrier>(barrier)->bytes -= bytes;
  complete_if_all_came(barrier);
}

// Addresses in other CTAs have their number, counted from 1, in the upper 8 bits.
inline uint32_t cluster_rank() { return static_cast<uint32_t>(simt::cta->rank); }
inline uint32_t address_in_cta(uint32_t address, uint32_t rank) {
  return (address & 0xffffffU) | (rank + 1) << 24;
}
/// Lets the CTA of an address do something with the place that it has there.
inline void send(uint32_t address, std::function<void(uint32_t own)> what) {
  const int rank = static_cast<int>(address >> 24) - 1;
  const simt::Cluster& cluster = *simt::cta->cluster;
  if (rank < 0 || rank >= cluster.size) simt::fail("no such rank");
  if (cluster.ended[rank]) simt::fail("the CTA whose memory is written to has ended");
  Inbox& to = inbox(rank);
  const std::lock_guard lock(to.mutex);
  to.sent.emplace_back([=] { what(address & 0xffffffU); });
  simt::note_event();
}
inline void mbarrier_arrive_in_cluster(uint32_t barrier) {
  const bool is_own = static_cast<int>(barrier >> 24) - 1 == simt::cta->rank;
  const int thread = (is_own ? 0 : simt::kMaxThreads) + simt::cta->current;
  send(barrier, [=](uint32_t at) { arrive_of(thread, at, 1); });
}
/// Reads its source as late as other copies do. Until then it must not change.
inline void bulk_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 != 0 || from % 16 != 0 || bytes % 16 != 0) simt::fail("a bulk copy is not aligned");
  if (to >> 24 != barrier >> 24) simt::fail("bytes count in another CTA than they come to");
  const std::vector<unsigned char> sent(at_shared(from), at_shared(from) + bytes);
  copy_engine().late.emplace_back([=] {
    if (std::memcmp(sent.data(), at_shared(from), bytes) != 0) {
      simt::fail("what a bulk copy reads was changed");
    }
    send(to, [=](uint32_t own) {
      std::memcpy(at_shared(own), sent.data(), sent.size());
      receive(barrier & 0xffffffU, static_cast<int>(sent.size()));
    });
  });
}
inline void cluster_barrier() {
  while (!copy_engine().is_idle()) copy_engine().finish_one();
  simt::cluster_arrive();
  simt::cluster_wait();
}
inline void cluster_barrier_of_begin() { cluster_barrier(); }

inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) {
    simt::fail("a bulk copy is not aligned");
  }
  std::memset(at_shared(to), 0xff, bytes);
  copy_engine().copies.emplace_back([=] {
    std::memcpy(at_shared(to), from, bytes);
    receive(barrier, static_cast<int>(bytes));
  });
}
/// A bulk store reads shared memory when it must have, and writes global memory when it must have.
struct BulkStore {
  void* to;
  uint32_t from;
  std::vector<unsigned char> bytes;
  bool has_read = false;
};
inline std::vector<BulkStore>& bulk_stores() {
  static thread_local std::vector<BulkStore> all[simt::kMaxThreads];
  return all[simt::cta->current];
}
inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  bulk_stores().push_back({to, from, std::vector<unsigned char>(bytes)});
}
inline void tma_store_commit() {}
inline void tma_store_wait_read() {
  for (BulkStore& store : bulk_stores()) {
    if (store.has_read) continue;
    std::memcpy(store.bytes.data(), at_shared(store.from), store.bytes.size());
    store.has_read = true;
  }
}
inline void bulk_store_wait() {
  tma_store_wait_read();
  for (const BulkStore& store : bulk_stores()) {
    std::memcpy(store.to, store.bytes.data(), store.bytes.size());
  }
  bulk_stores().clear();
}
inline void tma_store_3d(const void*, uint32_t, int, int, int) {
  simt::fail("stores by tensor maps are not emulated");
}

inline void load_box(uint32_t to, const void* tensor_map, uint32_t barrier,
                     std::array<int, 5> begin) {
  EmulatedMap map;
  std::memcpy(&map, tensor_map, sizeof(map));
  int32_t count = 1;
  for (const int32_t n : map.box) count *= n;
  if (map.box[0] != 64) simt::fail("a box is not 128 bytes wide");
  if (to % 128 != 0) simt::fail("a box is not aligned");
  std::memset(at_shared(to), 0xff, static_cast<size_t>(count) * 2);
  copy_engine().copies.emplace_back([=] {
    for (int32_t i = 0; i < count; ++i) {
      const uint16_t* from = map.data;
      bool exists = true;
      int32_t left = i;
      for (size_t d = 0; d < 5; ++d) {
        const int64_t at = int64_t{begin[d]} + left % map.box[d];
        left /= map.box[d];
        exists = exists && at >= 0 && at < map.dims[d].size;
        if (exists) from += at * map.dims[d].stride;
      }
      const uint32_t address = to + static_cast<uint32_t>(i) * 2;
      *at_shared<uint16_t>(address ^ (address >> 7 & 7) << 4) = exists ? *from : uint16_t{0};
    }
    receive(barrier, count * 2);
  });
}
inline void tma_load_3d(uint32_t to, const void* map, uint32_t barrier, int c0, int c1, int c2) {
  load_box(to, map, barrier, {c0, c1, c2, 0, 0});
}
inline void tma_load_5d(uint32_t to, const void* map, uint32_t barrier, int c0, int c1, int c2,
                        int c3, int c4) {
  load_box(to, map, barrier, {c0, c1, c2, c3, c4});
}
inline void tma_prefetch_map(const void*) {}
inline void tma_prefetch_5d(const void*, int, int, int, int, int) {}

inline void fence_async_proxy() {}
inline void fence_async_proxy_of_all_memory() {}
template <int kRegisters>
void release_registers() {}
template <int kRegisters>
void take_registers() {}

inline void barrier_wait_if(bool does, int id, int threads) {
  if (does) barrier_wait(id, threads);
}
inline void barrier_arrive_if(bool does, int id, int threads) {
  if (does) barrier_arrive(id, threads);
}

inline void stmatrix(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const int lane = lane_index();
  const uint64_t* rows = simt::share(row);
  const uint32_t values[4] = {a, b, c, d};
  for (int j = 0; j < 4; ++j) {
    *at_shared<uint32_t>(static_cast<uint32_t>(rows[j * 8 + lane / 4]) +
                         static_cast<uint32_t>(lane % 4) * 4) = values[j];
  }
}

}  // namespace flashplan::device
