// SPDX-License-Identifier: Apache-2.0
// Keys and values that are written to the workspace, in the layout of shared memory, before the
// attention kernel runs; see plan/prepared_kv.h.
#pragma once

#include <cstdint>

namespace flashplan {

/// Stands for the first prepared tile of a segment that has none.
constexpr int32_t kNotPrepared = -1;

/// A tile has the keys of one step, or their values, of all kv heads.
struct PreparedKv {
  unsigned char* keys = nullptr;    // [tiles, num_kv_heads, key_bytes]; null: there are none
  unsigned char* values = nullptr;  // [tiles, num_kv_heads, value_bytes]; null: keys alone
  int32_t key_bytes = 0;            // of one kv head of a tile
  int32_t value_bytes = 0;
  int32_t tile_kv = 0;  // keys of a tile
  int32_t num_kv_heads = 0;
  int32_t num_pages = 0;                 // of the cache; keys of other page ids become zeros
  const int32_t* first_tiles = nullptr;  // [segments] the tile of its first keys, or kNotPrepared
  const int32_t* num_tiles = nullptr;    // [1] in use
  const int32_t* requests = nullptr;     // [tiles] whose keys a tile has
};

}  // namespace flashplan
