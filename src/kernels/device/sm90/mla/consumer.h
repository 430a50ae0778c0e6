// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the sm90_mla family: the logits of every other block of keys, and one
// half of the output's columns.
#pragma once

#include "kernels/device/sm90/mla/epilogue.h"
#include "kernels/device/sm90/mla/logits.h"

namespace flashplan::device {

/// 64 rows of o with 512 columns take all accumulators of two warpgroups, so each has half of the
/// columns of all rows. Logits and weights of a block are computed once, by its owner: warpgroup 0
/// has the even blocks of a tile, warpgroup 1 the odd ones. The other warpgroup reads the weights
/// from shared memory (MlaSharedMemory, 3). So the tensor cores multiply for one warpgroup while
/// the other one computes its softmax. Below, "o += 0, left" adds the product of the weights of
/// block 0 and the left half of its values.
///
///   warpgroup 0: logits 0 | weights 0 | o += 0, left            | o += 1, left  | logits 2 ...
///   warpgroup 1: logits 1             | o += 0, right beside weights 1 | o += 1, right | logits 3
///
/// Both add the products of the blocks in their order, and the shifts of the rows (see Sm90Softmax)
/// go from block to block: an owner weighs its block with the shifts of the block before, and
/// raises them if the weights come out too large. It publishes the shifts with the weights, and the
/// other warpgroup scales its o and its sums down to raised shifts before it adds the product.
///
/// In batch-invariant plans the state of each chunk of keys is computed by itself: shifts, sums and
/// o begin anew. A chunk has an even number of blocks, so blocks keep their owners.
template <typename S>
class MlaConsumer {
 public:
  FLASHPLAN_DEVICE MlaConsumer(const AttentionParams& p, const MlaSmem<S>& smem, int warpgroup)
      : p_(p),
        smem_(smem),
        warpgroup_(warpgroup),
        thread_(static_cast<int>(threadIdx.x) % 128),
        fences_(!S::kPairs && (S::kWidens || (!S::kHasValues && !p.maps.has_kv))),
        variant_(p) {
    if (p.variant.k_scales.data != nullptr) variant_.scale_logits(p.variant.k_scales.of(0));
  }

  FLASHPLAN_DEVICE void run() {
    for (uint32_t i = 0;; ++i) {
      const Sm90Context& context = wait_context(i);
      if (context.is_end) break;
      if (context.has_steps()) {
        run_tile(context, i);
      } else {
        epilogue().write_empty(context);
      }
      release(smem_.context_empty(i));
    }
    MlaMerge<S>::merge_waiting(p_, smem_, thread_ + 128 * warpgroup_);
  }

 private:
  using Variant = typename S::Variant;
  using Softmax = typename S::template Softmax<S>;
  using Visible = typename Softmax::Visible;
  using ByDims = Wgmma<S::kQ, S::kTileKv>;
  using ByRows = Wgmma<S::kQ, S::kHalfDims>;

  FLASHPLAN_DEVICE const Sm90Context& wait_context(uint32_t i) const {
    mbarrier_wait(smem_.context_full(i), i / S::kContexts & 1);
    return smem_.memory.contexts[i % S::kContexts];
  }
  FLASHPLAN_DEVICE MlaEpilogue<S> epilogue() const { return {p_, smem_, warpgroup_, thread_}; }
  FLASHPLAN_DEVICE void release(uint32_t barrier) const {
    __syncwarp();
    if (thread_ % 32 == 0) mbarrier_arrive(barrier);
  }
  /// Frees a half of a block, for the producers of both CTAs if there are two.
  FLASHPLAN_DEVICE void release_half(uint32_t block, int part) const {
    if constexpr (S::kPairs) {
      __syncwarp();
      const int lane = thread_ % 32;
      if (lane == 0) mbarrier_arrive(smem_.empty(block, part));
      if (lane == 1) {
        mbarrier_arrive_in_cluster(address_in_cta(smem_.empty(block, part), cluster_rank() ^ 1));
      }
    } else {
      release(S::kHasValues ? smem_.values_empty(block, part) : smem_.empty(block, part));
    }
  }
  FLASHPLAN_DEVICE void wait_part(uint32_t block, int part) const {
    const MbarrierPhase full = smem_.full(block, part);
    mbarrier_wait(full.barrier, full.parity);
    if (fences_) fence_async_proxy();
  }
  /// Waits for this warpgroup's half of the values. Where keys are values, the owner of the block
  /// has already waited for it, to compute logits.
  template <int kWarpgroup>
  FLASHPLAN_DEVICE void wait_values(uint32_t block, bool owns) const {
    if constexpr (S::kHasValues) {
      const MbarrierPhase full = smem_.values_full(block, kWarpgroup);
      mbarrier_wait(full.barrier, full.parity);
    } else if (!owns) {
      wait_part(block, kWarpgroup);
    }
  }

