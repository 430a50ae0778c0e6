// SPDX-License-Identifier: Apache-2.0
// The state of a Plan: create() and plan() fill it, run() reads it.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "abi/rope_turns.h"
#include "api/key_lists.h"
#include "cuda/device_schedule.h"
#include "flashplan/plan.h"
#include "plan/kernel/batch_kind.h"
#include "plan/kernel/kernel.h"
#include "plan/schedule/schedule.h"
#include "plan/workspace_layout.h"

namespace flashplan {

/// One of the kernels that a Plan can launch, with the scheduler that makes its schedules.
struct PlanKernel {
  KernelChoice choice;
  WorkspaceLayout layout;
  Scheduler scheduler;
  /// Whether the smallest of KernelGeometry::bodies has room for the packed rows of an average
  /// request. If so, KernelCode::few_rows_first is launched, else many_rows_first. A captured graph
  /// keeps launching the one that was captured. In plans that are batch-invariant or divide batches
  /// this flag depends on the kernel alone.
  bool has_few_rows = false;
};

/// Why the last plan() took the kernel that it took, where there are two.
enum class KernelReason {
  kRows,      // it is the kernel for the number of rows that the batch's requests have
  kPrefixes,  // shared prefixes make the kernel for many rows the faster one
  kCaptured,  // a captured graph has only this kernel
};

struct Plan::Impl {
  AttentionOptions options;  // defaults filled in
  /// KernelChoices::first and, if there is one, KernelChoices::second. plan() takes one of them for
  /// a batch, or both.
  std::vector<PlanKernel> kernels;
  int32_t current = 0;     // the kernel of the last plan(); if it took both, the one for many rows
  bool takes_two = false;  // whether the last plan() took both kernels
  /// Whether every later plan() takes the current kernel, because a captured graph has no other
  /// kernel.
  bool keeps_kernel = false;
  KernelReason reason = KernelReason::kRows;            // of the last plan()
  DeviceLimits device;                                  // what the kernels were chosen for
  RopeTurns rope;                                       // set if the options have a rope
  PrefixGroups prefixes;                                // the shared prefixes of the batch
  ScheduleBuffers buffers;                              // hold the schedule of a plan on the CPU
  std::optional<cuda::DeviceSchedule> device_schedule;  // holds the schedule of a plan on a GPU
  int32_t batch_size = 0;
  int32_t num_tokens = 0;           // qo_indptr[batch_size]
  int32_t num_shared_prefixes = 0;  // prefixes that the caller gave, used or not
  int32_t num_kv_rows = 0;          // rows of ragged k and v that are read
  std::vector<int32_t> kv_lens;     // planned lengths; has room for any batch
  int32_t longest_request = 0;      // the first request with the most keys
  int64_t num_mask_bits = 0;        // bits that a row of the mask must have
  bool has_key_ranges = false;      // whether the batch has ranges of keys
  int32_t num_prepared_tiles = 0;   // prepared tiles of keys
  KeyListBatch lists;               // with topk: the batch in which each token is a request
  /// A run on the CPU copies its kv_lens, or topk_lens, to real_lens, and its page_indptr to
  /// page_indptr. Plan::create() reserves memory for any batch.
  std::vector<int32_t> real_lens;
  std::vector<int32_t> page_indptr;
  bool planned = false;
  std::atomic_flag in_use;

  PlanKernel& kernel() noexcept { return kernels[static_cast<std::size_t>(current)]; }
  const PlanKernel& kernel() const noexcept { return kernels[static_cast<std::size_t>(current)]; }
  /// The kernel that is not current, in a plan with two kernels.
  PlanKernel& other_kernel() noexcept { return kernels[static_cast<std::size_t>(1 - current)]; }
  const PlanKernel& other_kernel() const noexcept {
    return kernels[static_cast<std::size_t>(1 - current)];
  }
  const Schedule& schedule() const noexcept { return kernel().scheduler.schedule(); }
  /// Whether the last plan() took kernel number `number`.
  bool takes(int32_t number) const noexcept { return takes_two || number == current; }
  int32_t num_kernels() const noexcept { return static_cast<int32_t>(kernels.size()); }
  /// The kind of batches, or of requests, that kernel number `number` is for.
  BatchKind kind_of_kernel(int32_t number) const noexcept {
    const BatchKind first = kind_of_bounds(options);
    return number == 0 ? first : other_kind(first);
  }
  /// Whether a batch may take both kernels, each for some of its requests.
  bool divides_batches() const noexcept {
    return kernels.size() > 1 && flashplan::divides_batches(options);
  }
};

/// Lets one thread in at a time: a second thread is refused, and does not wait.
class InUseGuard {
 public:
  explicit InUseGuard(std::atomic_flag& flag) noexcept
      : flag_(flag), acquired_(!flag.test_and_set(std::memory_order_acquire)) {}
  ~InUseGuard() {
    if (acquired_) flag_.clear(std::memory_order_release);
  }
  InUseGuard(const InUseGuard&) = delete;
  InUseGuard& operator=(const InUseGuard&) = delete;
  bool acquired() const noexcept { return acquired_; }

 private:
  std::atomic_flag& flag_;
  bool acquired_;
};

}  // namespace flashplan
