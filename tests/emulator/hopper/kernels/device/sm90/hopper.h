// SPDX-License-Identifier: Apache-2.0
// In place of the library's hopper.h, for fibers of the emulator. Bulk copies spoil their target
// when they start, and arrive in any order while threads wait for mbarriers.
#pragma once

#include <array>
#include <functional>
#include <random>

#include "abi/tensor_maps.h"
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

/// Copies under way, and how long threads have waited without anything happening.
struct CopyEngine {
  std::vector<std::function<void()>> copies;
  std::mt19937 random{1};
  uint64_t num_waits = 0;

  void finish_one() {
    if (copies.empty()) {
      if (++num_waits > 30'000'000) simt::fail("threads wait for an mbarrier for ever");
      return;
    }
    std::swap(copies[random() % copies.size()], copies.back());
    const std::function<void()> copy = std::move(copies.back());
    copies.pop_back();
    copy();
  }
};
inline CopyEngine& copy_engine() {
  static thread_local CopyEngine engine;
  return engine;
}

inline void mbarrier_init(uint32_t barrier, int count) {
  *at_shared<Mbarrier>(barrier) = {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0,
                                   0};
}
inline void mbarrier_fence_init() {}
inline void complete_if_all_came(Mbarrier& barrier) {
  copy_engine().num_waits = 0;
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count & 0x7fff;
  barrier.parity ^= 1;
}
inline void mbarrier_arrive(uint32_t at) {
  Mbarrier& barrier = *at_shared<Mbarrier>(at);
  if (barrier.pending == 0) simt::fail("too many arrive at an mbarrier");
  --barrier.pending;
  complete_if_all_came(barrier);
}
inline void mbarrier_expect(uint32_t at, uint32_t bytes) {
  at_shared<Mbarrier>(at)->bytes += static_cast<int32_t>(bytes);
}
inline void mbarrier_arrive_expect(uint32_t at, uint32_t bytes, int count = 1) {
  mbarrier_expect(at, bytes);
  for (int i = 0; i < count; ++i) mbarrier_arrive(at);
}
inline void mbarrier_arrive_after_copies(uint32_t at) {
  AsyncGroups& groups = async_groups();
  std::vector<AsyncCopy> all;
  for (const auto& group : groups) all.insert(all.end(), group.begin(), group.end());
  groups.clear();
  copy_engine().copies.emplace_back([all = std::move(all), at] {
    copy_now(all);
    mbarrier_arrive(at);
  });
}
inline bool mbarrier_try_wait(uint32_t at, uint32_t parity) {
  if (at_shared<Mbarrier>(at)->parity != parity) return true;
  copy_engine().finish_one();
  return at_shared<Mbarrier>(at)->parity != parity;
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!__all_sync(0xffffffffU, mbarrier_try_wait(barrier, parity))) {
  }
}
inline bool mbarrier_test(uint32_t at, uint32_t parity) { return mbarrier_try_wait(at, parity); }
struct MbarrierPhase {
  uint32_t barrier;
  uint32_t parity;
};
inline void mbarrier_wait(MbarrierPhase a, MbarrierPhase b) {
  mbarrier_wait(a.barrier, a.parity);
  mbarrier_wait(b.barrier, b.parity);
}

/// What the emulator keeps in a TensorMap, the innermost dimension first. Elements have 16 bits,
/// and boxes are swizzled by 128 bytes.
struct EmulatedMap {
  struct Dim {
    int64_t size = 1;
    int64_t stride = 0;  // in elements
  };
  const uint16_t* data = nullptr;
  std::array<Dim, 5> dims = {};
  std::array<int32_t, 5> box = {1, 1, 1, 1, 1};
};
static_assert(sizeof(EmulatedMap) <= sizeof(TensorMap));

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
    at_shared<Mbarrier>(barrier)->bytes -= count * 2;
    complete_if_all_came(*at_shared<Mbarrier>(barrier));
  });
}
inline void tma_load_3d(uint32_t to, const void* map, uint32_t barrier, int c0, int c1, int c2) {
  load_box(to, map, barrier, {c0, c1, c2, 0, 0});
}
inline void tma_load_5d(uint32_t to, const void* map, uint32_t barrier, int c0, int c1, int c2,
                        int c3, int c4) {
  load_box(to, map, barrier, {c0, c1, c2, c3, c4});
}
inline void tma_store_3d(const void*, uint32_t, int, int, int) {
  simt::fail("stores by tensor maps are not emulated");
}
inline void tma_store_commit() {}
inline void tma_store_wait_read() {}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  copy_engine().copies.emplace_back([=] {
    std::memcpy(at_shared(to), from, bytes);
    at_shared<Mbarrier>(barrier)->bytes -= static_cast<int32_t>(bytes);
    complete_if_all_came(*at_shared<Mbarrier>(barrier));
  });
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
