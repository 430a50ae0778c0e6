// SPDX-License-Identifier: Apache-2.0
// Online softmax of a consumer warpgroup of the sm90 family (Milakov and Gimelshein;
// FlashAttention).
#pragma once

#include "kernels/device/sm90/shared_memory.h"

namespace flashplan::device {

/// The logits of 64 rows and kTileKv keys in the layout of wgmma, and the softmax state of the
/// rows. Weights are exp2(scale * logit - shift).
template <typename S>
struct Sm90Softmax {
  static constexpr int kKeyTiles = S::kTileKv / 8;
  static_assert(kKeyTiles <= 16);  // a word has a bit for each of a thread's columns in a row
  // The shift before the first key. It is finite, so that masked logits of -inf give no NaN.
  static constexpr float kNoShift = -3e38F;
  // If a thread's weights of one step add up to more than kMost, the shifts are raised. Weights of
  // up to kMost are as precise as weights of up to 1, in float32 sums and in 16-bit products.
  static constexpr float kMost = 1024.0F;

  /// What the rows of a warpgroup see of a work tile.
  struct Visible {
    int32_t begin;  // every row sees [begin, end)
    int32_t end;
    bool off_pages;      // page ids of some keys may be outside of the cache; see find_pages()
    int32_t own_end[2];  // the end of the keys that each of this thread's two rows sees
    float most[2];       // kMost, or infinity for a row of padding
    bool has_rows;       // whether some row of this warp is not padding
    // One bit for each of this thread's columns, 0 where a list of keys (topk) names no key of the
    // cache.
    uint32_t found = 0xffffffffU;

    Visible() = default;
    /// `first_row`: the first row of the warpgroup in the tile.
    FLASHPLAN_DEVICE Visible(const AttentionParams& p, const Sm90Context& context, int first_row,
                             int thread) {
      const RowBlock block = context.block();
      const int last = block.rows.num_rows - 1;
      begin = block.visible_to(p, min(first_row + 63, last)).begin;
      end = min(block.visible_to(p, min(first_row, last)).end, context.first_masked_key);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = S::row(first_row, opaque(thread), half);
        own_end[half] = block.visible_to(p, min(row, last)).end;
        // The weights of a row of padding are never too large: its query may be that of another
        // request, and results of this request must not depend on it.
        most[half] = row <= last ? kMost : infinity();
      }
      has_rows = __any_sync(0xffffffffU, S::row(first_row, opaque(thread), 0) <= last);
    }

    /// Sets off_pages, once the keys of a step have come.
    FLASHPLAN_DEVICE void find_pages(const Sm90Smem<S>& smem) {
      off_pages = load_shared_4(smem.on_pages()) != kAllOnPages;
    }
    /// Whether some rows do not see some of the keys of the step that begins at `key`, even if all
    /// page ids are inside of the cache.
    FLASHPLAN_DEVICE bool cuts(int32_t key) const { return begin > key || end < key + S::kTileKv; }
    /// Whether some rows may not see some of the keys of the step that begins at `key`. It is also
    /// true where only a later step has a page id outside of the cache, because the producer looks
    /// ahead.
    FLASHPLAN_DEVICE bool may_hide(int32_t key) const {
      return off_pages || found != 0xffffffffU || cuts(key);
    }
  };

  float logits[S::kTileKv / 2] = {};
  float shift[2] = {};  // shifts of this thread's two rows
  float sum[2] = {};    // sums of the weights in this thread's columns

  /// Begins the softmax of a head of a work tile.
  FLASHPLAN_DEVICE void begin(const AttentionParams&, const Sm90Context&, int32_t, int, int) {
    reset();
  }
  FLASHPLAN_DEVICE void reset() {
    shift[0] = shift[1] = kNoShift;
    sum[0] = sum[1] = 0.0F;
  }

  /// Turns the logits of the keys from `key` on into weights and adds them up. It tries the shifts
  /// of the earlier steps first, which saves the search for the largest logit and is nearly always
  /// enough. If weights come out too large, `multiply_again` computes the logits of this warp once
  /// more, and the shifts are raised to the largest logit. Returns whether they were raised: the
  /// caller then multiplies o by `shrink`. `is_first`: there are no shifts yet.
  template <typename Variant, typename Again>
  FLASHPLAN_DEVICE bool weigh_step(const AttentionParams& p, const Variant& variant,
                                   const Sm90Context& context, const Visible& visible,
                                   int first_row, int thread, int32_t key, bool is_first,
                                   float (&shrink)[2], Again multiply_again) {
    bool raised = is_first;
    float added[2];
    transform(variant);
#pragma unroll 1
    for (;;) {
      if (visible.may_hide(key)) {
        asm volatile("");  // keeps this a branch instead of selects in every step
        mask(p, context, visible, first_row, thread, key);
      }
      if (raised) raise(variant.exp2_scale, shrink);
      weigh(variant.exp2_scale, added);
      if (raised || !too_large(added, visible)) break;
      multiply_again();
      transform(variant);
      raised = true;
    }
    sum[0] += added[0];
    sum[1] += added[1];
    return raised;
  }

 protected:
  static FLASHPLAN_DEVICE bool too_large(const float (&added)[2], const Visible& visible) {
    return __any_sync(0xffffffffU, added[0] > visible.most[0] || added[1] > visible.most[1]);
  }

