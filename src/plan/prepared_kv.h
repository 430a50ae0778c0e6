// SPDX-License-Identifier: Apache-2.0
// Decides which keys and values are prepared: rotated or widened if the plan needs it, and written
// once to the workspace, in the layout that they have in shared memory. Keys that are not prepared
// are rotated, widened or gathered by each row tile that reads them.
#pragma once

#include <cstdint>
#include <span>

#include "abi/prepared_kv.h"
#include "abi/work_queue.h"
#include "flashplan/plan.h"

namespace flashplan {

struct Kernel;
struct ScheduleShape;

/// Memory for the choice of prepared keys, which is copied to the device with the schedule. Null if
/// no kernel of the plan takes prepared keys.
struct PreparedTiles {
  int32_t* first_tiles = nullptr;  // [segments]
  int32_t* num_tiles = nullptr;    // [1]
};

/// The number of prepared tiles that the workspace of a plan should have room for; 0 if its kernel
/// takes none.
int32_t most_prepared_tiles(const AttentionOptions& options, const Kernel& kernel) noexcept;

/// Decides for which requests of `batch` the keys are prepared. Writes to `tiles` the first
/// prepared tile of each segment, or kNotPrepared, and the number of prepared tiles, which is at
/// most `max_tiles`. Preparing the keys of a request pays if at least ScheduleShape::prepare_reads
/// row tiles read each of them. With ScheduleShape::prepares_some this is decided for each request.
/// Without it, either all requests of a batch are prepared or none, so that the warps that load
/// keys do this in one way only; the average number of reads of a key of the batch decides. In this
/// average a request counts for at most 3/2 of prepare_reads (PrepareTuning): many reads of a long
/// request do not make up for a short one, whose few steps do not hide the time that preparing
/// takes. `segments`: the segments of the schedule. Returns the number of prepared tiles.
int32_t choose_prepared_kv(const Batch& batch, const ScheduleShape& shape,
                           std::span<const Segment> segments, int32_t max_tiles,
                           const PreparedTiles& tiles) noexcept;

}  // namespace flashplan
