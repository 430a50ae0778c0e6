// SPDX-License-Identifier: Apache-2.0
// How the warps of the sm80 family share tiles and shared memory.
#pragma once

#include "abi/architecture.h"
#include "kernels/device/offset_of.h"
#include "kernels/device/sm80/kv_loader.h"
#include "kernels/device/traits.h"

namespace flashplan::device {

/// `Choices` where decodes with 80 dims read two kv heads together. Memory is read in blocks of 64
/// bytes. A row of 160 bytes does not fill whole blocks, but the adjacent rows of two heads do,
/// with 320 bytes.
template <typename Choices>
struct With80Dims : Choices {
  static constexpr int kShortRowDims = 80;
};

/// `Choices` for a kernel that is compiled at run time for batches of few rows. It has only the
/// body for 16 rows, and so compiles in a third of the time. The planner cuts a request with more
/// rows into row tiles of 16.
template <typename Choices>
struct FewRowsAlone : Choices {
  static constexpr bool kFewRowsAlone = true;
  static constexpr int kShortRowDims = 0;
};

/// The sizes that follow from `Choices` on a GPU with kSmemPerSm KB of shared memory per SM.
template <typename Choices, int kSmemPerSm>
struct Tiling : Choices {
  static constexpr bool kIsNarrow = Element<Choices::kKv>::kBytes == 1;

  // An SM runs 8 warps. They are two CTAs, but one CTA where accumulators of 128 rows x 256 dims
  // take half of the registers, or where 100 KB do not hold the queries and keys of two CTAs.
  static constexpr bool kIsWide = Choices::kHeadDimVo > 128;
  static constexpr bool kIsSmall = kSmemPerSm < 164;
  static constexpr int kCtasPerSm = kIsWide || kIsSmall ? 1 : 2;
  static constexpr int kThreads = 256 / kCtasPerSm;
  // With more than 256 dims, the accumulators of 16 rows take two warps. Beside keys of so many
  // dims there is room for the queries of 64 rows only, and only on GPUs with 228 KB.
  static constexpr bool kIsWidest = Choices::kHeadDimVo > 256;
  static constexpr int kFewWarpsVo = kIsWidest ? 2 : 1;
  static constexpr int kMostRows = kIsWidest ? 64 : 128;
  static constexpr int kTileQ = Choices::kFewRowsAlone ? 16 : kMostRows;
  // Rows of a warp in tiles of many rows. With 32 rows it reads half as many fragments of k and v
  // for each row as with 16. On GPUs with 100 KB, which have half the matrix rate, these reads are
  // no bottleneck, so 16 rows are enough. The accumulators of 32 rows x 256 dims need two warps.
  static constexpr int kManyRows = kIsSmall || kIsWidest ? 16 : 32;
  static constexpr int kManyWarpsVo = kIsWide && !kIsSmall ? 2 : 1;
  // The system takes 1 KB of shared memory per CTA.
  static constexpr int kStaticSmemBytes = 512;  // the kernel's __shared__ variables, at most
  static constexpr int kSmemBudget = (kSmemPerSm / kCtasPerSm - 1) * 1024 - kStaticSmemBytes;

