// SPDX-License-Identifier: Apache-2.0
// Tensor maps: how Hopper's copy engine finds boxes of q, k, v and o.
#pragma once

#include <cstdint>

namespace flashplan {

/// A CUtensorMap, which the driver encodes.
struct alignas(64) TensorMap {
  unsigned char bytes[128] = {};
};

/// Strides of keys or values in units of `bytes`, the largest power of two that divides all of
/// them. In these units the offset of every row is below kNoRow, so it fits into 32 bits. `bytes`
/// is 0 if the offset of some row does not fit, or some row is not aligned to 16 bytes.
struct RowUnits {
  static constexpr uint32_t kNoRow = 0xffffffffU;

  uint32_t bytes = 0;
  uint32_t page = 0;
  uint32_t token = 0;
  uint32_t head = 0;
};

/// The copy engine writes a box to shared memory in the layout that matrix instructions read: in
/// blocks of 64 dims, with zeros for dims past the last one. A tensor that no map can describe is
/// copied row by row.
struct TensorMaps {
  bool has_q = false;
  bool has_q_tokens = false;
  bool has_kv = false;
  bool has_o = false;
  bool has_all_blocks = false;  // a box of k or v has all blocks of dims (sm90_wide: 4), not one
  int32_t box_rows = 0;         // rows of a box of k or v; pages and steps consist of whole boxes
  int32_t boxes_of_step = 0;    // boxes of k in a step, one page id each; 0: no pages, or no map
  int32_t steps_of_batch = 0;   // steps whose page ids, up to 32, a warp loads at once
  int32_t num_kv_tokens = 0;    // rows of ragged k and v
  // A slab is a page of one head; page p of head h is slab p * slabs_per_page + h.
  int32_t k_slabs_per_page = 0;
  int32_t v_slabs_per_page = 0;
  RowUnits k_units;  // for kernels that copy row by row
  RowUnits v_units;
  // With shared_kv (MLA): rows of a box of q or q_tail, which are as many query heads of one token.
  int32_t q_box_rows = 0;
  TensorMap q;         // (dims, heads, tokens); a box has the rows of a tile, or q_box_rows
  TensorMap q_tokens;  // like q, but a box has one token's query heads of one kv head
  TensorMap k;         // (64 dims, 8 rows, blocks of 64 dims, groups of 8 rows, slabs)
  TensorMap v;
  TensorMap o;  // like q, but a box has 64 rows
  // With shared_kv, where values are the first dims of keys, q_tail and k_tail have the other dims
  // of queries and keys. Boxes of k then have four blocks of dims, and boxes of k_tail have one.
  TensorMap q_tail;
  // Without shared_kv, k_tail is used if the last dims of keys are in a second tensor. The maps
  // of k and k_tail then are (dims, tokens, 1, 1, heads); a box has 64 dims of the keys of one
  // step, for one head.
  TensorMap k_tail;
};

}  // namespace flashplan