  /// Computes work tile number `i`, and writes its state, or those of its chunks.
  FLASHPLAN_DEVICE void run_tile(const Sm90Context& context, uint32_t i) {
    const int32_t count = num_blocks<S>(context.tile.kv_begin, context.tile.kv_end);
    visible_ = {p_, context, 0, thread_};
    if constexpr (S::kHasValues) begin_head(context.tile.kv_head);
    if (warpgroup_ < count) {
      mbarrier_wait(smem_.q_full(), parities_ & 1);
    } else {
      release(smem_.q_empty());
    }
    parities_ ^= 1;
    int32_t end = 0;
#pragma unroll 1
    do {
      softmax_.reset();
      clear(o_);
      end = warpgroup_ == 0 ? attend<0>(context, end, count) : attend<1>(context, end, count);
      auto state = epilogue().state(softmax_.sum, softmax_.shift, parities_ >> 1);
      parities_ ^= 2;
      const int32_t chunk = chunk_of(end - 1);
      if (context.tile.merge < 0) {
        epilogue().write(context, o_, state, chunk, end >= count);
      } else {
        epilogue().write_partial(context, o_, state, chunk);
        if (end >= count) {
          epilogue().arrive(context, chunk + 1, smem_.memory.num_states[i % S::kContexts],
                            wait_context(i + 1).is_end);
        }
      }
    } while (end < count);
  }

  /// If kv heads have scales (k_scales), sets the scale of logits for a tile's kv head.
  FLASHPLAN_DEVICE void begin_head(int32_t kv_head) {
    if (p_.variant.k_scales.data == nullptr) return;
    variant_ = Variant(p_);
    variant_.scale_logits(p_.variant.k_scales.of(kv_head));
  }

  /// The mask that turns a block's number in its tile into its number in its chunk. The number of
  /// blocks in a chunk is a power of two. In plans without chunks, the whole tile is one chunk.
  FLASHPLAN_DEVICE int32_t bits_in_chunk() const {
    const int32_t chunk_kv = p_.schedule.chunk_kv;
    return chunk_kv > 0 ? chunk_kv / S::kTileKv - 1 : 0x7fffffff;
  }
  FLASHPLAN_DEVICE int32_t chunk_of(int32_t block) const {
    return block >> __popc(static_cast<unsigned>(bits_in_chunk()));
  }

  /// Computes the chunk that begins with block n of a tile of `count` blocks: o, and the sums of
  /// weights in this thread's columns. Returns the first block behind the chunk or, if the number
  /// of its blocks is odd, the one after that.
  template <int kWarpgroup>
  FLASHPLAN_DEVICE int32_t attend(const Sm90Context& context, int32_t n, int32_t count) {
#pragma unroll 1
    do {
      if constexpr (kWarpgroup == 0) {
        attend_first(context, n, count);
      } else {
        attend_second(context, n, count);
      }
      n += 2;
      block_ += 2;
    } while (n < count && (n & bits_in_chunk()) != 0);
    block_ -= n > count ? 1 : 0;  // the last pair may have been one block
    return n;
  }

  /// Computes blocks n and n + 1 of the tile for warpgroup 0, which owns block n.
  FLASHPLAN_DEVICE void attend_first(const Sm90Context& context, int32_t n, int32_t count) {
    const uint32_t block = uniform_block();
    float shrink[2];
    compute_logits(block);
    const bool is_first = (n & bits_in_chunk()) == 0;
    const bool raised = weigh<0>(context, n, count, is_first, shrink);
    if (raised && !is_first) multiply_o(shrink);
    pack();
    publish<0>(raised);
    multiply_own<0>(block);
    wait_and_release<0>(block);
    if (n + 1 >= count) return;
    take_published<0>();
    multiply_others<0>(block + 1);
    wait_and_release<0>(block + 1);
  }

