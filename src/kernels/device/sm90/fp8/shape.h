// SPDX-License-Identifier: Apache-2.0
// Sizes of the sm90_fp8 family.
#pragma once

#include "kernels/device/sm90/shape.h"

namespace flashplan::device {

/// Sm90Shape for queries, keys and values of 8 bits: two elements have the place of one of 16
/// bits, so that tiles are those of half as many dims. A warpgroup transposes values, since the
/// products of 8 bits sum over neighbours in memory alone.
template <typename Choices>
struct Sm90Fp8Shape : Sm90Shape<Choices> {
  using Base = Sm90Shape<Choices>;
  static_assert(Choices::kHeadDimQk == 128 && Choices::kHeadDimVo == 128);
  static constexpr bool kTransposes = true;
  static constexpr bool kWidens = false;
  static constexpr int kThreads = 128 * (Base::kWarpgroups + 2);
  static constexpr int kProducerRegisters = 72;
  static constexpr int kTransposerRegisters = 56;
  static constexpr int kConsumerRegisters = 192;
  static_assert(Base::kWarpgroups * kConsumerRegisters + kProducerRegisters +
                    kTransposerRegisters <=
                kThreads / 128 * (65536 / kThreads / 8 * 8));
  static constexpr int kTransposerBarrier = Base::kRotatorBarrier;

  using Query = WgmmaTile<Choices::kHeadDimQk / 2, Base::kTileQ>;
  using Key = WgmmaTile<Choices::kHeadDimQk / 2, 8>;
  using Value = WgmmaTile<Choices::kHeadDimVo / 2, 8>;
  /// Rows are dims, and have the keys of a step.
  using TransposedValue = WgmmaTile<Base::kTileKv / 2, 8>;
  // Dims of values that are multiplied first. With fewer of them, a thread has too few registers
  // for the sums of the others beside logits.
  static constexpr int kFirstDims = 96;
  // kQBytes is that of Sm90Shape: the output, which is staged there, has 16 bits.
  static constexpr int kKeyBytes = Key::bytes(Base::kTileKv);
  static constexpr int kValueBytes = Value::bytes(Base::kTileKv);
  static constexpr int kSlotBytes = kKeyBytes;
  static_assert(kValueBytes == kSlotBytes &&
                TransposedValue::bytes(Choices::kHeadDimVo) == kSlotBytes);
  static constexpr int kSlots = 8;
  static_assert(Base::kQBuffers * Base::kQBytes + kSlots * kSlotBytes <= Base::kBudget);
  // Nothing is prepared.
  static constexpr bool kTakesPrepared = false;
  static constexpr bool kTakesPreparedValues = false;
  static constexpr int kStageBytes = 0;
  static constexpr bool kStagesInSlot = false;
  static constexpr int kPreparedSlots = kSlots;
  static constexpr int kKvReaders = Base::kKvWarps;
  static constexpr int kSlotArrivals = 1;
  /// The slot of a step that does not exist, because the queue has ended.
  static constexpr int kNoSlot = -1;
};

}  // namespace flashplan::device
