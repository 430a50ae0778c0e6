// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the sm90_fp8 family: attention of 64 rows of a work tile, by products of
// 8-bit numbers.
#pragma once

#include "kernels/device/sm90/epilogue.h"
#include "kernels/device/sm90/fp8/products.h"
#include "kernels/device/sm90/fp8/shape.h"
#include "kernels/device/sm90/fp8/softmax.h"
#include "kernels/device/sm90/slot_ring.h"

namespace flashplan::device {

/// It takes units, slots and queries as Sm90Consumer does, and warpgroups take turns in the same
/// way. The weights of a step are multiplied with its values in accumulators of their own, and the
/// sums are then added to o in float32: accumulators of 8-bit products keep too few bits for long
/// sums. A thread has no registers for all of these sums beside the logits of the next step. So the
/// sums of the first dims are added while those of the other dims are computed, and these while the
/// logits are: the tensor cores do not wait.
template <typename S>
class Sm90Fp8Consumer {
 public:
  FLASHPLAN_DEVICE Sm90Fp8Consumer(const AttentionParams& p, const Sm90Smem<S>& smem, int warpgroup)
      : p_(p),
        smem_(smem),
        warpgroup_(warpgroup),
        thread_(static_cast<int>(threadIdx.x) % 128),
        ring_(p, smem) {}

  FLASHPLAN_DEVICE void run() {
    if (warpgroup_ + 1 == S::kWarpgroups) barrier_arrive_if(true, S::kTurnBarrier, 2 * 128);
    Unit last = kNoUnit;
    Unit unit = {};
    for (;;) {
      if (begins_tile_) wait_tile(unit);
      const Sm90Context& context = context_of(unit);
      const bool has_keys = context.has_steps();
      if (context.is_end && last.tile < 0) break;  // before code that no cache has yet
      if (has_keys || last.tile >= 0) attend(unit, last, has_keys);
      if (has_keys) {
        last = unit;
        last_q_ = q_;
        last_shared_ = shared_;
        q_ += num_query_parts(shared_);
        begins_tile_ = is_last_head(unit);
        begins_tile_ ? ++unit.tile : ++unit.head;
      } else {
        if (context.is_end) break;
        if (warpgroup_ == 0 || is_shared(unit)) epilogue(warpgroup_ * 64).write_empty(context);
        release(smem_.context_empty(context_slot(unit)));
        last = kNoUnit;
        ++unit.tile;
      }
    }
    Sm90Merge<S>::merge_waiting(p_, smem_, warpgroup_, thread_);
  }

 private:
  using Variant = typename S::Variant;
  using Softmax = Sm90Fp8Softmax<S>;
  using Visible = typename Softmax::Visible;
  using Scales = typename Sm90Epilogue<S>::Scales;
  static_assert(S::kTileKv == 128 && S::kHeadDimVo == 128);  // the columns of products

  /// One head of a work tile, which is given by its number in the queue.
  struct Unit {
    int32_t tile;
    int32_t head;
  };
  static constexpr Unit kNoUnit = {-1, 0};

  /// Records of tiles are in a ring of kContexts places in shared memory. This is the place of the
  /// record of a unit's tile.
  static FLASHPLAN_DEVICE uint32_t context_slot(const Unit& unit) {
    return static_cast<uint32_t>(unit.tile) % S::kContexts;
  }
  FLASHPLAN_DEVICE const Sm90Context& context_of(const Unit& unit) const {
    return smem_.memory.contexts[context_slot(unit)];
  }
  FLASHPLAN_DEVICE bool is_last_head(const Unit& unit) const {
    const WorkTile& tile = context_of(unit).tile;
    return unit.head + 1 == tile.kv_head + tile.num_kv_heads;
  }

