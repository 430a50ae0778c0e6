// SPDX-License-Identifier: Apache-2.0
// The compile-time choices of a kernel: its types, and how warps share tiles and shared memory.
#pragma once

#include "kernels/device/kv_loader.h"
#include "kernels/device/variant.h"

namespace flashplan::device {

/// The compile-time choices of a kernel.
template <DType kQ_, DType kKv_, int kHeadDimQk_, int kHeadDimVo_, typename Variant_>
struct Traits {
  static constexpr DType kQ = kQ_;
  static constexpr DType kKv = kKv_;
  static constexpr int kHeadDimQk = kHeadDimQk_;
  static constexpr int kHeadDimVo = kHeadDimVo_;
  using Variant = Variant_;

  // Accumulators of 32 rows x 256 dims do not fit a warp's registers, so d256 has 16 rows per warp
  // and twice the warps: as many per SM.
  static constexpr bool kIsWide = kHeadDimVo > 128;
  static constexpr int kThreads = kIsWide ? 256 : 128;
  static constexpr int kCtasPerSm = kIsWide ? 1 : 2;
  static constexpr int kTileQ = 128;
  // Keys of a step. (192, 128) of 16 bits: 64 would leave room for one stage. d256 of 8 bits: 64
  // would leave none for the exchange of rows in TileOutput. d64: more work between barriers.
  static constexpr bool kIsNarrow = Element<kKv>::kBytes == 1;
  static constexpr int kTileKv = kHeadDimQk == 192 && !kIsNarrow              ? 32
                                 : (kIsWide && kIsNarrow) || kHeadDimQk <= 64 ? 128
                                                                              : 64;
  static constexpr int kKBytes = kTileKv * kHeadDimQk * Element<kKv>::kBytes;
  static constexpr int kVBytes = kTileKv * kHeadDimVo * Element<kKv>::kBytes;
  // Of the 228 KB of an SM, 1 KB per CTA is the system's, and some is static.
  static constexpr int kSmemBudget = (kCtasPerSm == 1 ? 227 * 1024 : 113 * 1024) - 512;
};

/// How the warps of a CTA share a row tile of up to kRows rows: kWarpsQ of them side by side, each
/// with kMmaM * 16 rows, times kWarpsKv that take different keys of each tile. Tiles of few rows
/// are bound by memory; then every warp has its own softmax until the end, and nothing to wait for.
template <typename T, int kWarpsQ_, int kMmaM_>
struct Shape {
  static constexpr int kMmaM = kMmaM_;
  static constexpr int kWarpsQ = kWarpsQ_;
  static constexpr int kWarps = T::kThreads / 32;
  static constexpr int kMostWarpsKv = T::kTileKv / 16;
  static constexpr int kWarpsKv = kWarps / kWarpsQ < kMostWarpsKv ? kWarps / kWarpsQ : kMostWarpsKv;
  static constexpr int kRows = kWarpsQ * kMmaM * 16;
  static constexpr int kKeysPerWarp = T::kTileKv / kWarpsKv;
  // Logits in registers at a time, for which queries are read once. d256 of 8 bits: fragments take
  // more registers while they are widened.
  static constexpr int kMostAtOnce = T::kIsWide && T::kIsNarrow ? 32 : 64;
  static constexpr int kKeysAtOnce = kKeysPerWarp < kMostAtOnce ? kKeysPerWarp : kMostAtOnce;
  // Of these, weights at a time: fewer where accumulators and logits take most registers.
  static constexpr int kMostWeights = kMmaM * (T::kHeadDimVo + kKeysAtOnce) >= 384 ? 32 : 64;
  static constexpr int kWeightsAtOnce = kKeysAtOnce < kMostWeights ? kKeysAtOnce : kMostWeights;

