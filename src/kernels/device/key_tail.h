// SPDX-License-Identifier: Apache-2.0
// Keys in two tensors: the last dims, which all kv heads share, are in a tensor of their own.
#pragma once

#include "kernels/device/ptx.h"

namespace flashplan::device {

/// A ragged key whose dims are in two tensors. `own` is the address of its row of k, which has the
/// first dims, and `tail` that of its row of the other tensor, which has the last dims.
struct KeyParts {
  const unsigned char* own;
  const unsigned char* tail;
  int num_own;   // dims of the row in k
  int num_dims;  // dims of both rows

  /// `row`: the number of the key's row, which is the same in both tensors. `own`: the address of
  /// its row of k.
  template <int kBytes>
  static FLASHPLAN_DEVICE KeyParts of(const AttentionParams& p, const unsigned char* own,
                                      int64_t row) {
    const KeyTail& tail = p.tails.k;
    const auto* data = static_cast<const unsigned char*>(tail.view.data);
    return {own, data + row * tail.view.token_stride * kBytes,
            p.tensors.head_dim_qk - tail.num_dims, p.tensors.head_dim_qk};
  }
};

/// Copies 16 bytes of a key from dim `first` on; dims behind the last one become zeros.
/// `vectorized`: both rows are aligned to 16 bytes, and have a multiple of 16 bytes.
template <int kBytes>
FLASHPLAN_DEVICE void copy_parts_16(uint32_t to, const KeyParts& key, int first, bool vectorized) {
  if (vectorized) {
    const unsigned char* const from =
        first < key.num_own ? key.own + first * kBytes : key.tail + (first - key.num_own) * kBytes;
    const bool exists = first < key.num_dims;
    cp_async_16_padded(to, exists ? from : key.own, exists ? 16 : 0);
    return;
  }
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    const int dim = first + i;
    if (dim >= key.num_dims) continue;
    const unsigned char* const from =
        dim < key.num_own ? key.own + dim * kBytes : key.tail + (dim - key.num_own) * kBytes;
    const uint32_t element = kBytes == 1 ? *from : *reinterpret_cast<const uint16_t*>(from);
    words[i * kBytes / 4] |= element << (i * kBytes % 4 * 8);
  }
  store_shared_16(to, {words[0], words[1], words[2], words[3]});
}

}  // namespace flashplan::device
