// SPDX-License-Identifier: Apache-2.0
// Rotates the queries and keys of a work tile of the sm80 family in shared memory, in place.
#pragma once

#include "kernels/device/rotation.h"
#include "kernels/device/row_block.h"
#include "kernels/device/sm80/shared_tile.h"
#include "kernels/device/sm80/tile_context.h"

namespace flashplan::device {

template <typename T, typename S>
class TileRotator {
 public:
  FLASHPLAN_DEVICE TileRotator(const AttentionParams& p, const RowBlock& block,
                               const typename T::Variant& variant, int thread)
      : p_(p), block_(block), variant_(variant), thread_(thread) {}

  /// Rotates the keys of the pipeline stage at address `stage`, and with a head's first keys also
  /// the head's queries, which are in this stage or at `queries`. All threads of the CTA call it.
  FLASHPLAN_DEVICE void rotate(uint32_t stage, uint32_t queries, int32_t first_key, int head,
                               bool is_first) const {
    if (is_first) rotate_queries(S::kQueryInStage ? stage + S::kStageQuery : queries, head);
    if constexpr (S::kWarpsKv > 1) {
      // Each warp rotates the keys that it alone reads, so it need not wait for other warps.
      if (is_first) __syncthreads();
      if (WarpPlace<S>(thread_).computes) {
        const WarpPlace<S> at(opaque(thread_));
        rotate_keys<S::kKeysPerWarp, 32>(stage, at.warp_kv * S::kKeysPerWarp, at.lane, first_key,
                                         head);
        __syncwarp();
      }
    } else {
      rotate_keys<T::kTileKv, T::kThreads>(stage, 0, opaque(thread_), first_key, head);
      __syncthreads();
    }
  }

 private:
  using Variant = typename T::Variant;

  /// Rotates kRows keys of the stage, from `first_row` on, by kThreads threads.
  template <int kRows, int kThreads>
  FLASHPLAN_DEVICE void rotate_keys(uint32_t stage, int first_row, int thread, int32_t first_key,
                                    int head) const {
    using Tile = SharedTile<T::kHeadDimQk * Element<T::kKv>::kBytes>;
    const int head_dim = p_.tensors.head_dim_qk;  // later dims are padding of zeros
    RowRotation<Variant, T::kKv, Tile, T::kHeadDimQk, kThreads, Variant::kTransformsKey, 2>::
        rotate_rows(
            stage, first_row, kRows, thread,
            [&](int row) { return static_cast<uint32_t>(first_key + row); },
            [&](float x, int row, int dim) {
              const int32_t key = min(first_key + row, block_.last_key(p_));
              return dim < head_dim ? variant_.key(x, {block_.rows.segment, key, head, dim}) : x;
            });
  }

  FLASHPLAN_DEVICE void rotate_queries(uint32_t queries, int head) const {
    using Tile = SharedTile<T::kHeadDimQk * Element<T::kQ>::kBytes>;
    const int head_dim = p_.tensors.head_dim_qk;
    RowRotation<Variant, T::kQ, Tile, T::kHeadDimQk, T::kThreads, Variant::kTransformsQuery>::
        rotate_rows(
            queries, 0, S::kRows, opaque(thread_),
            [&](int row) {
              return block_.position + block_.rows.query(row, p_.schedule.group_size);
            },
            [&](float x, int row, int dim) {
              return dim < head_dim
                         ? variant_.query(x, element_position(p_, block_.rows, block_.position,
                                                              head, row, dim))
                         : x;
            });
  }

  const AttentionParams& p_;
  const RowBlock& block_;
  const Variant& variant_;
  const int thread_;
};

}  // namespace flashplan::device
