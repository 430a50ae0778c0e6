// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the sm90 family: attention of 64 rows of each work tile.
#pragma once

#include "kernels/device/sm90_epilogue.h"
#include "kernels/device/sm90_softmax.h"

namespace flashplan::device {

/// Two warpgroups take turns to issue products, so that one has its softmax while the products of
/// the other run. Inside a warpgroup, products with values of a step run beside the softmax of the
/// next one; the last ones of a work tile beside the first step of the next tile.
template <typename S>
class Sm90Consumer {
 public:
  FLASHPLAN_DEVICE Sm90Consumer(const AttentionParams& p, unsigned char* smem, int warpgroup)
      : p_(p),
        smem_(smem),
        base_(shared_address(smem)),
        variant_(p),
        warpgroup_(warpgroup),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  FLASHPLAN_DEVICE void run() {
    if (warpgroup_ + 1 == S::kWarpgroups) barrier_arrive(S::kTurnBarrier, 2 * 128);
    Unit last = kNoUnit;
    Unit unit = {0, 0};
    bool begins_tile = true;
    for (;;) {
      if (begins_tile) wait_tile(unit);
      const Sm90Context& context = context_of(unit);
      const bool has_keys = !context.is_end && context.tile.kv_begin < context.tile.kv_end;
      attend(unit, last, has_keys);
      if (has_keys) {
        last = unit;
        ++q_index_;
        begins_tile = is_last_head(unit);
        begins_tile ? ++unit.tile : ++unit.head;
      } else {
        if (context.is_end) return;
        epilogue().write_empty(context);
        release(S::kContextEmpty, unit.tile % S::kContexts);
        last = kNoUnit;
        ++unit.tile;
      }
    }
  }

 private:
  static constexpr int kKeyTiles = S::kTileKv / 8;
  static constexpr int kDimTiles = S::kHeadDimVo / 8;
  using Visible = typename Sm90Softmax<S>::Visible;
  using ByDims = Wgmma<S::kQ, S::kTileKv>;
  using ByRows = Wgmma<S::kQ, S::kHeadDimVo>;

  /// A work tile, by its number in the queue, and one of its heads.
  struct Unit {
    int32_t tile;
    int32_t head;
  };
  static constexpr Unit kNoUnit = {-1, 0};

  FLASHPLAN_DEVICE const Sm90Context& context_of(const Unit& unit) const {
    return reinterpret_cast<const Sm90Context*>(smem_ + S::kContext)[unit.tile % S::kContexts];
  }
  FLASHPLAN_DEVICE bool is_last_head(const Unit& unit) const {
    const WorkTile& tile = context_of(unit).tile;
    return unit.head + 1 == tile.kv_head + tile.num_kv_heads;
  }

  /// Waits for the record of a tile, and begins its first head.
  FLASHPLAN_DEVICE void wait_tile(Unit& unit) const {
    const int slot = unit.tile % S::kContexts;
    mbarrier_wait(barrier(S::kContextFull, slot), unit.tile / S::kContexts & 1);
    unit.head = context_of(unit).tile.kv_head;
  }

  FLASHPLAN_DEVICE uint32_t barrier(int first, int index) const {
    return base_ + first + index * 8;
  }
  FLASHPLAN_DEVICE void release(int first, int index) const {
    __syncwarp();
    if (thread_ % 32 == 0) mbarrier_arrive(barrier(first, index));
  }
  FLASHPLAN_DEVICE uint32_t q_address(int32_t index) const {
    return base_ + S::kQuery + index % S::kQBuffers * S::kQBytes + warpgroup_ * 64 * 128;
  }
  FLASHPLAN_DEVICE uint32_t slot_address(int slot) const {
    return base_ + S::kFirstSlot + slot * S::kSlotBytes;
  }
  FLASHPLAN_DEVICE Sm90Epilogue<S> epilogue() const { return {p_, base_, warpgroup_, thread_}; }

