// SPDX-License-Identifier: Apache-2.0
// Which keys and values are prepared: written to the workspace by a kernel of its own, before the
// attention kernel runs, as that one has them in shared memory. Keys are rotated meanwhile, if the
// plan rotates. Otherwise each row tile would rotate, or gather, the same keys anew.
#pragma once

#include <cstdint>
#include <span>

#include "abi/prepared_kv.h"
#include "abi/work_queue.h"
#include "flashplan/plan.h"

namespace flashplan {

struct Kernel;
struct ScheduleShape;

/// Where the choice for a batch is written to; see PreparedKv. Null where no kernel of the plan
/// takes prepared keys.
struct PreparedTiles {
  int32_t* first_tiles = nullptr;  // [segments]
  int32_t* num_tiles = nullptr;
  int32_t* requests = nullptr;  // [max_prepared_tiles]
};

/// For how many tiles the workspace of a plan should have room; 0 if its kernel takes none.
int32_t most_prepared_tiles(const AttentionOptions& options, const Kernel& kernel) noexcept;

/// Chooses the requests of `batch` that are prepared, in up to `max_tiles` tiles together, and
/// writes them to `tiles`. `segments`: those of its schedule. Returns the number of tiles.
int32_t choose_prepared_kv(const Batch& batch, const ScheduleShape& shape,
                           std::span<const Segment> segments, int32_t max_tiles,
                           const PreparedTiles& tiles) noexcept;

}  // namespace flashplan
