// SPDX-License-Identifier: Apache-2.0
// Prepared keys and values: the attention kernel writes them to the workspace in the layout that it
// needs in shared memory, so that it can then load them by plain copies. plan/prepared_kv.h decides
// when this is done.
#pragma once

#include <cstdint>

namespace flashplan {

/// The value in PreparedKv::first_tiles for a segment whose keys are not prepared.
constexpr int32_t kNotPrepared = -1;

/// A tile of keys is prepared in parts. For each part that is ready, 1 is added to
/// PreparedState::keys, and also this number if some keys of the part are on no page of the cache.
constexpr int32_t kPartOffPages = 1 << 16;

/// Counters for a tile of one kv head. A tile is prepared in parts of equally many rows.
///
///   1. All counters are 0 between runs. The last of all warps that prepare or read tiles sets them
///      to 0 when it leaves; PreparedKv::num_left counts these warps.
///   2. A part belongs to the one warp that has claimed it. Parts are claimed in the order of the
///      keys, by adding 1 to `claimed`. A claim beyond the last part claims nothing.
///   3. The warp that has claimed a part writes it without waiting for any other warp, and then
///      adds 1 to `keys` or `values`. So every claimed part becomes ready.
///   4. No warp reads a tile before all of its parts are counted. The preparing warps of a CTA go
///      through the CTA's work tiles in order. They claim parts until every part that the work
///      tile reads is claimed, and only then wait for anything that is computed from these keys.
///      So every tile that a warp waits for becomes ready.
///   5. Only warps that prepare write the tiles, `claimed`, `keys` and `values`.
struct alignas(16) PreparedState {
  // How many parts of all tiles of a segment have been claimed, in the order of the keys. Only the
  // state of the segment's first tile counts them. May exceed the number of parts.
  int32_t claimed;
  int32_t keys;    // ready parts of the keys, plus kPartOffPages for each part with keys on no page
  int32_t values;  // parts of the values that are ready
  int32_t unused;
};

/// A tile has the keys that a kernel computes in one step, for all kv heads. If values are also
/// prepared, the values of these keys are the tile of the same number in `values`.
struct PreparedKv {
  unsigned char* keys = nullptr;    // [tiles, num_kv_heads, KernelGeometry::prepared_key_bytes]
  unsigned char* values = nullptr;  // [tiles, num_kv_heads, prepared_value_bytes]; null: keys alone
  const int32_t* first_tiles = nullptr;  // [segments] first tile of each, or kNotPrepared
  const int32_t* num_tiles = nullptr;    // [1] tiles in use
  PreparedState* states = nullptr;       // [tiles, num_kv_heads]; null: nothing is prepared
  int32_t* num_left = nullptr;           // [1] warps that are done with the states; 0 between runs
  int32_t num_kv_heads = 0;
};

}  // namespace flashplan