  FLASHPLAN_DEVICE void wait_turn() const { barrier_wait(S::kTurnBarrier + warpgroup_, 2 * 128); }
  FLASHPLAN_DEVICE void end_turn() const {
    barrier_arrive(S::kTurnBarrier + (warpgroup_ + 1 < S::kWarpgroups ? warpgroup_ + 1 : 0),
                   2 * 128);
  }

  /// The next slot of the ring, once it is full.
  FLASHPLAN_DEVICE int next_slot() {
    const int slot = slot_;
    mbarrier_wait(barrier(S::kSlotFull, slot), slot_parity_);
    if (++slot_ == S::kSlots) {
      slot_ = 0;
      slot_parity_ ^= 1;
    }
    return slot;
  }

  FLASHPLAN_DEVICE void multiply_keys(int slot) {
    wgmma_fence();
    const WgmmaOperand q = S::Query::by_dims(q_address(q_index_));
    const WgmmaOperand k = S::Key::by_dims(slot_address(slot));
#pragma unroll
    for (int i = 0; i < S::kHeadDimQk / 16; ++i) {
      if (i == 0) {
        ByDims::first_by_dims(softmax_.logits, q, k);
      } else {
        ByDims::by_dims(softmax_.logits, q + S::Query::step_of_dims(i), k + S::Key::step_of_dims(i),
                        true);
      }
    }
    wgmma_commit();
  }
  FLASHPLAN_DEVICE void multiply_values(int slot) {
    wgmma_fence();
    const WgmmaOperand v = S::Value::by_rows(slot_address(slot));
#pragma unroll
    for (int i = 0; i < S::kTileKv / 16; ++i) {
      ByRows::by_rows(o_, weights_[i], v + S::Value::step_of_rows(i), adds_ || i > 0);
    }
    wgmma_commit();
  }