  /// Waits for the record of a tile, and sets `unit` to its first head.
  FLASHPLAN_DEVICE void wait_tile(Unit& unit) const {
    mbarrier_wait(smem_.context_full(context_slot(unit)),
                  static_cast<uint32_t>(unit.tile) / S::kContexts & 1);
    unit.head = context_of(unit).tile.kv_head;
  }
  /// Whether all warpgroups have rows of a unit. The warp votes, so that the compiler knows that
  /// its threads agree.
  FLASHPLAN_DEVICE bool is_shared(const Unit& unit) const {
    return __any_sync(0xffffffffU, unit.tile >= 0 && context_of(unit).num_rows > 64) != 0;
  }
  /// Whether this warpgroup computes rows of the unit whose queries are at `place`.
  FLASHPLAN_DEVICE bool is_own(bool is_shared, uint32_t place) const {
    return is_shared || static_cast<int>(place % S::kWarpgroups) == warpgroup_;
  }
  /// The first row of this warpgroup in the tile.
  FLASHPLAN_DEVICE int first_row(bool is_shared) const { return is_shared ? warpgroup_ * 64 : 0; }

  /// The number of parts of a query buffer that a unit's queries take: all of them if the unit is
  /// shared, otherwise one. Sm90Smem::queries() says where they are.
  static FLASHPLAN_DEVICE uint32_t num_query_parts(bool is_shared) {
    return is_shared ? S::kQParts : 1;
  }

  FLASHPLAN_DEVICE void release(uint32_t barrier) const {
    __syncwarp();
    if (thread_ % 32 == 0) mbarrier_arrive(barrier);
  }
  FLASHPLAN_DEVICE uint32_t q_address(uint32_t place, bool is_shared) const {
    return smem_.queries(place) + first_row(is_shared) * 128;
  }
  FLASHPLAN_DEVICE Sm90Epilogue<S> epilogue(int first_row) const {
    return {p_, smem_, warpgroup_, first_row, thread_};
  }

  /// Waits for this warpgroup's turn, where all warpgroups multiply.
  FLASHPLAN_DEVICE void wait_turn(bool in_turns) const {
    barrier_wait_if(in_turns, S::kTurnBarrier + warpgroup_, 2 * 128);
  }
  FLASHPLAN_DEVICE void end_turn(bool in_turns) const {
    constexpr int kLast = S::kWarpgroups - 1;
    const int next = warpgroup_ == kLast ? 0 : warpgroup_ + 1;
    barrier_arrive_if(in_turns, S::kTurnBarrier + next, 2 * 128);
  }

  /// Skips the keys or values of another warpgroup's tile. It waits for them, because a warp that
  /// falls two phases behind could not tell them apart by parity. And every warpgroup frees every
  /// slot, so that slots are freed in their order: each of the two warps that fill them sees only
  /// every other round of a slot, and would take one round for another.
  FLASHPLAN_DEVICE void pass_slot() { release(smem_.slot_empty(ring_.next())); }

  /// Computes the logits of a step.
  FLASHPLAN_DEVICE void multiply_keys(int slot, bool is_shared) {
    wgmma_fence();
    const WgmmaOperand q = S::Query::by_dims(q_address(q_, is_shared));
    const WgmmaOperand k = S::Key::by_dims(ring_.address(slot));
#pragma unroll
    for (int i = 0; i < S::kHeadDimQk / 32; ++i) {
      if (i == 0) {
        WgmmaE4m3::first(softmax_.logits, q, k);
      } else {
        WgmmaE4m3::add(softmax_.logits, q + S::Query::step_of_dims(i), k + S::Key::step_of_dims(i));
      }
    }
    wgmma_commit();
  }
  /// The weights of a step times its values, for the dims before kFirstDims and for the others.
  struct ValueSums {
    float first[S::kFirstDims / 2];
    float others[(S::kHeadDimVo - S::kFirstDims) / 2];
  };
  /// Starts these products. Adds those of the first dims to o, while those of the others run.
  FLASHPLAN_DEVICE void begin_values(ValueSums& sums, int slot) {
    const uint32_t values = ring_.address(slot);
    wgmma_fence();
    multiply_values(sums.first, values);
    multiply_values(sums.others, values + S::TransposedValue::bytes(S::kFirstDims));
    wgmma_wait<1>();
    add_to_o<0>(sums.first);
  }
  /// Adds those of the other dims, once at most kPending later batches of products are in flight.
  template <int kPending>
  FLASHPLAN_DEVICE void finish_values(ValueSums& sums) {
    wgmma_wait<kPending>();
    add_to_o<S::kFirstDims / 2>(sums.others);
  }
  template <int kCount>
  FLASHPLAN_DEVICE void multiply_values(float (&sums)[kCount], uint32_t values) const {
    const WgmmaOperand v = S::TransposedValue::by_dims(values);
#pragma unroll
    for (int i = 0; i < S::kTileKv / 32; ++i) {
      if (i == 0) {
        WgmmaE4m3::first(sums, weights_[i], v);
      } else {
        WgmmaE4m3::add(sums, weights_[i], v + S::TransposedValue::step_of_dims(i));
      }
    }
    wgmma_commit();
  }
  template <int kFirst, int kCount>
  FLASHPLAN_DEVICE void add_to_o(float (&sums)[kCount]) {
    pin(sums);
#pragma unroll
    for (int i = 0; i < kCount; ++i) o_[kFirst + i] += sums[i];
  }

