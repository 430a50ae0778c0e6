// SPDX-License-Identifier: Apache-2.0
// The producer of the sm90 family: loads the records of work tiles, queries, keys and values into
// shared memory, ahead of the consumers.
#pragma once

#include "kernels/device/sm90/kv_loader.h"
#include "kernels/device/sm90/prepared_loader.h"
#include "kernels/device/sm90/query_loader.h"

namespace flashplan::device {

/// Runs warp `warp` of the producer. `queue_word`: this lane's word of QueueStart, from
/// Sm90QueryLoader::request_queue().
template <typename S>
FLASHPLAN_DEVICE void run_sm90_producer(const AttentionParams& p, const Sm90Smem<S>& smem, int warp,
                                        uint32_t queue_word) {
  if constexpr (S::kRotates && S::kTakesPrepared) {
    // The third word of QueueStart says whether the first work tile has prepared keys: it is the
    // number of their first tile, or kNotPrepared. It arrives before the record that
    // Sm90Prepared::is_in_use() waits for, so the first keys are requested earlier.
    const auto first_prepared = static_cast<int32_t>(__shfl_sync(0xffffffffU, queue_word, 2));
    if (warp < S::kKvWarps && p.prepared.states != nullptr && first_prepared >= 0) {
      if (warp == 0) {
        Sm90PreparedLoader<S, true>(p, smem, warp).run(1);
        Sm90Prepared<S>::leave(p);
      } else {
        Sm90KvLoader<S, S::kPreparedSlots>(p, smem, warp).load_steps(queue_word);
      }
      return;
    }
  }
  if constexpr (S::kWidens) {
    if (warp < S::kKvWarps) {
      if (warp == 0) {
        Sm90PreparedLoader<S, true>(p, smem, warp).run(S::kSlotArrivals);
      } else {
        Sm90PreparedLoader<S, false>(p, smem, warp).run(S::kSlotArrivals);
      }
      Sm90Prepared<S>::leave_if_used(p);
      return;
    }
  }
  if (warp < S::kKvWarps) {
    Sm90KvLoader<S, S::kSlots>(p, smem, warp).load_steps(queue_word);
  } else if (warp >= 2) {
    Sm90QueryLoader<S>(p, smem, warp).run(queue_word);
  }
}

}  // namespace flashplan::device