  // Few rows: every stage has room for queries, which are kept in registers. Many: there is one
  // buffer, whose rows each warp reads itself and fills for the next head when it is done.
  static constexpr bool kQueryInStage = kRows <= 64;
  static constexpr bool kQueryInRegisters = kQueryInStage || T::kHeadDimQk <= 64;
  static constexpr int kQBytes = kRows * T::kHeadDimQk * Element<T::kQ>::kBytes;
  static constexpr int kStageBytes = T::kKBytes + T::kVBytes + (kQueryInStage ? kQBytes : 0);
  static constexpr int kStatsBytes = kWarps * 8 * 8;
  static constexpr int kFixedBytes = 128 + kStatsBytes + (kQueryInStage ? 0 : kQBytes);

  // Per tile, the row addresses and page ids of its keys, in a ring of kSlots tiles.
  static constexpr int kTableBytes = T::kTileKv * KvRow::kPitch;
  static constexpr int kIdBytes = T::kTileKv * 4;
  /// A multiple of the stages, and of twice the tiles whose rows are found at once: those of the
  /// ones before are in use.
  static constexpr int slots(int stages, int tiles_at_once) {
    const int least = tiles_at_once == 1 ? 1 : 2 * tiles_at_once;
    int slots = stages;
    while (slots % least != 0) slots += stages;
    return slots;
  }
  static constexpr int smem_bytes(int stages, int tiles_at_once) {
    return kFixedBytes + slots(stages, tiles_at_once) * (kTableBytes + kIdBytes) +
           stages * kStageBytes;
  }
  static constexpr int most_stages(int tiles_at_once) {
    int stages = 6;
    while (stages > 2 && smem_bytes(stages, tiles_at_once) > T::kSmemBudget) --stages;
    return stages;
  }
  // Where queries are read in every step, registers are left to find the rows of 256 keys at once,
  // for one wait instead of several, if that costs no stage.
  static constexpr int kMostTilesAtOnce = kQueryInRegisters ? 1 : 256 / T::kTileKv;
  static constexpr int kTilesAtOnce =
      most_stages(kMostTilesAtOnce) == most_stages(1) ? kMostTilesAtOnce : 1;
  static constexpr int kStages = most_stages(kTilesAtOnce);
  static constexpr int kSlots = slots(kStages, kTilesAtOnce);

  // Offsets in shared memory.
  static constexpr int kVisible = 0;  // VisibleKeys of each warp's rows
  static constexpr int kStats = 128;  // float2 (shift, sum) of 8 rows of each warp
  static constexpr int kTables = kStats + kStatsBytes;
  static constexpr int kIds = kTables + kSlots * kTableBytes;
  static constexpr int kQuery = kIds + kSlots * kIdBytes;
  static constexpr int kFirstStage = kQuery + (kQueryInStage ? 0 : kQBytes);
  static constexpr int kSmemBytes = kFirstStage + kStages * kStageBytes;
  static_assert(kSmemBytes == smem_bytes(kStages, kTilesAtOnce) && kSmemBytes <= T::kSmemBudget);
  // TileOutput passes 8 rows of each warp through a stage.
  static_assert(kWarpsQ * kWarpsKv * 8 * T::kHeadDimVo * 4 <= kStageBytes);
  static_assert(kWarps * 16 <= kStats - kVisible);
  // Inside a stage.
  static constexpr int kKey = 0;
  static constexpr int kValue = T::kKBytes;
  static constexpr int kStageQuery = T::kKBytes + T::kVBytes;
};

/// The shapes of a kernel, by the rows of a work tile.
template <typename T>
struct Shapes {
  using Few = Shape<T, 1, 1>;                                   // up to 16 rows: decode
  using Some = Shape<T, 4, 1>;                                  // up to 64
  using Many = Shape<T, T::kThreads / 32, T::kIsWide ? 1 : 2>;  // up to 128: prompts

  static constexpr int kLarger =
      Few::kSmemBytes > Some::kSmemBytes ? Few::kSmemBytes : Some::kSmemBytes;
  static constexpr int kSmemBytes = kLarger > Many::kSmemBytes ? kLarger : Many::kSmemBytes;
  static_assert(Many::kRows == T::kTileQ);
};

}  // namespace flashplan::device
