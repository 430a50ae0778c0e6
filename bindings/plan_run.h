// SPDX-License-Identifier: Apache-2.0
// Runs a Python Plan on tensors that are views already.
#pragma once

#include <nanobind/nanobind.h>

#include "flashplan/plan.h"

namespace flashplan {

/// `plan` is a _core.Plan, whose workspace is written to `tensors`. Takes and returns with the GIL;
/// the run itself is without it.
Status run_views(nanobind::handle plan, AttentionTensors& tensors, Stream stream);

}  // namespace flashplan
