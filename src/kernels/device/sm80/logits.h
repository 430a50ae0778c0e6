// SPDX-License-Identifier: Apache-2.0
// The logits of a warp, and how variants and masks change them.
#pragma once

#include "kernels/device/sm80/tile_context.h"

namespace flashplan::device {

/// The logits of a warp's rows and kLogitKeys keys, in the layout of the matrix instruction.
template <typename S>
struct Logits {
  float tiles[S::kMmaM][S::kLogitKeys / 8][4];

  /// Applies the variant's bodies `logits` and `mask`. `begin`: the number in the request of the
  /// first key of the logits.
  template <typename Variant>
  FLASHPLAN_DEVICE void transform(const AttentionParams& p, const RowBlock& block,
                                  const Variant& variant, int thread, int32_t begin, int head) {
    if constexpr (Variant::kTransformsLogits || Variant::kMasksLogits) {
      const WarpPlace<S> place(opaque(thread));
      const int32_t qo_len = p.schedule.segments[block.rows.segment].qo_len;
#pragma unroll
      for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = place.row(m, half);
          LogitPosition at = block.logit_position(p, r, head, qo_len);
          const int32_t last_key = at.kv_len - 1;
#pragma unroll
          for (int n = 0; n < S::kLogitKeys / 8; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& x = tiles[m][n][2 * half + j];
              at.key = min(begin + n * 8 + place.lane % 4 * 2 + j, last_key);
              if constexpr (Variant::kTransformsLogits) x = variant.logit(x, at);
              if constexpr (Variant::kMasksLogits) x = variant.visible(at) ? x : -infinity();
            }
          }
        }
      }
    }
  }

  /// Masks the keys that the causal mask or the window hides. The first key of the logits is number
  /// `key` of the tile, whose first key is number `first_key` of the request. Without `kBegins`,
  /// every row must see the first key of the logits, so only the ends are compared.
  template <bool kBegins>
  FLASHPLAN_DEVICE void mask(const AttentionParams& p, const RowBlock& block, int thread,
                             int32_t first_key, int key) {
    const WarpPlace<S> place(opaque(thread));
#pragma unroll
    for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Rows of padding are never written, so any keys will do for them.
        const KeySpan span = block.visible_to(p, min(place.row(m, half), block.rows.num_rows - 1));
        const int own = key + place.lane % 4 * 2;
        const int32_t begin = span.begin - first_key - own;
        const int32_t end = span.end - first_key - own;
#pragma unroll
        for (int n = 0; n < S::kLogitKeys / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = tiles[m][n][2 * half + j];
            x = (!kBegins || n * 8 + j >= begin) && n * 8 + j < end ? x : -infinity();
          }
        }
      }
    }
  }

  /// Masks the keys that the caller's mask of bits hides. The first key of the logits is number
  /// `first`, counted from the first key that the mask covers.
  FLASHPLAN_DEVICE void mask_bits(const AttentionParams& p, const RowBlock& block, int thread,
                                  int32_t first) {
    const WarpPlace<S> place(opaque(thread));
#pragma unroll
    for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Rows of padding are never written, so any token will do for them.
        const int row = min(place.row(m, half), block.rows.num_rows - 1);
        const uint32_t token = block.rows.token(row, p.schedule.group_size);
#pragma unroll
        for (int begin = 0; begin < S::kLogitKeys; begin += 32) {
          const uint32_t seen = p.tensors.mask.seen(token, first + begin) >> (place.lane % 4 * 2);
#pragma unroll
          for (int n = begin / 8; n < S::kLogitKeys / 8 && n < begin / 8 + 4; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& x = tiles[m][n][2 * half + j];
              x = seen >> (n * 8 - begin + j) & 1 ? x : -infinity();
            }
          }
        }
      }
    }
  }

  /// Masks the keys whose page ids are outside of the cache. `ids`: the page ids of the request.
  /// The first key of the logits is number `first_key` of the request.
  FLASHPLAN_DEVICE void mask_pages(const AttentionParams& p, const RowBlock& block,
                                   const int32_t* ids, int thread, int32_t first_key) {
    const WarpPlace<S> place(opaque(thread));
    const int32_t own = first_key + place.lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < S::kLogitKeys / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool exists =
            is_on_page(p.tensors.pages, ids, min(own + n * 8 + j, block.keys.end - 1));
#pragma unroll
        for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = tiles[m][n][2 * half + j];
            x = exists ? x : -infinity();
          }
        }
      }
    }
  }

  /// Turns masked logits into weights of 0, for variants without softmax.
  FLASHPLAN_DEVICE void drop_masked() {
#pragma unroll
    for (auto& of_rows : tiles) {
#pragma unroll
      for (auto& tile : of_rows) {
#pragma unroll
        for (float& x : tile) x = x == -infinity() ? 0.0F : x;
      }
    }
  }
};

}  // namespace flashplan::device
