// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>

#include "plan/schedule/schedule.h"

namespace flashplan::test {

/// A Scheduler and the memory of its schedule.
class OwningScheduler {
 public:
  OwningScheduler(const ScheduleShape& shape, int32_t max_batch_size, int32_t max_qo_tokens) {
    const ScheduleBounds bounds = schedule_bounds(shape, max_batch_size, max_qo_tokens);
    scheduler_.reserve(shape, bounds);
    groups_.reserve(max_batch_size);
    buffers_ = ScheduleBuffers(bounds);
  }

  /// `batch` is valid.
  void make(const Batch& batch) {
    if (!groups_.read(batch).ok()) std::abort();
    scheduler_.make(batch, groups_.in_order(), buffers_.memory());
  }
  const Schedule& schedule() const { return scheduler_.schedule(); }
  bool gains_by_prefixes() const { return scheduler_.gains_by_prefixes(); }

 private:
  Scheduler scheduler_;
  PrefixGroups groups_;
  ScheduleBuffers buffers_;
};

}  // namespace flashplan::test