  // Bytes of shared memory that the row addresses and the page id of a key take.
  static constexpr int kTableBytesPerKey = KvRow::kPitch;
  static constexpr int kIdBytesPerKey = 4;
  /// Keys of a step: as many as leave room for two stages beside the queries. 64 keys in more
  /// stages are better than 128, except with up to 64 dims or 8-bit keys, where 64 keys are too
  /// little work between two barriers.
  static constexpr int tile_kv() {
    constexpr int kBytesPerKey =
        (Choices::kHeadDimQk + Choices::kHeadDimVo) * Element<Choices::kKv>::kBytes +
        kTableBytesPerKey + kIdBytesPerKey;
    constexpr int kQBytes = kMostRows * Choices::kHeadDimQk * Element<Choices::kQ>::kBytes;
    // Everything else in shared memory takes at most kOtherBytes.
    constexpr int kOtherBytes = 1024 + (kManyWarpsVo > 1 ? 16 * 1024 : 0);
    int keys = kIsNarrow || Choices::kHeadDimQk <= 64 ? 128 : 64;
    while (kOtherBytes + kQBytes + 2 * keys * kBytesPerKey > kSmemBudget) keys /= 2;
    return keys;
  }
  static constexpr int kTileKv = tile_kv();
  static constexpr int kKBytes = kTileKv * Choices::kHeadDimQk * Element<Choices::kKv>::kBytes;
  static constexpr int kVBytes = kTileKv * Choices::kHeadDimVo * Element<Choices::kKv>::kBytes;
};

/// How the warps of a CTA share a row tile of up to kRows rows. kWarpsQ warps take different rows,
/// kMmaM * 16 each. In row tiles of few rows, which are bound by memory, kWarpsKv warps take
/// different keys of each key tile. Each of these warps has its own softmax until the end, so that
/// they need not wait for each other. kWarpsVo warps share rows: they take different keys for
/// logits and different dims of v.
template <typename T, int kWarpsQ_, int kMmaM_, int kWarpsVo_ = 1>
struct Shape {
  static constexpr int kMmaM = kMmaM_;
  static constexpr int kWarpsQ = kWarpsQ_;
  static constexpr int kWarpsVo = kWarpsVo_;
  static constexpr int kWarps = T::kThreads / 32;
  static constexpr int kMostWarpsKv = T::kTileKv / 16;
  static constexpr int kOtherWarps = kWarps / (kWarpsQ * kWarpsVo);
  // Where two warps share rows, the warps that are left only copy.
  static constexpr int kWarpsKv = kWarpsVo > 1                 ? 1
                                  : kOtherWarps < kMostWarpsKv ? kOtherWarps
                                                               : kMostWarpsKv;
  static constexpr int kRows = kWarpsQ * kMmaM * 16;
  static constexpr int kDimsVo = T::kHeadDimVo / kWarpsVo;  // dims of a warp's accumulators
  static constexpr int kKeysPerWarp = T::kTileKv / kWarpsKv;
  // Keys whose logits are in registers at a time; queries are read once for all of them. 8-bit keys
  // take more registers while they are widened, so a warp takes fewer of them at a time, unless two
  // warps share rows or values have fewer than 128 dims.
  static constexpr bool kLeavesRegisters = !T::kIsNarrow || kWarpsVo > 1 || T::kHeadDimVo < 128;
  static constexpr int kMostAtOnce = kLeavesRegisters ? 64 : 32;
  static constexpr int kKeysAtOnce = kKeysPerWarp < kMostAtOnce ? kKeysPerWarp : kMostAtOnce;
  // A warp computes the logits of this many of the kKeysAtOnce keys.
  static constexpr int kLogitKeys = kKeysAtOnce / kWarpsVo;
  static_assert(kLogitKeys % 16 == 0);
  // Keys whose weights are computed at a time. They are fewer where accumulators and logits take
  // most of the registers.
  static constexpr int kMostWeights = kMmaM * (kDimsVo + kLogitKeys) >= 320 ? 32 : 64;
  static constexpr int kWeightsAtOnce = kKeysAtOnce < kMostWeights ? kKeysAtOnce : kMostWeights;

  // For few rows every stage has room for queries, which are then kept in registers. For many rows
  // there is one buffer, to which each warp copies its rows of the next head once it has read its
  // rows of the last head.
  static constexpr bool kQueryInStage = kRows <= 64 && !T::kIsWidest;
  static constexpr bool kQueryInRegisters = kQueryInStage || T::kHeadDimQk <= 64;
  // The dtype that queries have in shared memory when their fragments are loaded. 8-bit queries
  // that are kept in registers are widened there; other 8-bit queries are widened in shared memory.
  static constexpr DType kSharedQ = kQueryInRegisters ? T::kQuery : T::kQ;
  static constexpr int kQueryBytes = Element<kSharedQ>::kBytes;
  static constexpr int kQBytes = kRows * T::kHeadDimQk * kQueryBytes;
  static constexpr int kStageBytes = T::kKBytes + T::kVBytes + (kQueryInStage ? kQBytes : 0);
  static constexpr int kStatsBytes = kWarps * 8 * 8;
  // Memory for what a warp sends to the warps that share its rows: 16-bit weights, or maxima and
  // sums of rows.
  static constexpr int kPeerBytes = kWarpsVo == 1 ? 0 : kMmaM * 16 * kLogitKeys * 2;
  static constexpr int kFixedBytes =
      128 + kStatsBytes + kWarps * kPeerBytes + (kQueryInStage ? 0 : kQBytes);

