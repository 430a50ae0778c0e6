// SPDX-License-Identifier: Apache-2.0
// The private memory of one worker, a part of the workspace. Rows are padded to kRowPadding floats,
// so that loops over vectors of any width need no remainder.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/rope_turns.h"
#include "cpu/float_formats.h"

namespace flashplan::cpu {

constexpr int32_t kRowPadding = 16;  // floats: one 64-byte line, the widest vector

FLASHPLAN_INLINE int32_t padded(int32_t head_dim) {
  return (head_dim + kRowPadding - 1) / kRowPadding * kRowPadding;
}

struct Scratch {
  float* q;         // [tile_q, padded(head_dim_qk)] scaled queries, zero in the padding
  float* kv;        // [tile_kv, padded(the larger head_dim)] one tile of keys, then of values
  float* logits;    // [tile_q, tile_kv] logits, then probabilities
  float* o;         // [tile_q, padded(head_dim_vo)] sum of probability * value, then the state's o
  float* merged_o;  // [tile_q, padded(head_dim_vo)] o of the states merged so far
  float* row_max;   // [tile_q] largest logit so far
  float* row_sum;   // [tile_q, kRowPadding] sum of probabilities, a partial sum in each lane
  float* lse;       // [tile_q] lse of the state
  float* merged_max;  // [tile_q] largest lse of the merged states
  float* merged_sum;  // [tile_q] sum of the weights of the merged states
  float* rotations;   // [tile_kv] Rotations of the keys of a tile, if the plan rotates
};

/// Divides `memory` into the arrays of a worker, and returns how many bytes they take. A null
/// `memory` is not divided: then this only counts the bytes.
FLASHPLAN_INLINE std::size_t partition(Scratch* scratch, std::byte* memory, int32_t tile_q,
                                       int32_t tile_kv, int32_t head_dim_qk, int32_t head_dim_vo,
                                       bool rotates) {
  std::size_t used = 0;
  const auto take = [&](int64_t floats) {
    float* part = memory == nullptr ? nullptr : reinterpret_cast<float*>(memory + used);
    used += static_cast<std::size_t>(floats) * sizeof(float);
    return part;
  };
  const int64_t rows = tile_q;
  const int32_t qk = padded(head_dim_qk);
  const int32_t vo = padded(head_dim_vo);
  scratch->q = take(rows * qk);
  scratch->kv = take(int64_t{tile_kv} * (qk > vo ? qk : vo));
  scratch->logits = take(rows * tile_kv);
  scratch->o = take(rows * vo);
  scratch->merged_o = take(rows * vo);
  scratch->row_max = take(rows);
  scratch->row_sum = take(rows * kRowPadding);
  scratch->lse = take(rows);
  scratch->merged_max = take(rows);
  scratch->merged_sum = take(rows);
  scratch->rotations = take(rotates ? int64_t{tile_kv} * kMaxRotaryDim : 0);
  return used;
}

/// Bytes of one worker's scratch.
std::size_t scratch_bytes(int32_t tile_q, int32_t tile_kv, int32_t head_dim_qk, int32_t head_dim_vo,
                          bool rotates) noexcept;

}  // namespace flashplan::cpu
