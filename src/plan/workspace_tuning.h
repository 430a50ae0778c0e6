// SPDX-License-Identifier: Apache-2.0
// Numbers that determine how large a workspace plans ask for.
#pragma once

#include <cstdint>

namespace flashplan {

struct WorkspaceTuning {
  // Slots for partial results: each queue ends in at most one cut, and a cut makes two partial
  // results (Appendix D.3 of the paper).
  int32_t slots_per_queue = 2;
  // Partial rows for each row of a request that shares prefixes: its own, and those of three
  // prefixes. If requests read more prefixes, the planner shares fewer and cuts fewer tiles.
  int64_t states_of_row = 4;
  int64_t most_state_rows = 1 << 20;
  // Batch-invariant plans may write a state for each chunk. Each queue has slots for the chunks of
  // so many keys of a head. Smaller chunks, for requests of few rows, share slots.
  int32_t chunked_keys_per_queue = 16384;

  // Room for prepared keys and values. There is room for prepared_keys_per_query times as many keys
  // as a plan has queries, but for this not more than enough_prepared_bytes. For as many keys as
  // queries there is room up to most_prepared_bytes.
  int64_t prepared_keys_per_query = 16;
  int64_t enough_prepared_bytes = int64_t{128} << 20;
  int64_t most_prepared_bytes = int64_t{512} << 20;
  // Where preparing widens 8-bit keys and values, there is room for so many bytes of them however
  // few queries a plan has: without it, a short chunk of a long prompt takes twice as long.
  int64_t enough_widened_bytes = int64_t{256} << 20;
};
inline constexpr WorkspaceTuning kWorkspaceTuning;

}  // namespace flashplan
