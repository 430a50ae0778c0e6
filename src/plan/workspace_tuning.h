// SPDX-License-Identifier: Apache-2.0
// Numbers that determine how large a workspace plans ask for.
#pragma once

#include <cstdint>

namespace flashplan {

struct WorkspaceTuning {
  // Slots for partial results: each queue ends in at most one cut, and a cut makes two partial
  // results (Appendix D.3 of FlashInfer's paper).
  int32_t slots_per_queue = 2;
  // The partial rows that each row of a request that shares prefixes may have: one for the
  // request's own keys, and one for each of three prefixes. All requests together have room for
  // most_state_rows. If they read more prefixes, the planner shares fewer and cuts fewer tiles.
  int64_t states_of_row = 4;
  int64_t most_state_rows = 1 << 20;
  // Batch-invariant plans may write a state for each chunk of keys. Each queue has slots for the
  // chunks of chunked_keys_per_queue keys of one head. Requests of few rows have smaller chunks,
  // several of which lie in one slot.
  int32_t chunked_keys_per_queue = 16384;

  // The room for prepared keys and values is the larger one of two sizes: the bytes of
  // prepared_keys_per_query keys for each query of the plan, at most enough_prepared_bytes, and the
  // bytes of one key for each query, at most most_prepared_bytes.
  int64_t prepared_keys_per_query = 16;
  int64_t enough_prepared_bytes = int64_t{128} << 20;
  int64_t most_prepared_bytes = int64_t{512} << 20;
  // Where preparing widens 8-bit keys and values to 16 bits, the first of these sizes is
  // enough_widened_bytes, even if a plan has few queries. With less room, a short chunk of a long
  // prompt takes twice as long.
  int64_t enough_widened_bytes = int64_t{256} << 20;
};
inline constexpr WorkspaceTuning kWorkspaceTuning;

}  // namespace flashplan
