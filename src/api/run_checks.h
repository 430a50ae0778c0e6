// SPDX-License-Identifier: Apache-2.0
// Checks of the tensors of run() against the plan.
#pragma once

#include "api/plan_impl.h"
#include "flashplan/plan.h"
#include "flashplan/status.h"

namespace flashplan {

/// Checks all numbers, and all tensors except the values in them.
Status check_tensors(const AttentionTensors& t, const Plan::Impl& plan);

/// Checks the values in tensors that have passed check_tensors() and lie on the CPU.
Status check_values(const AttentionTensors& t, const Plan::Impl& plan);

/// Checks tensors in host memory, and the values in them, for Plan::check_device_data().
Status check_data(const DeviceData& data, const Plan::Impl& plan);

/// Checks that a block table on a GPU, which the host can not read, has enough columns for the
/// planned lengths.
Status check_planned_columns(const AttentionTensors& t, const Plan::Impl& plan);

}  // namespace flashplan