  template <typename Variant>
  FLASHPLAN_DEVICE void transform(const Variant& variant) {
    if constexpr (Variant::kTransformsLogits) {
#pragma unroll
      for (int i = 0; i < S::kTileKv / 2; ++i)
        logits[i] = variant.logit(logits[i], LogitPosition());
    }
  }

  /// One bit for each of this thread's columns in a row, set where the key of the column is before
  /// `end`, a number of keys counted from the key of the thread's first column.
  static FLASHPLAN_DEVICE uint32_t columns_before(int32_t end) {
    end = max(0, min(end, S::kTileKv));
    const int count = end / 8 * 2 + min(end % 8, 2);
    return count == 32 ? 0xffffffffU : (1U << count) - 1;
  }

  /// One bit for each of this thread's columns, set where the caller's mask shows the column to a
  /// token. The first key of the step is number `first`, counted from the first key that the mask
  /// covers. The four threads of a row share the loads: each reads the bits of 32 keys.
  static FLASHPLAN_DEVICE uint32_t columns_of_mask(const MaskBits& mask, int64_t token,
                                                   int32_t first, int thread) {
    const int lane = opaque(thread) % 4;
    const uint32_t word = mask.seen(token, first + lane * 32);
    uint32_t columns = 0;
#pragma unroll
    for (int i = 0; i * 4 < kKeyTiles; ++i) {
      // Of each 8 keys, two are columns of this thread; the shifts bring the pairs together.
      const uint32_t pairs = __shfl_sync(0xffffffffU, word, i, 4) >> lane * 2 & 0x03030303U;
      columns |= ((pairs | pairs >> 6 | pairs >> 12 | pairs >> 18) & 0xffU) << (i * 8);
    }
    return columns;
  }

  /// One bit for each of a thread's columns, set where the page id of the key is inside of the
  /// cache. `first`: the key of the first column.
  static FLASHPLAN_DEVICE uint32_t existing_columns(const AttentionParams& p,
                                                    const Sm90Context& context, int32_t first) {
    return columns_on_pages(p.tensors.pages, page_ids(p.tensors.pages, context.segment.kv_row),
                            first, context.tile.kv_end, 2 * kKeyTiles);
  }

  FLASHPLAN_DEVICE void mask(const AttentionParams& p, const Sm90Context& context,
                             const Visible& visible, int first_row, int thread, int32_t key) {
    const int32_t first = key + opaque(thread) % 4 * 2;  // this thread's first column
    uint32_t seen[2] = {columns_before(visible.own_end[0] - first) & visible.found,
                        columns_before(visible.own_end[1] - first) & visible.found};
    constexpr bool kHasBits = S::Variant::kHasMaskBits;
    if (__builtin_expect(static_cast<long>(visible.off_pages), 0L) != 0) {
      const uint32_t exist = existing_columns(p, context, first);
      seen[0] &= exist;
      seen[1] &= exist;
    }
    if (visible.begin > key || (kHasBits && p.tensors.mask.is_given)) {
      asm volatile("");
      const RowBlock block = context.block();
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        // Results of padding rows are never written, so padding may see the keys of the last row.
        const int row = min(S::row(first_row, opaque(thread), half), block.rows.num_rows - 1);
        uint32_t columns = ~columns_before(block.visible_to(p, row).begin - first);
        if (kHasBits && p.tensors.mask.is_given) {
          columns &= columns_of_mask(p.tensors.mask, block.rows.token(row, p.schedule.group_size),
                                     key - context.first_masked_key, thread);
        }
        seen[0] &= half == 0 ? columns : ~0U;
        seen[1] &= half == 1 ? columns : ~0U;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2 * kKeyTiles; ++i) {
        float& x = logits[i / 2 * 4 + 2 * half + i % 2];
        x = seen[half] & 1U << i ? x : -infinity();
      }
    }
  }

  /// Raises the shifts to the largest logits.
  FLASHPLAN_DEVICE void raise(float scale, float (&shrink)[2]) {
    float largest[2];
    find_largest(largest);
    raise_to(largest, scale, shrink);
  }
  /// The largest of this thread's logits in each of its rows.
  FLASHPLAN_DEVICE void find_largest(float (&largest)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float chains[4];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        const float pair = fmaxf(logits[4 * n + 2 * half], logits[4 * n + 2 * half + 1]);
        chains[n % 4] = n < 4 ? pair : fmaxf(chains[n % 4], pair);
      }
      largest[half] = fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3]));
    }
  }
  /// Raises the shifts to the largest of the logits that the four threads of a row have found.
  FLASHPLAN_DEVICE void raise_to(const float (&largest)[2], float scale, float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = largest[half];
      x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
      const float raised = fmaxf(shift[half], x * scale);
      shrink[half] = exp2_fast(shift[half] - raised);
      shift[half] = raised;
      sum[half] *= shrink[half];
    }
  }

  FLASHPLAN_DEVICE void weigh(float scale, float (&added)[2]) {
    float chains[2][2] = {};
#pragma unroll
    for (int i = 0; i < S::kTileKv / 2; ++i) {
      float& x = logits[i];
      x = exp2_fast(__fmaf_rn(x, scale, -shift[i / 2 % 2]));
      chains[i / 2 % 2][i % 2] += x;
    }
    added[0] = chains[0][0] + chains[0][1];
    added[1] = chains[1][0] + chains[1][1];
  }
};

}  // namespace flashplan::device
