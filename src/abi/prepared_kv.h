// SPDX-License-Identifier: Apache-2.0
// Keys and values that the attention kernel writes to the workspace in the layout of shared memory,
// so that it can load them by plain copies. plan/prepared_kv.h decides when this is done.
#pragma once

#include <cstdint>

namespace flashplan {

/// The value in PreparedKv::first_tiles for a segment whose keys are not prepared.
constexpr int32_t kNotPrepared = -1;

/// Every part that is ready adds 1 to PreparedState::keys. A part adds this number too, if some of
/// its keys are on no page of the cache.
constexpr int32_t kPartOffPages = 1 << 16;

/// Counters for a tile of one kv head. A tile is prepared in parts, each with the same number of
/// rows.
///
///   1. All counters are 0 between runs. The last of all warps that prepare or read tiles sets them
///      to 0 when it leaves; PreparedKv::num_left counts these warps.
///   2. A part belongs to the one warp that has claimed it. Parts are claimed in the order of the
///      keys, by adding 1 to `claimed`. A claim beyond the last part claims nothing.
///   3. Whoever has claimed a part writes it without waiting for any other warp, and then adds 1 to
///      `keys` or `values`. So a part that is claimed will be ready.
///   4. Nobody reads a tile before all of its parts are counted. The preparing warps of a CTA go
///      through its work tiles in order. For each work tile they claim parts until every part that
///      it reads is claimed, and only then wait for anything that is computed from these keys. So
///      a tile that somebody waits for will be ready.
///   5. Only warps that prepare write the tiles, `claimed`, `keys` and `values`.
struct alignas(16) PreparedState {
  // Used in the state of a segment's first tile alone: how many parts of the segment's tiles, in
  // the order of the keys, have been claimed. May exceed the number of parts.
  int32_t claimed;
  int32_t keys;    // parts of the keys that are ready, and kPartOffPages for each with missing keys
  int32_t values;  // parts of the values that are ready
  int32_t unused;
};

/// A tile has the keys of one step for all kv heads. Where values are prepared, too, it has a twin
/// with the values of these keys.
struct PreparedKv {
  unsigned char* keys = nullptr;    // [tiles, num_kv_heads, KernelGeometry::prepared_key_bytes]
  unsigned char* values = nullptr;  // [tiles, num_kv_heads, prepared_value_bytes]; null: keys alone
  const int32_t* first_tiles = nullptr;  // [segments] tile of the first keys, or kNotPrepared
  const int32_t* num_tiles = nullptr;    // [1] tiles in use
  PreparedState* states = nullptr;       // [tiles, num_kv_heads]; null: nothing is prepared
  int32_t* num_left = nullptr;           // [1] warps that need no states any more; 0 between runs
  int32_t num_kv_heads = 0;
};

}  // namespace flashplan
