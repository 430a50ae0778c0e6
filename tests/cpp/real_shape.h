// SPDX-License-Identifier: Apache-2.0
// Schedules by the tiles and costs of the kernels that users get.
#pragma once

#include <cstdint>

#include "check.h"
#include "cpu/engine.h"
#include "fake_kernels.h"
#include "owning_scheduler.h"
#include "plan/kernel/select_kernel.h"
#include "random_batch.h"

namespace flashplan::test {

/// The tiles and costs that a user gets, for 8 kv heads of 4 query heads.
inline ScheduleShape real_shape(int32_t num_ctas, DeviceType device = DeviceType::kCpu) {
  AttentionOptions options;
  options.num_qo_heads = 32;
  options.num_kv_heads = 8;
  options.head_dim_qk = options.head_dim_vo = 128;
  options.num_ctas = num_ctas;
  options.device = {device, 0};
  const Kernel kernels[] = {fake_kernel("bf16_d128", {80})};
  DeviceLimits limits;
  limits.kernels = device == DeviceType::kCpu ? cpu::kernels() : kernels;
  limits.num_gpus = 1;
  limits.major = 8;
  KernelChoices choices;
  CHECK(select_kernel(options, limits, &choices).ok());
  const KernelChoice& choice = choices.first;
  ScheduleShape shape;
  shape.num_kv_heads = options.num_kv_heads;
  shape.group_size = 4;
  shape.tile_q = choice.kernel.geometry.tile_q;
  shape.tile_kv = choice.kernel.geometry.tile_kv;
  shape.num_ctas = num_ctas;
  shape.max_partial_slots = 2 * num_ctas;
  shape.item_steps = choice.kernel.tuning.item_steps;
  shape.cost = choice.kernel.tuning.cost;
  return shape;
}

/// A scheduler with memory for one batch.
inline OwningScheduler reserved(const ScheduleShape& shape, const HostBatch& batch) {
  return {shape, batch.size(), batch.qo_tokens()};
}

}  // namespace flashplan::test