  // A ring of kEntries entries. An entry has the row addresses and page ids of one tile's keys.
  static constexpr int kTableBytes = T::kTileKv * T::kTableBytesPerKey;
  static constexpr int kIdBytes = T::kTileKv * T::kIdBytesPerKey;
  /// The entries of the ring: a multiple of `stages`. If addresses are computed for several tiles
  /// at once, it is also a multiple of twice `tiles_at_once`, because the addresses of the
  /// `tiles_at_once` tiles before them are still in use.
  static constexpr int entries(int stages, int tiles_at_once) {
    const int least = tiles_at_once == 1 ? 1 : 2 * tiles_at_once;
    int count = stages;
    while (count % least != 0) count += stages;
    return count;
  }
  /// The bytes of the ring's entries, rounded up to the alignment that SharedTile needs.
  static constexpr int ring_bytes(int num_entries) {
    return (num_entries * (kTableBytes + kIdBytes) + 127) / 128 * 128;
  }
  static constexpr int smem_bytes(int stages, int tiles_at_once) {
    return kFixedBytes + ring_bytes(entries(stages, tiles_at_once)) + stages * kStageBytes;
  }
  static constexpr int most_stages() {
    int stages = 6;
    while (stages > 2 && smem_bytes(stages, 1) > T::kSmemBudget) --stages;
    return stages;
  }
  static constexpr int kStages = most_stages();
  // Where queries are read from shared memory in every step, enough registers are left to compute
  // the addresses of 256 keys at once, with one wait instead of several. This is done if there is
  // room for it without giving up a stage.
  static constexpr int most_tiles_at_once() {
    int tiles = kQueryInRegisters ? 1 : 256 / T::kTileKv;
    while (tiles > 1 && smem_bytes(kStages, tiles) > T::kSmemBudget) tiles /= 2;
    return tiles;
  }
  static constexpr int kTilesAtOnce = most_tiles_at_once();
  static constexpr int kEntries = entries(kStages, kTilesAtOnce);

  /// What dynamic shared memory begins with.
  struct alignas(128) Header {
    VisibleKeys visible[kWarps];                  // for each warp, the keys that its rows see
    alignas(128) float2 stats[kWarps][8];         // (shift, sum) of 8 rows of each warp
    unsigned char tables[kEntries][kTableBytes];  // a KvRow for each key of a tile
    int32_t ids[kEntries][T::kTileKv];            // the page id of each key of a tile
  };
  // Offsets in dynamic shared memory. After the header come the memory of RowPeers and the buffer
  // for queries, which some shapes do not have, and then the stages.
  static constexpr int kPeers = sizeof(Header);
  static constexpr int kQuery = kPeers + kWarps * kPeerBytes;
  static constexpr int kFirstStage = kQuery + (kQueryInStage ? 0 : kQBytes);
  static constexpr int kSmemBytes = kFirstStage + kStages * kStageBytes;
  static_assert(kSmemBytes == smem_bytes(kStages, kTilesAtOnce) && kSmemBytes <= T::kSmemBudget);
  static_assert(kQuery % 128 == 0 && kStageBytes % 128 == 0);
  /// The dims that Epilogue writes at a time, for 8 rows of each warp: as many as a stage holds.
  static constexpr int most_output_dims() {
    int dims = kDimsVo;
    while (kWarpsQ * kWarpsVo * kWarpsKv * 8 * dims * 4 > kStageBytes) dims /= 2;
    return dims;
  }
  static constexpr int kOutputDims = most_output_dims();
  static_assert(kOutputDims % 32 == 0);
  /// What a stage begins with.
  struct Stage {
    unsigned char keys[T::kKBytes];
    unsigned char values[T::kVBytes];
  };
  static constexpr int kValue = FLASHPLAN_OFFSET_OF(Stage, values);
  static constexpr int kStageQuery = sizeof(Stage);  // where queries begin, if kQueryInStage
};

/// The shapes of a kernel, by the rows of a work tile.
template <typename T, bool kFewRowsAlone = T::kFewRowsAlone>
struct Shapes {
  using Few = Shape<T, 1, 1, T::kFewWarpsVo>;   // up to 16 rows: decode
  using Some = Shape<T, 4, 1, T::kFewWarpsVo>;  // up to 64 rows
  using Many =
      Shape<T, T::kTileQ / T::kManyRows, T::kManyRows / 16, T::kManyWarpsVo>;  // more: prompts

