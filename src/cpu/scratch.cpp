// SPDX-License-Identifier: Apache-2.0
#include "cpu/scratch.h"

namespace flashplan::cpu {

std::size_t scratch_bytes(int32_t tile_q, int32_t tile_kv, int32_t head_dim_qk, int32_t head_dim_vo,
                          bool rotates) noexcept {
  Scratch unused;
  return partition(&unused, nullptr, tile_q, tile_kv, head_dim_qk, head_dim_vo, rotates);
}

}  // namespace flashplan::cpu
