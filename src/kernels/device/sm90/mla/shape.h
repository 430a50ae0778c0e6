// SPDX-License-Identifier: Apache-2.0
// Sizes of the sm90_mla family.
#pragma once

#include "kernels/device/sm90/softmax.h"

namespace flashplan::device {

/// `Choices`: the compile-time choices (Traits). Keys have kHeadDimQk dims. Their first kHeadDimVo
/// dims are the values, in a left and a right half of 256 dims. The other dims are the tail.
///
/// `kPairs_`: whether two CTAs, which are a cluster, compute the work tiles of a queue together.
/// Tiles then have twice the rows, and each CTA has half of them. Each widens half of the keys of
/// every block, and copies them to the other one.
template <typename Choices, bool kPairs_ = false>
struct MlaShape : Choices {
  // Whether keys have 8 bits in memory. Then all producer warps widen them to the dtype of q.
  static constexpr bool kWidens = Choices::kKv != Choices::kQ;
  static constexpr bool kPairs = kPairs_;
  static_assert(kWidens || !kPairs);
  static constexpr int kCtas = kPairs ? 2 : 1;  // CTAs that run a queue
  // Whether values are a tensor of their own (WideShape), and not the first dims of keys.
  static constexpr bool kHasValues = false;
  template <typename S>
  using Softmax = Sm90Softmax<S>;
  static constexpr int kWarpgroups = 2;  // consumers, each with one half of the output's columns
  static constexpr int kTileQ = 64;      // rows of a CTA
  static constexpr int kRowsOfTile = kCtas * kTileQ;  // rows of a work tile
  static constexpr int kTileKv = 64;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerThreads = 128 * kWarpgroups;
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  // A thread of a consumer has 128 accumulators of o, 32 logits, and 16 registers of packed
  // weights. The producer gets the registers that are left.
  static constexpr int kConsumerRegisters = kWidens ? 216 : 224;
  static constexpr int kProducerRegisters = kWidens ? 72 : 56;
  static_assert(kWarpgroups * kConsumerRegisters + kProducerRegisters <=
                kThreads / 128 * (65536 / kThreads / 8 * 8));

  static constexpr int kHalfDims = Choices::kHeadDimVo / 2;
  static constexpr int kTailDims = Choices::kHeadDimQk - Choices::kHeadDimVo;
  static_assert(kHalfDims == 256 && (kTailDims == 0 || kTailDims == 64));
  static constexpr int kTailBlocks = kTailDims / 64;

  using Query = WgmmaTile<Choices::kHeadDimQk, kTileQ>;
  using Half = WgmmaTile<kHalfDims, 8>;
  using Tail = WgmmaTile<64, 8>;
  using Weights = WgmmaTile<kTileKv, kTileQ>;
  static constexpr int kQBytes = Query::bytes(kTileQ);
  static constexpr int kHalfBytes = Half::bytes(kTileKv);
  static constexpr int kTailBytes = kTileKv * kTailDims * 2;
  static constexpr int kSlotBytes = 2 * kHalfBytes + kTailBytes;
  static constexpr int kWeightsBytes = Weights::bytes(kTileQ);
  static constexpr int kSlots = 2;
  static constexpr int kContexts = 8;
  static constexpr int kHeaderBytes = 3072;
  static_assert(kHeaderBytes + kQBytes + kSlots * kSlotBytes + kWeightsBytes <= 227 * 1024);

  // Warps of the producer. kRecordWarp brings records and queries. Keys are brought by one warp in
  // boxes, or by three row by row. Keys of 8 bits are widened by all four; kRecordWarp then brings
  // records and queries between blocks.
  static constexpr int kRecordWarp = 1;
  static constexpr int kGatherWarps = 3;
  static constexpr int kWideningWarps = 4;

  // Named barriers: kWeightsBarrier and the next one say that the weights of an even or an odd
  // block are ready. At kConsumerBarrier all consumers meet; at kOwnBarrier and the next one, the
  // threads of each consumer warpgroup.
  static constexpr int kWeightsBarrier = 1;
  static constexpr int kConsumerBarrier = 3;
  static constexpr int kOwnBarrier = 4;

  /// The row, among this CTA's rows of the work tile, of a consumer thread's accumulators: each
  /// thread has two rows (`half` 0 and 1). `first` is 0, as both warpgroups have all of these rows.
  static FLASHPLAN_DEVICE int row(int first, int thread, int half) {
    return first + thread / 32 * 16 + half * 8 + thread % 32 / 4;
  }
};

}  // namespace flashplan::device