  /// Adds the last values of unit `last` and writes its output; then computes `unit`, all but the
  /// products of its last values. Where `unit` has no keys, as at the end of the queue, only `last`
  /// is finished, because the next record may be waiting for the memory of its record. As in
  /// Sm90Consumer, both products are always computed, also where nobody reads them.
  FLASHPLAN_DEVICE void attend(const Unit& unit, const Unit& last, bool has_keys) {
    static_assert(S::kQBuffers > 1);
    const bool has_last = last.tile >= 0;
    const bool shared = has_keys && is_shared(unit);
    const bool last_shared = has_last && last_shared_;
    const bool in_turns = shared || last_shared;
    shared_ = shared;
    if (shared) skip_query_parts();
    // In the ring, the slot with the first keys of `unit` comes before that with the last values of
    // `last`.
    const MbarrierPhase k_full = ring_.next_full();
    int k_slot = ring_.take(has_keys);
    const MbarrierPhase v_full = ring_.next_full();
    const int v_slot = ring_.take(has_last);
    if (has_last) ring_.wait(v_full);
    const Sm90Context& context = context_of(unit);
    wait_turn(in_turns);
    ValueSums sums;
    begin_values(sums, v_slot);
    if (has_keys) ring_.wait(k_full, query_part_full());
    multiply_keys(k_slot, shared);
    end_turn(in_turns);
    finish_values<1>(sums);
    if (has_last) {
      release(smem_.slot_empty(v_slot));
      const Scales scales = epilogue(first_row(last_shared))
                                .scales(context_of(last), last.head, softmax_.sum, softmax_.shift);
      write_output(last, last_shared, scales, context.is_end != 0);
    }
    clear(o_);
    softmax_.reset();
    wgmma_wait<0>();
    pin(softmax_.logits);
    // Before the softmax: the producer waits for this memory to load the queries of another tile.
    if (has_last) release_queries(last_q_, num_query_parts(last_shared));
    if (!has_keys) return;
    int32_t key = context.tile.kv_begin;
    const int32_t end = context.tile.kv_end;
    if (!is_own(shared, q_)) {
      release(smem_.slot_empty(k_slot));
      for (key += S::kTileKv; key < end; key += S::kTileKv) {
        pass_slot();
        pass_slot();
      }
      return;
    }
    const Variant variant = variant_of(unit);
    Visible visible(p_, context, first_row(shared), thread_);
    weigh_step(variant, unit, shared, visible, key, k_slot, true);
    for (key += S::kTileKv; key < end; key += S::kTileKv) {
      k_slot = ring_.next();
      const int v_slot = ring_.next();
      wait_turn(shared);
      begin_values(sums, v_slot);
      multiply_keys(k_slot, shared);
      end_turn(shared);
      finish_values<1>(sums);
      release(smem_.slot_empty(v_slot));
      weigh_step(variant, unit, shared, visible, key, k_slot, false);
    }
  }

