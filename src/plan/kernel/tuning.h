// SPDX-License-Identifier: Apache-2.0
// Numbers for each kernel family, most of them measured. The scheduler uses them, and so does the
// choice of a kernel for a batch.
#pragma once

#include <cstdint>

#include "plan/schedule/schedule_shape.h"

namespace flashplan {

struct KernelTuning {
  CostModel cost;
  int32_t item_steps = 0;     // see ScheduleShape; 0: all kv heads of a row tile stay together
  int32_t uncut_part = 0;     // > 0: to avoid a cut, a queue may get 1 + 1 / uncut_part shares
  int32_t prepare_reads = 0;  // row tiles that must read a key for it to be worth preparing
  // Keys of a state in batch-invariant mode: tile_kv times a power of two; 0: no row tile is cut.
  int32_t chunk_kv = 0;
  int32_t few_rows_chunk_kv = 0;  // replaces chunk_kv for requests of few rows; 0: it does not

  friend bool operator==(const KernelTuning&, const KernelTuning&) = default;
};

/// Which kernel takes a batch, where a plan has one for few and one for many rows.
struct BatchTuning {
  /// The most packed query rows of a request of few rows. With more rows, the kernels for many rows
  /// are faster.
  int32_t few_rows = 16;
  /// The limit for batch-invariant plans is larger. Their Hopper kernels for many rows cut no row
  /// tile, so a request of few tokens and many keys, such as a draft, would keep one CTA for each
  /// kv head busy for long.
  int32_t few_rows_of_invariant = 64;
  /// Decodes try the kernel for many rows only if sharing saves them at least least_shared_keys
  /// keys of a head for each SM, and at least 1 / least_shared_part of all keys. With that kernel,
  /// a tree of prefixes that saves 900 keys for each SM takes 7 % longer, and one that saves 1,700
  /// takes 17 % less time (H100). Of 64 trees on an H200, none that saves less than 1 /
  /// least_shared_part of all keys became faster.
  int64_t least_shared_keys = 1500;
  int64_t least_shared_part = 8;
};
inline constexpr BatchTuning kBatchTuning;

/// What an SM does in a clock while the kernels for many and for few rows run side by side.
struct SideBySideTuning {
  /// Floating-point operations of an SM for prompts. The 132 SMs of an H200, at 1.755 GHz, reach
  /// 680 TFLOP/s together.
  double flops_per_clock = 2900;
  /// Bytes of 16-bit keys and values that an SM reads from the L2 cache for decodes, while other
  /// SMs compute prompts.
  double bytes_per_clock = 29;
  /// Bytes of 8-bit keys and values that an SM reads and widens for decodes, while other SMs
  /// compute prompts.
  double narrow_bytes_per_clock = 23;
};
inline constexpr SideBySideTuning kSideBySideTuning;

/// Keys are prepared if row tiles read each of them at least KernelTuning::prepare_reads times, on
/// average over a batch. In this average a request counts for at most 3/2 of prepare_reads.
struct PrepareTuning {
  int64_t most_reads_numerator = 3;
  int64_t most_reads_denominator = 2;
};
inline constexpr PrepareTuning kPrepareTuning;

KernelTuning cpu_tuning() noexcept;
KernelTuning sm80_tuning(int32_t tile_kv) noexcept;
/// `gathers`: as in KernelGeometry. `widens`: keys and values have 8 bits.
KernelTuning sm90_tuning(int32_t tile_kv, bool gathers = false, bool widens = false) noexcept;
KernelTuning sm90_mla_tuning() noexcept;
KernelTuning sm90_mla_pairs_tuning() noexcept;
KernelTuning sm90_wide_tuning() noexcept;

}  // namespace flashplan