  /// Finishes the unit before, and multiplies all keys of this one, but the last values. Without
  /// keys, as at the end of the queue, the unit before is finished alone: the record of its tile
  /// may be what the next record waits for.
  FLASHPLAN_DEVICE void attend(const Unit& unit, const Unit& last, bool has_keys) {
    int k_slot = 0;
    if (has_keys) {
      k_slot = next_slot();
      if (S::kQBuffers > 1) wait_queries();
    }
    const bool has_last = last.tile >= 0;
    if constexpr (S::kQBuffers > 1) {
      if (has_last) {
        const int v_slot = next_slot();
        wait_turn();
        multiply_values(v_slot);
        // Without keys of whatever lies there: products under way in one branch alone would make
        // the compiler wait for each.
        multiply_keys(k_slot);
        end_turn();
        wgmma_wait<1>();
        pin(o_);
        release(S::kSlotEmpty, v_slot);
        write_output(last);
      } else {
        wait_turn();
        multiply_keys(k_slot);
        end_turn();
      }
    } else {
      if (has_last) {
        const int v_slot = next_slot();
        wait_turn();
        multiply_values(v_slot);
        end_turn();
        wgmma_wait<0>();
        pin(o_);
        release(S::kSlotEmpty, v_slot);
        write_output(last);
      }
      if (has_keys) wait_queries();
      wait_turn();
      multiply_keys(k_slot);
      end_turn();
    }
    const Sm90Context& context = context_of(unit);
    const Visible visible(p_, context.block(p_), warpgroup_, thread_);
    int32_t key = context.tile.kv_begin;
    const int32_t end = context.tile.kv_end;
    wgmma_wait<0>();
    pin(softmax_.logits);
    if (!has_keys) {
      if (S::kQBuffers > 1 && has_last) release_queries();
      return;
    }
    softmax_.reset();
    adds_ = false;
    float shrink[2];
    weigh_step(context, visible, key, k_slot, true, shrink);
    release(S::kSlotEmpty, k_slot);
    pack();
    if (S::kQBuffers > 1 && has_last) release_queries();
    for (key += S::kTileKv; key < end; key += S::kTileKv) {
      k_slot = next_slot();
      wait_turn();
      multiply_keys(k_slot);
      const int v_slot = next_slot();
      multiply_values(v_slot);
      end_turn();
      adds_ = true;
      wgmma_wait<1>();
      pin(softmax_.logits);
      const bool raised = weigh_step(context, visible, key, k_slot, false, shrink);
      release(S::kSlotEmpty, k_slot);
      wgmma_wait<0>();
      pin(o_);
      release(S::kSlotEmpty, v_slot);
      pack();
      if (raised) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) o_[4 * n + j] *= shrink[j / 2];
        }
      }
    }
    if (S::kQBuffers == 1) release_queries();
  }

  FLASHPLAN_DEVICE void wait_queries() const {
    mbarrier_wait(barrier(S::kQFull, q_index_ % S::kQBuffers), q_index_ / S::kQBuffers & 1);
  }
  /// Lets the queries of the unit before go, once the output that passed through them is read.
  FLASHPLAN_DEVICE void release_queries() const {
    if (S::kQBuffers > 1 && thread_ == 0) tma_store_wait_read();
    release(S::kQEmpty, (q_index_ - (S::kQBuffers - 1)) % S::kQBuffers);
  }

  FLASHPLAN_DEVICE bool weigh_step(const Sm90Context& context, const Visible& visible, int32_t key,
                                   int k_slot, bool is_first, float (&shrink)[2]) {
    return softmax_.weigh_step(p_, variant_, context, visible, warpgroup_, thread_, key, is_first,
                               shrink, [&] { multiply_keys_again(k_slot); });
  }

  /// The logits of this warp's rows once more.
  FLASHPLAN_DEVICE void multiply_keys_again(int slot) {
    const int lane = opaque(thread_) % 32;
    const uint32_t q = q_address(q_index_) + (opaque(thread_) / 32 * 16 + lane % 16) * 128;
    const uint32_t k = slot_address(slot) + lane / 16 * S::Key::kGroupBytes + lane % 8 * 128;
#pragma unroll
    for (float& x : softmax_.logits) x = 0.0F;
#pragma unroll 1
    for (int step = 0; step < S::kHeadDimQk / 16; ++step) {
      uint32_t a[4];
      const int chunk = step % 4 * 2;
      ldmatrix(a, q + step / 4 * S::Query::kBlockBytes + (((chunk + lane / 16) ^ lane) % 8 << 4));
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t b[4];
        ldmatrix(b, k + n * S::Key::kGroupBytes + step / 4 * S::Key::kBlockBytes +
                        (((chunk + lane / 8 % 2) ^ lane) % 8 << 4));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float (&d)[4] = reinterpret_cast<float (&)[4]>(softmax_.logits[4 * (n + i)]);
          Element<S::kQ>::mma(d, a, b[2 * i], b[2 * i + 1]);
        }
      }
    }
  }

  /// Makes the weights operands.
  FLASHPLAN_DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < S::kTileKv / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weights_[i][j] = Element<S::kQ>::pack(softmax_.logits[8 * i + 2 * j],
                                              softmax_.logits[8 * i + 2 * j + 1]);
      }
    }
  }

  /// Writes the output of a unit, and lets the record of its tile go after the last head.
  FLASHPLAN_DEVICE void write_output(const Unit& unit) {
    epilogue().write(context_of(unit), unit.head, q_address(q_index_ - 1), o_, softmax_.sum,
                     softmax_.shift);
    if (is_last_head(unit)) release(S::kContextEmpty, unit.tile % S::kContexts);
  }

  const AttentionParams& p_;
  unsigned char* const smem_;
  const uint32_t base_;
  const typename S::Variant variant_;
  const int warpgroup_;
  const int thread_;
  Sm90Softmax<S> softmax_;
  float o_[S::kHeadDimVo / 2] = {};
  uint32_t weights_[S::kTileKv / 16][4] = {};
  bool adds_ = false;
  int slot_ = 0;
  uint32_t slot_parity_ = 0;
  int32_t q_index_ = 0;  // heads begun
};

}  // namespace flashplan::device