  /// Computes blocks n and n + 1 of the tile for warpgroup 1, which owns block n + 1, if there is
  /// one. It weighs block n + 1 while the product of block n runs.
  FLASHPLAN_DEVICE void attend_second(const Sm90Context& context, int32_t n, int32_t count) {
    const uint32_t block = uniform_block();
    const bool owns = n + 1 < count;
    float shrink[2];
    bool raised = false;
    if (owns) compute_logits(block + 1);
    take_published<1>();
    multiply_others<1>(block);
    if (owns) {
      raised = weigh<1>(context, n + 1, count, false, shrink);
      pack();
    }
    wait_and_release<1>(block);
    if (!owns) return;
    if (raised) multiply_o(shrink);
    publish<1>(raised);
    multiply_own<1>(block + 1);
    wait_and_release<1>(block + 1);
  }

  /// The number of the next block. The shuffle tells the compiler that all lanes have the same one,
  /// so that it keeps addresses of operands in uniform registers.
  FLASHPLAN_DEVICE uint32_t uniform_block() const { return __shfl_sync(0xffffffffU, block_, 0); }

  /// Waits for the weights of the other warpgroup. If shifts were raised, shrinks o and the sums.
  template <int kWarpgroup>
  FLASHPLAN_DEVICE void take_published() {
    barrier_wait(S::kWeightsBarrier + 1 - kWarpgroup, S::kConsumerThreads);
    if (load_shared_4(smem_.raised(warp())) == 0) return;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t published = smem_.shift(S::row(0, opaque(thread_), half));
      const float raised = __uint_as_float(load_shared_4(published));
      factor[half] = exp2_fast(softmax_.shift[half] - raised);
      softmax_.shift[half] = raised;
      softmax_.sum[half] *= factor[half];
    }
    multiply_o(factor);
  }

