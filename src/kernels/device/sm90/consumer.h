// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the sm90 family: attention of 64 rows of a work tile.
#pragma once

#include "kernels/device/sm90/epilogue.h"
#include "kernels/device/sm90/query_transform.h"
#include "kernels/device/sm90/slot_ring.h"
#include "kernels/device/sm90/variant_softmax.h"
#include "kernels/device/sm90/warp_logits.h"

namespace flashplan::device {

/// A work tile of more than 64 rows is shared: each warpgroup computes 64 of its rows. The
/// warpgroups take turns to issue products, so that one computes its softmax while the products of
/// the other run. A tile of up to 64 rows belongs to one warpgroup, and the other warpgroups skip
/// the keys and values of the tile; warpgroups take such tiles in turn. A step is the work on
/// kTileKv keys and their values. Inside a warpgroup, the product with the values of a step runs
/// during the softmax of the next step, and the product with the last values of a tile runs during
/// the first step of the next tile.
template <typename S>
class Sm90Consumer {
 public:
  FLASHPLAN_DEVICE Sm90Consumer(const AttentionParams& p, const Sm90Smem<S>& smem, int warpgroup)
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
      // The queue is empty, or its last tile has no keys, so no output is left to write. This break
      // comes early, so that the code below need not be fetched from memory.
      if (context.is_end && last.tile < 0) break;
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
  static constexpr int kDimTiles = S::kHeadDimVo / 8;
  using Variant = typename S::Variant;
  using Softmax = Sm90SoftmaxOf<S>;
  using Visible = typename Softmax::Visible;
  using Scales = typename Sm90Epilogue<S>::Scales;
  using ByDims = Wgmma<S::kQ, S::kTileKv>;
  // In kernels of 512 threads the compiler refuses a product of 256 columns, which needs more
  // registers than a thread has when the kernel starts.
  static constexpr int kDimsAtOnce =
      S::kHelps ? (S::kHeadDimVo < 128 ? S::kHeadDimVo : 128) : S::kHeadDimVo;
  using ByRows = Wgmma<S::kWeight, kDimsAtOnce>;

  /// One kv head of a work tile. `tile` is the number of the work tile in the queue.
  struct Unit {
    int32_t tile;
    int32_t head;
  };
  static constexpr Unit kNoUnit = {-1, 0};

  /// The place of a unit's record in shared memory, which has a ring of kContexts places for the
  /// records of work tiles.
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
  /// Whether this warpgroup computes rows of a unit. `place`: how many parts of query buffers were
  /// taken before the unit's queries.
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

  /// Waits until this warpgroup may issue products. `in_turns`: all warpgroups compute, and so take
  /// turns.
  FLASHPLAN_DEVICE void wait_turn(bool in_turns) const {
    barrier_wait_if(in_turns, S::kTurnBarrier + warpgroup_, 2 * 128);
  }
  FLASHPLAN_DEVICE void end_turn(bool in_turns) const {
    constexpr int kLast = S::kWarpgroups - 1;
    const int next = warpgroup_ == kLast ? 0 : warpgroup_ + 1;
    barrier_arrive_if(in_turns, S::kTurnBarrier + next, 2 * 128);
  }

  /// Skips a slot with keys or values of another warpgroup's tile. It waits until the slot is full,
  /// because a warp tells phases of a slot apart by parity, and cannot do so once it is two phases
  /// behind. Then it frees the slot, so that slots become free in the order in which they were
  /// filled. The two warps that fill slots rely on this order: each of them may fill a slot only in
  /// every other round of the ring, and such rounds have the same parity.
  FLASHPLAN_DEVICE void pass_slot(bool is_key) { release(smem_.slot_empty(ring_.next(is_key))); }

  FLASHPLAN_DEVICE void multiply_keys(int slot, bool is_shared) {
    wgmma_fence();
    // The address is computed here, because kernels of 256 dims have no register to keep it in.
    const int address = opaque(static_cast<int>(q_address(q_, is_shared)));
    const WgmmaOperand q = S::Query::by_dims(static_cast<uint32_t>(address));
    const WgmmaOperand k = S::Key::by_dims(ring_.address(slot));
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
    const WgmmaOperand v = S::Value::by_rows(ring_.address(slot));
#pragma unroll
    for (int i = 0; i < S::kTileKv / 16; ++i) {
#pragma unroll
      for (int dim = 0; dim < S::kHeadDimVo; dim += kDimsAtOnce) {
        auto& o = reinterpret_cast<float (&)[kDimsAtOnce / 2]>(o_[dim / 2]);
        const uint32_t step = S::Value::step_of_rows(i) + S::Value::step_of_blocks(dim / 64);
        ByRows::by_rows(o, weights_[i], v + step, true);
      }
    }
    wgmma_commit();
  }

