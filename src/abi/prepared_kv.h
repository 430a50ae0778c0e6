// SPDX-License-Identifier: Apache-2.0
// Keys and values that the attention kernel writes to the workspace, so that it can copy them to
// shared memory as they are. plan/prepared_kv.h says when.
#pragma once

#include <cstdint>

namespace flashplan {

/// Stands for the first prepared tile of a segment that has none.
constexpr int32_t kNotPrepared = -1;

/// Added to the number of parts for each part that has keys on no page of the cache.
constexpr int32_t kPartOffPages = 1 << 16;

/// Counters for a tile of one kv head. A tile is prepared in parts, each with the same number of
/// rows.
///
///   1. All counters are 0 between runs. The last of all warps that prepare or read tiles sets them
///      to 0 when it leaves; PreparedKv::num_left counts these warps.
///   2. A part belongs to the one warp that has claimed it. Parts are claimed in the order of the
///      keys, by adding 1 to `claimed`. A claim beyond the last part is of no part.
///   3. Whoever has claimed a part writes it without waiting for any other warp, and then adds 1 to
///      `keys` or `values`. So a part that is claimed will be ready.
///   4. Nobody reads a tile before all of its parts are counted. For one work tile after the other,
///      the warps of a CTA that prepare claim parts until all that it reads are claimed, before
///      they wait for anything that follows from its keys. So a tile that is waited for will be
///      ready.
///   5. Only warps that prepare write the tiles, `claimed`, `keys` and `values`.
struct alignas(16) PreparedState {
  // In the state of a segment's first tile: how many parts of all its tiles, from the first key on,
  // a warp prepares or has prepared. May exceed their number.
  int32_t claimed;
  int32_t keys;  // parts of the keys that are ready, and kPartOffPages for each with missing keys
  int32_t values;
  int32_t unused;
};

/// A tile has the keys of one step for all kv heads. Where values are prepared, too, it has a twin
/// with the values of these keys.
struct PreparedKv {
  unsigned char* keys = nullptr;    // [tiles, num_kv_heads, KernelGeometry::prepared_key_bytes]
  unsigned char* values = nullptr;  // the same for values; null: keys alone
  const int32_t* first_tiles = nullptr;  // [segments] the tile of its first keys, or kNotPrepared
  const int32_t* num_tiles = nullptr;    // [1] in use
  PreparedState* states = nullptr;       // [tiles, num_kv_heads]; null: nothing is prepared
  int32_t* num_left = nullptr;           // [1] warps that need no states any more; 0 between runs
  int32_t num_kv_heads = 0;
};

}  // namespace flashplan
