// SPDX-License-Identifier: Apache-2.0
// What was measured of the kernel families, for the scheduler.
#pragma once

#include <cstdint>

#include "plan/schedule/schedule_shape.h"

namespace flashplan {

struct KernelTuning {
  CostModel cost;
  int32_t item_steps = 0;     // see ScheduleShape
  int32_t uncut_part = 0;     // see ScheduleShape
  int32_t prepare_reads = 0;  // see ScheduleShape
  int32_t chunk_kv = 0;  // keys of a state in batch-invariant mode: tile_kv times a power of two

  friend bool operator==(const KernelTuning&, const KernelTuning&) = default;
};

KernelTuning cpu_tuning() noexcept;
KernelTuning sm80_tuning(int32_t tile_kv) noexcept;
/// `gathers`: as in KernelGeometry.
KernelTuning sm90_tuning(int32_t tile_kv, bool gathers = false) noexcept;

}  // namespace flashplan
