// SPDX-License-Identifier: Apache-2.0
// The choice of a kernel as a value: comparable, printable, made by select_kernel() alone.
#pragma once

#include <cstdint>

#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "plan/schedule_shape.h"

namespace flashplan {

struct AttentionParams;
struct KernelInstance;
struct KernelTiling;

enum class KernelFamily : int32_t {
  kCpu = 0,
  kSm80,  // mma.sync, ldmatrix, cp.async: compute capability 8.0 and later
};

constexpr const char* to_string(KernelFamily family) noexcept {
  return family == KernelFamily::kCpu ? "cpu" : "sm80";
}

/// Runs the kernel that the plan selected; the only way from run() to a kernel. On a GPU, with the
/// plan's device current: one launch, no synchronisation.
using LaunchFunction = Status (*)(const AttentionParams& params, Stream stream) noexcept;

/// Tiles of the cpu family: packed query rows, and keys.
constexpr int32_t kCpuTileQ = 128;
constexpr int32_t kCpuTileKv = 32;

struct KernelConfig {
  KernelFamily family = KernelFamily::kCpu;
  DType kv_dtype = DType::kFloat32;          // the template axis of the cpu family
  const KernelInstance* instance = nullptr;  // of the other families
  const KernelTiling* tiling = nullptr;      // one of the instance's
  int32_t tile_q = 0;                        // packed query rows of a tile; a power of two
  int32_t few_rows = 0;                      // of the smallest tile, on a GPU
  int32_t tile_kv = 0;                       // keys of a step; a power of two
  int32_t num_ctas = 0;                      // work queues
  int32_t chunk_kv = 0;                      // keys of a state in batch-invariant mode, else 0
  int32_t item_steps = 0;                    // see ScheduleShape
  CostModel cost;
};

}  // namespace flashplan