  /// The variant for the kv head of a unit.
  FLASHPLAN_DEVICE Variant variant_of(const Unit& unit) const {
    Variant variant(p_);
    if (p_.variant.k_scales.data != nullptr || p_.q_scales.data != nullptr) {
      variant.scale_logits(p_.head_scale(unit.head));
    }
    return variant;
  }
  /// The mbarrier phase that completes when the next queries are in shared memory.
  FLASHPLAN_DEVICE MbarrierPhase query_part_full() const {
    return {smem_.q_full(q_ % S::kQBarriers), q_ / S::kQBarriers & 1};
  }
  /// Passes the parts of a buffer that are left over before a tile that takes a whole buffer.
  FLASHPLAN_DEVICE void skip_query_parts() {
    while (q_ % S::kQParts != 0) {
      const MbarrierPhase full = query_part_full();
      mbarrier_wait(full.barrier, full.parity);
      release(smem_.q_empty(q_ % S::kQBarriers));
      ++q_;
    }
  }
  /// Frees the queries of a unit, once the output staged in their memory is read.
  FLASHPLAN_DEVICE void release_queries(uint32_t place, uint32_t num_parts) const {
    if (thread_ == 0) tma_store_wait_read();
#pragma unroll
    for (uint32_t part = 0; part < S::kQParts; ++part) {
      if (part < num_parts) release(smem_.q_empty((place + part) % S::kQBarriers));
    }
  }

  /// Waits for the logits of a step, and turns them into weights, as operands of the products with
  /// values.
  FLASHPLAN_DEVICE void weigh_step(const Variant& variant, const Unit& unit, bool is_shared,
                                   Visible& visible, int32_t key, int k_slot, bool is_first) {
    visible.find_pages(smem_);
    wgmma_wait<0>();
    pin(softmax_.logits);
    release(smem_.slot_empty(k_slot));
    if (!visible.has_rows) return;
    float shrink[2];
    const bool raised = softmax_.weigh_step(p_, variant, context_of(unit), visible,
                                            first_row(is_shared), thread_, key, is_first, shrink);
    if (raised) {
#pragma unroll
      for (int i = 0; i < S::kHeadDimVo / 2; ++i) o_[i] *= shrink[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < S::kTileKv / 32; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // j % 2: the thread's first or second row
        const float* x = softmax_.logits + 16 * i + 8 * (j / 2) + 2 * (j % 2);
        weights_[i][j] = pack_e4m3(x[0], x[1], x[4], x[5]);
      }
    }
  }

  /// Writes the output of a unit, if it is this warpgroup's, and frees the record of its tile after
  /// the last head. `is_final`: no other unit of the queue follows.
  FLASHPLAN_DEVICE void write_output(const Unit& unit, bool is_shared, const Scales& scales,
                                     bool is_final) {
    if (is_own(is_shared, last_q_)) {
      epilogue(first_row(is_shared))
          .write(context_of(unit), unit.head, q_address(last_q_, is_shared), o_, scales, is_final);
    }
    // The next unit begins a tile, so this one was the last head of its tile.
    if (begins_tile_) release(smem_.context_empty(context_slot(unit)));
  }

  const AttentionParams& p_;
  const Sm90Smem<S> smem_;
  const int warpgroup_;
  const int thread_;
  Softmax softmax_;
  float o_[S::kHeadDimVo / 2] = {};
  uint32_t weights_[S::kTileKv / 32][4] = {};
  Sm90SlotRing<S> ring_;
  uint32_t q_ = 0;           // place of the queries of this unit, see Sm90Smem::queries()
  uint32_t last_q_ = 0;      // place of the queries of the unit before
  bool begins_tile_ = true;  // whether this unit is the first of a tile
  bool shared_ = false;      // whether all warpgroups have rows of this unit
  bool last_shared_ = false;
};

}  // namespace flashplan::device
