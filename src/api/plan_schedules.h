// SPDX-License-Identifier: Apache-2.0
// The schedules of a plan, which has one kernel or two.
#pragma once

#include "api/plan_impl.h"

namespace flashplan {

/// Reserves memory for the schedules of the plan's kernels, whose layouts are set already. Returns
/// bounds for the memory that these schedules are written to: it holds one schedule at a time or,
/// where batches are divided, one for each kernel.
ScheduleBounds prepare_schedules(Division division, Plan::Impl* impl);

/// Chooses one kernel or both kernels for a batch, and makes a schedule for each chosen kernel.
void make_schedule(const Batch& batch, const ScheduleMemory& memory, Plan::Impl* impl);

}  // namespace flashplan