  /// Multiplies the last values of unit `last` and writes its output; then computes `unit`, all but
  /// the products of its last values. Where `unit` has no keys, as at the end of the queue, only
  /// `last` is finished. This is not put off until a unit with keys comes, because the record of
  /// that unit may be waiting for the memory that the record of `last` has.
  ///
  /// If products were in flight on one side of a branch only, the compiler would insert a wait
  /// behind each product. So the products of both units are always issued. Where there is no
  /// `last`, `unit` has no keys, or another warpgroup computes one of the two units, the products
  /// multiply whatever shared memory holds, and nobody reads the results.
  FLASHPLAN_DEVICE void attend(const Unit& unit, const Unit& last, bool has_keys) {
    const bool has_last = last.tile >= 0;
    const bool shared = has_keys && is_shared(unit);
    const bool last_shared = has_last && last_shared_;
    shared_ = shared;
    if (shared) skip_query_parts();
    // In the ring, the slot with the first keys of `unit` comes before the slot with the last
    // values of `last`.
    const MbarrierPhase k_full = ring_.next_full(true);
    int k_slot = ring_.take(true, has_keys);
    const MbarrierPhase v_full = ring_.next_full(false);
    const int v_slot = ring_.take(false, has_last);
    if (has_last) ring_.wait(v_full);
    const Sm90Context& context = context_of(unit);
    Visible visible;
    Scales scales;  // the scales of `last`
    const auto compute_visible = [&] { visible = {p_, context, first_row(shared), thread_}; };
    const auto compute_scales = [&] {
      scales = epilogue(first_row(last_shared))
                   .scales(context_of(last), last.head, softmax_.sum, softmax_.shift);
    };
    const auto finish_last = [&] {
      if (!has_last) return;
      if (S::kQBuffers == 1) compute_scales();
      release(smem_.slot_empty(v_slot));
      write_output(last, last_shared, scales, context.is_end != 0);
    };
    const auto multiply_first_keys = [&] {
      if (has_keys) {
        ring_.wait(k_full, query_part_full());
        transform_queries(unit, shared);
      }
      multiply_keys(k_slot, shared);
    };
    if constexpr (S::kQBuffers > 1) {
      const bool in_turns = shared || last_shared;
      wait_turn(in_turns);
      multiply_values(v_slot);
      // `visible` and `scales` are computed while these products run. Behind multiply_first_keys(),
      // which waits until the tensor cores take more products, their computation would delay the
      // output of `last`.
      compute_visible();
      if (has_last) compute_scales();
      multiply_first_keys();
      end_turn(in_turns);
      wgmma_wait<1>();
      pin(o_);
      finish_last();
      clear(o_);
    } else {
      wait_turn(last_shared);
      multiply_values(v_slot);
      end_turn(last_shared);
      wgmma_wait<0>();
      pin(o_);
      finish_last();
      clear(o_);
      wait_turn(shared);
      multiply_first_keys();
      end_turn(shared);
      compute_visible();
    }
    visible.find_pages(smem_);
    int32_t key = context.tile.kv_begin;
    const int32_t end = context.tile.kv_end;
    const Variant variant = has_keys ? variant_of(unit) : Variant(p_);
    softmax_.begin(p_, context, unit.head, first_row(shared), thread_);
    wgmma_wait<0>();
    pin(softmax_.logits);
    // The queries are released before the softmax, because the producer waits for their memory, to
    // load the queries of another tile.
    if (S::kQBuffers > 1 && has_last) release_queries(last_q_, num_query_parts(last_shared));
    if (!has_keys) return;
    if (!is_own(shared, q_)) {
      release(smem_.slot_empty(k_slot));
      for (key += S::kTileKv; key < end; key += S::kTileKv) {
        pass_slot(true);
        pass_slot(false);
      }
      if (S::kQBuffers == 1) release_queries(q_, 1);
      return;
    }
    float shrink[2];
    weigh_step(variant, unit, shared, visible, key, k_slot, true, shrink);
    release(smem_.slot_empty(k_slot));
    pack();
    for (key += S::kTileKv; key < end; key += S::kTileKv) {
      k_slot = ring_.next(true);
      wait_turn(shared);
      multiply_keys(k_slot, shared);
      visible.find_pages(smem_);
      const int v_slot = ring_.next(false);
      multiply_values(v_slot);
      end_turn(shared);
      wgmma_wait<1>();
      pin(softmax_.logits);
      const bool raised = weigh_step(variant, unit, shared, visible, key, k_slot, false, shrink);
      release(smem_.slot_empty(k_slot));
      wgmma_wait<0>();
      pin(o_);
      release(smem_.slot_empty(v_slot));
      pack();
      if (raised) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) o_[4 * n + j] *= shrink[j / 2];
        }
      }
    }
    if (S::kQBuffers == 1) release_queries(q_, 1);
  }

  /// The variant for the kv head of a unit.
  FLASHPLAN_DEVICE Variant variant_of(const Unit& unit) const {
    Variant variant(p_);
    const bool scales_queries = S::kTakesNarrowQueries && p_.q_scales.data != nullptr;
    if (p_.variant.k_scales.data != nullptr || scales_queries) {
      const float scale = p_.variant.k_scales.of(unit.head);
      variant.scale_logits(scales_queries ? scale * p_.q_scales.of(unit.head) : scale);
    }
    return variant;
  }
  /// The mbarrier phase that completes when the next queries are in shared memory.
  FLASHPLAN_DEVICE MbarrierPhase query_part_full() const {
    return {smem_.q_full(q_ % S::kQBarriers), q_ / S::kQBarriers & 1};
  }
  /// Applies the variant's `query` to this warpgroup's queries, in shared memory.
  FLASHPLAN_DEVICE void transform_queries(const Unit& unit, bool is_shared) const {
    if constexpr (Variant::kTransformsQuery && !Variant::kRotates) {
      if (!is_own(is_shared, q_)) return;
      const int warp_row = opaque(thread_) / 32 * 16;
      transform_16_queries<S>(p_, context_of(unit).block(), unit.head,
                              first_row(is_shared) + warp_row,
                              q_address(q_, is_shared) + warp_row * 128, opaque(thread_) % 32);
      fence_async_proxy();  // wgmma reads them
      barrier_wait(S::kOwnBarrier + warpgroup_, 128);
    }
  }
  /// Skips the parts of the current query buffer that small tiles have left unused, because the
  /// next tile takes a whole buffer. The producer announces these parts without filling them.
  FLASHPLAN_DEVICE void skip_query_parts() {
    while (q_ % S::kQParts != 0) {
      const MbarrierPhase full = query_part_full();
      mbarrier_wait(full.barrier, full.parity);
      release(smem_.q_empty(q_ % S::kQBarriers));
      ++q_;
    }
  }
  /// Frees the queries of a unit, once TMA has read the output that was staged in their memory.
  FLASHPLAN_DEVICE void release_queries(uint32_t place, uint32_t num_parts) const {
    if (S::kQBuffers > 1 && thread_ == 0) tma_store_wait_read();
#pragma unroll
    for (uint32_t part = 0; part < S::kQParts; ++part) {
      if (part < num_parts) release(smem_.q_empty((place + part) % S::kQBarriers));
    }
  }

  FLASHPLAN_DEVICE bool weigh_step(const Variant& variant, const Unit& unit, bool is_shared,
                                   const Visible& visible, int32_t key, int k_slot, bool is_first,
                                   float (&shrink)[2]) {
    if (!visible.has_rows) return false;
    return softmax_.weigh_step(p_, variant, context_of(unit), visible, first_row(is_shared),
                               thread_, key, is_first, shrink, [&] {
                                 clear(softmax_.logits);
                                 add_logits_of_warp<S>(q_address(q_, is_shared),
                                                       ring_.address(k_slot), opaque(thread_),
                                                       softmax_.logits);
                               });
  }

  /// Packs the weights into operands of the products with values.
  FLASHPLAN_DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < S::kTileKv / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weights_[i][j] = Element<S::kWeight>::pack(softmax_.logits[8 * i + 2 * j],
                                                   softmax_.logits[8 * i + 2 * j + 1]);
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
    // If the next unit begins a tile, this one was the last head of its tile.
    if (begins_tile_) release(smem_.context_empty(context_slot(unit)));
  }

  const AttentionParams& p_;
  const Sm90Smem<S> smem_;
  const int warpgroup_;
  const int thread_;
  Softmax softmax_;
  float o_[S::kHeadDimVo / 2] = {};
  uint32_t weights_[S::kTileKv / 16][4] = {};
  Sm90SlotRing<S> ring_;
  uint32_t q_ = 0;           // parts of query buffers that were taken before this unit's queries
  uint32_t last_q_ = 0;      // parts that were taken before the queries of the previous unit
  bool begins_tile_ = true;  // whether this unit is the first of a tile
  bool shared_ = false;      // whether all warpgroups have rows of this unit
  bool last_shared_ = false;
};

}  // namespace flashplan::device
