// SPDX-License-Identifier: Apache-2.0
// Keys and values that are written to the workspace, in the layout of shared memory, by warps of
// the attention kernel; see plan/prepared_kv.h.
#pragma once

#include <cstdint>

namespace flashplan {

/// Stands for the first prepared tile of a segment that has none.
constexpr int32_t kNotPrepared = -1;

/// How far a tile of one kv head is prepared, in parts of a fixed number of rows. Zero between
/// runs.
struct alignas(16) PreparedState {
  int32_t claimed;  // parts that a warp prepares or has prepared; may exceed their number
  int32_t keys;     // parts of the keys that are ready
  int32_t values;
  int32_t unused;
};

/// A tile has the keys of one step, and perhaps their values, of all kv heads.
struct PreparedKv {
  unsigned char* keys = nullptr;         // [tiles, num_kv_heads, key_bytes]
  unsigned char* values = nullptr;       // [tiles, num_kv_heads, value_bytes]; null: keys alone
  const int32_t* first_tiles = nullptr;  // [segments] the tile of its first keys, or kNotPrepared
  const int32_t* num_tiles = nullptr;    // [1] in use
  PreparedState* states = nullptr;       // [tiles, num_kv_heads]; null: nothing is prepared
  int32_t* num_left = nullptr;           // [1] warps that need no states any more; 0 between runs
  int32_t num_kv_heads = 0;
  int32_t num_pages = 0;  // of the cache: page ids are moved into its range
};

}  // namespace flashplan
