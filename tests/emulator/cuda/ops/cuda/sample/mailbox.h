// SPDX-License-Identifier: Apache-2.0
// In place of the library's mailbox.h.
#pragma once

#include <cstring>
#include <mutex>
#include <new>
#include <thread>

#include "ops/cuda/sample/cluster.h"

namespace flashplan::cuda {

class Mailbox {
 public:
  /// The memory may be that of something else before.
  void init() { ::new (this) Mailbox; }
  static void fence_init() {}
  void expect(uint32_t bytes) {
    const std::lock_guard lock(mutex_);
    if (is_expecting_) simt::fail("a round begins before the end of the one before");
    is_expecting_ = true;
    balance_ -= bytes;
    end_round();
  }
  void wait(uint32_t parity) {
    while (!has_ended(parity)) {
      if (simt::cta->num_switches % 1024 == 0) std::this_thread::yield();
      simt::yield();
    }
    simt::note_event();
  }
  void send(uint64_t* to, uint64_t value, int rank) {
    *shared_of(to, rank) = value;
    shared_of(this, rank)->receive(8);
  }
  void send(void* to, uint64_t first, uint64_t second, int rank) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0) simt::fail("a message is not aligned");
    const uint64_t values[] = {first, second};
    std::memcpy(shared_of(static_cast<char*>(to), rank), values, sizeof(values));
    shared_of(this, rank)->receive(16);
  }

 private:
  /// The variable of CTA `rank` that is `own` in this CTA.
  template <class T>
  static T* shared_of(T* own, int rank) {
    return cooperative_groups::this_cluster().map_shared_rank(own, rank);
  }
  void receive(int bytes) {
    const std::lock_guard lock(mutex_);
    balance_ += bytes;
    end_round();
  }
  void end_round() {
    if (!is_expecting_ || balance_ != 0) return;
    is_expecting_ = false;
    ++num_rounds_;
  }
  bool has_ended(uint32_t parity) {
    const std::lock_guard lock(mutex_);
    return num_rounds_ % 2 != parity;
  }

  std::mutex mutex_;
  uint32_t num_rounds_ = 0;  // that have ended
  int64_t balance_ = 0;      // bytes that have come, without those that are expected
  bool is_expecting_ = false;
};

}  // namespace flashplan::cuda