  FLASHPLAN_DEVICE void compute_logits(uint32_t block) {
    multiply_keys(block);
    if constexpr (S::kHasValues) {
      wgmma_wait<1>();
      release(smem_.empty(block, 0));
    }
    wgmma_wait<0>();
    pin(softmax_.logits);
    if constexpr (S::kHasValues) release(smem_.empty(block, 1));
  }
  /// Turns the logits of block n of the tile into weights. Returns whether shifts of the warp's
  /// rows were raised: o must then be multiplied by `shrink`. `is_first`: there are no shifts yet.
  template <int kWarpgroup>
  FLASHPLAN_DEVICE bool weigh(const Sm90Context& context, int32_t n, int32_t count, bool is_first,
                              float (&shrink)[2]) {
    shrink[0] = shrink[1] = 1.0F;
    bool raised = false;
    if (visible_.has_rows) {
      visible_.off_pages = load_shared_4(smem_.on_pages()) != kAllOnPages;
      visible_.found = found_columns(block_ + kWarpgroup);
      raised = softmax_.weigh_step(p_, variant_, context, visible_, 0, thread_,
                                   context.tile.kv_begin + n * S::kTileKv, is_first, shrink, [&] {
                                     clear(softmax_.logits);
                                     add_mla_logits_of_warp<S>(smem_, block_ + kWarpgroup,
                                                               opaque(thread_), softmax_.logits);
                                   });
    }
    if (n + 2 >= count) release(smem_.q_empty());
    return raised;
  }
  /// One bit for each of this thread's columns of a block: whether the cache has the key that the
  /// column's entry in the query's list of keys (AttentionParams::lists) names.
  FLASHPLAN_DEVICE uint32_t found_columns(uint32_t block) const {
    static_assert(S::kTileKv == 64);
    if (S::kHasValues || p_.lists.slots == nullptr) return 0xffffffffU;
    const uint2 found = load_shared_8(smem_.found(block));
    if ((found.x & found.y) == 0xffffffffU) return 0xffffffffU;
    const auto columns = [&](uint32_t keys) {
      // Of each 8 keys, two are columns of this thread; the shifts bring the pairs together.
      const uint32_t pairs = keys >> opaque(thread_) % 4 * 2 & 0x03030303U;
      return (pairs | pairs >> 6 | pairs >> 12 | pairs >> 18) & 0xffU;
    };
    return columns(found.x) | columns(found.y) << 8 | 0xffff0000U;
  }
  /// Starts the products of queries and keys. Where values are tensors of their own, they are
  /// loaded to the memory of the keys. Then the products with the left half of the keys are a batch
  /// of their own, so that this half is freed earlier.
  FLASHPLAN_DEVICE void multiply_keys(uint32_t block) {
    const WgmmaOperand q = S::Query::by_dims(smem_.of_operand(smem_.queries()));
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      wait_part(block, part);
      wgmma_fence();
      const WgmmaOperand k = S::Half::by_dims(smem_.of_operand(smem_.half(block, part)));
#pragma unroll
      for (int i = 0; i < S::kHalfDims / 16; ++i) {
        const int step = part * S::kHalfDims / 16 + i;
        if (step == 0) {
          ByDims::first_by_dims(softmax_.logits, q, k);
        } else {
          ByDims::by_dims(softmax_.logits, q + S::Query::step_of_dims(step),
                          k + S::Half::step_of_dims(i), true);
        }
      }
      if (S::kHasValues && part == 0) wgmma_commit();
    }
    const WgmmaOperand tail = S::Tail::by_dims(smem_.of_operand(smem_.tail(block)));
#pragma unroll
    for (int i = 0; i < S::kTailDims / 16; ++i) {
      ByDims::by_dims(softmax_.logits, q + S::Query::step_of_dims(S::kHeadDimVo / 16 + i),
                      tail + S::Tail::step_of_dims(i), true);
    }
    wgmma_commit();
  }

  /// o += the weights in registers * values.
  template <int kWarpgroup>
  FLASHPLAN_DEVICE void multiply_own(uint32_t block) {
    wait_values<kWarpgroup>(block, true);
    const WgmmaOperand v = S::Half::by_rows(smem_.of_operand(smem_.half(block, kWarpgroup)));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::kTileKv / 16; ++i) {
      ByRows::by_rows(o_, weights_[i], v + S::Half::step_of_rows(i), true);
    }
    wgmma_commit();
  }
  /// o += the weights of the other warpgroup * values.
  template <int kWarpgroup>
  FLASHPLAN_DEVICE void multiply_others(uint32_t block) {
    wait_values<kWarpgroup>(block, false);
    const WgmmaOperand v = S::Half::by_rows(smem_.of_operand(smem_.half(block, kWarpgroup)));
    const WgmmaOperand weights = S::Weights::by_dims(smem_.of_operand(smem_.weights()));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::kTileKv / 16; ++i) {
      ByRows::add_by_rows(o_, weights + S::Weights::step_of_dims(i), v + S::Half::step_of_rows(i));
    }
    wgmma_commit();
  }
  template <int kWarpgroup>
  FLASHPLAN_DEVICE void wait_and_release(uint32_t block) {
    wgmma_wait<0>();
    pin(o_);
    release_half(block, kWarpgroup);
  }

  FLASHPLAN_DEVICE void multiply_o(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < S::kHalfDims / 2; ++i) o_[i] *= factor[i / 2 % 2];
  }

  /// Packs the weights into operands of the products with values.
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

  FLASHPLAN_DEVICE int warp() const { return opaque(thread_) / 32; }
  /// Publishes the weights of a block that this warpgroup owns and, if `raised`, the shifts of the
  /// warp's rows.
  template <int kWarpgroup>
  FLASHPLAN_DEVICE void publish(bool raised) {
    barrier_wait(S::kOwnBarrier + kWarpgroup, 128);  // all warps have read the last weights
    const int thread = opaque(thread_);
    const int lane = thread % 32;
    // The address of chunk lane / 16 of row lane % 16. XOR with n * 16, n even, gives that of chunk
    // n + lane / 16.
    const uint32_t own =
        smem_.weights() + (thread / 32 * 16 + lane % 16) * 128 + (((lane / 16) ^ lane) % 8 << 4);
#pragma unroll
    for (int i = 0; i < S::kTileKv / 16; ++i) {
      stmatrix(own ^ (i * 2 << 4), weights_[i][0], weights_[i][1], weights_[i][2], weights_[i][3]);
    }
    if (lane == 0) store_shared_4(smem_.raised(thread / 32), raised ? 1 : 0);
    if (raised && lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_shared_4(smem_.shift(S::row(0, thread, half)), __float_as_uint(softmax_.shift[half]));
      }
    }
    fence_async_proxy();
    barrier_arrive_if(true, S::kWeightsBarrier + kWarpgroup, S::kConsumerThreads);
  }

  const AttentionParams& p_;
  const MlaSmem<S> smem_;
  const int warpgroup_;
  const int thread_;
  // Whether wait_part() needs a fence of the async proxy: keys are written by ordinary writes or
  // cp.async, and the warps that write them put no fence behind.
  const bool fences_;
  Variant variant_;
  Softmax softmax_;
  Visible visible_;
  float o_[S::kHalfDims / 2] = {};
  uint32_t weights_[S::kTileKv / 16][4] = {};
  uint32_t block_ = 0;  // the number of the next block in the queue
  // Bit 0: the parity of the number of tiles with steps that were begun, which is that of the next
  // q_full() phase. Bit 1: the parity of the number of states that were computed.
  uint32_t parities_ = 0;
};

}  // namespace flashplan::device
