// SPDX-License-Identifier: Apache-2.0
#include "plan/kernel/tuning.h"

#include <algorithm>

namespace flashplan {

KernelTuning cpu_tuning() noexcept {
  // The unit of cost is what one query row adds to a step of keys. Loading and converting the keys
  // of a step costs as much as about eight rows.
  return {.cost = {.tile = 8, .tile_row = 1, .step = 8, .step_row = 1, .split = 16, .write = 16},
          .chunk_kv = 1024};
}

KernelTuning sm80_tuning(int32_t tile_kv) noexcept {
  // The unit of cost is what one query row adds to a step of 64 keys, about 10 ns. The unit of a
  // shorter step is smaller, so costs that do not depend on the step are multiplied by `shorter`.
  // - tile, step, split: starting a tile costs 300, loading the keys of a step 200, and writing and
  //   merging a partial result 400.
  // - merge: merging a decode of four rows with its prefixes takes 2.6 us, mostly memory latency.
  // - cached: a step of decodes takes 2.1 us if its keys come from memory, and 1.0 us if they come
  //   from L2, because other decodes read them too.
  // - chunk_kv: writing and reading the state of 128 rows takes as long as reading 128 keys, which
  //   is 3 % of a chunk.
  // - few_rows_chunk_kv: one decode of 8192 keys and 8 kv heads needs about 128 chunks to keep the
  //   memory of an H200 busy; the end of a chunk of few rows takes 0.9 us (docs/tuning/planner.md).
  const int32_t shorter = std::max(64 / tile_kv, 1);
  return {.cost = {.tile = 300 * shorter,
                   .tile_row = 0,
                   .step = 200,
                   .step_row = 1,
                   .split = 400 * shorter,
                   .split_row = 12 * shorter,
                   .write = 130 * shorter,
                   .write_row = 4 * shorter,
                   .merge = 100 * shorter,
                   .merge_row = 40 * shorter,
                   .cached = 110,
                   .share = 1300 * shorter,
                   .share_row = 20 * shorter,
                   .error_part = 12},
          .item_steps = 32 * shorter,
          .chunk_kv = 4096,
          .few_rows_chunk_kv = 512};
}

KernelTuning sm90_tuning(int32_t tile_kv, bool gathers, bool widens) noexcept {
  // The unit of cost is a clock.
  // - step, tile: a tile of 128 rows takes 2500 for a step of 128 keys, whether or not all of its
  //   rows are in use, and 3200 for its start and end.
  // - split: a partial result takes 3000, and 40 for each of its rows.
  // - gathers: kernels that gather rows take 3100 for a step, and 4700 for start and end. The
  //   planner uses 2500 and 3200 for them, too: with 3100 and 4700 some batches ran slower and none
  //   ran faster (docs/tuning/planner.md).
  // - is_wide: kernels for 256 dims have steps of 80 keys, and shared memory for the queries of
  //   only one tile. So the next tile's queries are loaded when a tile has ended, and start and end
  //   take as long as three steps.
  // - merge, share: at the end of a queue, eight warps merge its requests with their prefixes. The
  //   costs of this and of sharing were fitted to the times of trees of prefixes.
  // - cached: a step of decodes takes 700 less if its keys come from L2, because other decodes read
  //   them too.
  const bool is_wide = tile_kv < 96;
  const int32_t reads_of_copy = gathers ? 8 : 4;
  return {.cost = {.tile = is_wide ? 5000 : 3200,
                   .tile_row = 0,
                   .step = 2500 * tile_kv / 128,
                   .step_row = 0,
                   .split = 3000,
                   .split_row = 40,
                   .write = 1000,
                   .write_row = 13,
                   .merge = 200,
                   .merge_row = 160,
                   .cached = 700 * tile_kv / 128,
                   .share = 2000,
                   .share_row = 100,
                   .error_part = 6},
          .item_steps = (gathers ? 10 : 8) * 128 / tile_kv,
          .uncut_part = 16,
          .prepare_reads = widens ? 2 : reads_of_copy,
          .chunk_kv = 0};
}

KernelTuning sm90_mla_tuning() noexcept {
  // The unit of cost is a clock. The costs are computed, not measured. A step is 64 keys. Each key
  // takes the tensor cores 34 clocks; the rest of the cost is waits that overlap only in part. The
  // queries of a tile (72 KB) are loaded only when the tile before has ended, which takes as long
  // as two steps. A partial result of 64 rows is 128 KB, written and read at 32 bytes per clock.
  // - state: measured, with pieces of 1 to 24 steps (docs/tuning/sm90-mla.md).
  return {.cost = {.tile = 5000,
                   .tile_row = 0,
                   .step = 2700,
                   .step_row = 0,
                   .split = 3000,
                   .split_row = 80,
                   .write = 1000,
                   .write_row = 64,
                   .merge = 200,
                   .merge_row = 160,
                   .cached = 0,
                   .share = 2000,
                   .share_row = 100,
                   .state = 70,
                   .state_row = 2,
                   .error_part = 6},
          .item_steps = 16,
          .uncut_part = 16,
          .chunk_kv = 2048};
}

KernelTuning sm90_mla_pairs_tuning() noexcept {
  // The two CTAs of a pair work at the same time, each on half of the rows of a tile. Each takes as
  // long for its half as a CTA of sm90_mla takes for a whole tile, so a row costs half as much.
  KernelTuning tuning = sm90_mla_tuning();
  tuning.cost.split_row /= 2;
  tuning.cost.write_row /= 2;
  tuning.cost.merge_row /= 2;
  tuning.cost.share_row /= 2;
  tuning.cost.state_row /= 2;
  return tuning;
}

KernelTuning sm90_wide_tuning() noexcept {
  // The unit of cost is a clock. The costs are computed, not measured. A step of 64 keys keeps the
  // tensor cores busy for 2048 clocks and shared memory for 2600. Tensor cores and shared memory
  // also wait for one another, so a step takes 3500 (docs/tuning/sm90-wide.md). Other costs are
  // those of sm90_mla.
  KernelTuning tuning = sm90_mla_tuning();
  tuning.cost.step = 3500;
  tuning.cost.state = tuning.cost.state_row = 0;  // not measured
  tuning.chunk_kv = 0;
  return tuning;
}

}  // namespace flashplan