  static constexpr int kLarger =
      Few::kSmemBytes > Some::kSmemBytes ? Few::kSmemBytes : Some::kSmemBytes;
  static constexpr int kSmemBytes = kLarger > Many::kSmemBytes ? kLarger : Many::kSmemBytes;
  static_assert(Many::kRows == T::kTileQ);
  // Kernels that are compiled at run time have no body for Some, which saves a third of the
  // compile time.
  static constexpr bool kHasSome = T::Variant::kIsBuiltIn && Some::kRows < Many::kRows;
  // The most rows of a tile that does not need Many.
  static constexpr int kSomeRows = kHasSome ? Some::kRows : Few::kRows;
};

template <typename T>
struct Shapes<T, true> {
  using Few = Shape<T, 1, 1, T::kFewWarpsVo>;
  static constexpr int kSmemBytes = Few::kSmemBytes;
  static_assert(Few::kRows == T::kTileQ);
};

/// The head dim for which FewRows is compiled; 0: it is not compiled.
template <typename T>
constexpr int short_row_dims() {
  return T::kCtasPerSm == 2 && T::Variant::kIsBuiltIn ? T::kShortRowDims : 0;
}

/// The sizes that FewRows is compiled with to take `kHeads` kv heads at once.
template <typename T, int kHeads>
struct FewRowsShape {
  static constexpr int kBytes = Element<T::kKv>::kBytes;
  static constexpr int kDims = short_row_dims<T>() > 0 ? short_row_dims<T>() : 64;
  using Tile = SharedTile<kDims * kBytes>;
  static constexpr int kWarps = T::kThreads / 32;
  static constexpr int kKeys =
      kHeads == 1 && kDims * kBytes <= 128 ? 32 : 16;  // keys that a warp takes in a step
  static constexpr int kStepKeys = kWarps * kKeys;
  static constexpr int kTileBytes = kKeys * Tile::kRowBytes;  // keys or values of one head
  static constexpr int kStageBytes = 2 * kHeads * kTileBytes;
  static constexpr int kIdsBytes = 32 * 4;  // each lane's page id of a step
  /// What a warp stores for the others at the end of a head.
  struct State {
    int stage;                      // byte offset in shared memory of the stage with the warp's o
    alignas(16) float2 softmax[8];  // {shift, sum} of each row
  };
  static constexpr int kOutputPitch = (kDims + 31) / 32 * 32;  // floats from row to row of o
  static_assert(8 * kOutputPitch * 4 <= kStageBytes);
  static constexpr int kStages =
      (T::kSmemBudget / kWarps - static_cast<int>(sizeof(State))) / (kStageBytes + kIdsBytes);

  /// The first dimension of each array is the warp that uses the memory.
  struct Memory {
    alignas(128) unsigned char stages[kWarps][kStages][kStageBytes];
    int32_t ids[kWarps][kStages][32];
    State states[kWarps];
  };
  static_assert(kStageBytes % 128 == 0);  // the alignment that SharedTile needs
  static constexpr int kSmemBytes = sizeof(Memory);

  static constexpr bool kIsSupported = short_row_dims<T>() > 0 && kStages >= 2;
};

/// The head dim of the decodes that FewRows takes; 0: FewRows is not compiled, or there is no room
/// for the keys of two heads.
template <typename T>
constexpr int kPairedDims = FewRowsShape<T, 2>::kIsSupported ? short_row_dims<T>() : 0;

}  // namespace flashplan::device
