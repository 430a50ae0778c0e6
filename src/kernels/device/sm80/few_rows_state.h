// SPDX-License-Identifier: Apache-2.0
// The arithmetic of one warp on a work tile of few rows: products, softmax, sums.
#pragma once

#include "kernels/device/numeric.h"
#include "kernels/device/sm80/narrow_queries.h"
#include "kernels/device/sm80/tile_context.h"

namespace flashplan::device {

/// The attention state of up to 8 query rows for each of kHeads kv heads. The 16 rows of its matrix
/// products are keys, or dims of values; the 8 columns are query rows. Each lane has two of these
/// query rows.
template <typename T, int kHeads>
class FewRowsState {
  using S = FewRowsShape<T, kHeads>;
  using Tile = typename S::Tile;
  static constexpr int kKeyTiles = S::kKeys / 16;
  static constexpr int kDimTiles = S::kDims / 16;
  static constexpr int kLoads = Tile::kChunks / 2;  // ldmatrix instructions for 16 rows of k or v
  // 8-bit keys are widened to float16, whatever the dtype of the queries is, because widening them
  // to bfloat16 takes four times as many instructions.
  static constexpr DType kProduct = S::kBytes == 1 ? DType::kFloat16 : T::kQ;
  static constexpr bool kScalesQueries = T::kQ != kProduct;
  using Logits = float[kKeyTiles][kHeads][4];

 public:
  /// The registers that ldmatrix fills with the keys, or the values, of a step.
  using Fragments = uint32_t[kHeads][kKeyTiles][kLoads][4];

  FLASHPLAN_DEVICE FewRowsState(const AttentionParams& p, const TileContext& context, int lane)
      : p_(p),
        context_(context),
        block_(context.block),
        lane_(lane),
        seen_by_all_(VisibleKeys(p, block_, 0, block_.rows.num_rows - 1).to_all) {}

  /// The first of this lane's two rows.
  FLASHPLAN_DEVICE int own_row() const { return lane_ % 4 * 2; }

  /// Loads the queries and scales of kHeads kv heads from `first` on.
  FLASHPLAN_DEVICE void load_queries(int32_t first) {
    const int row = min(lane_ / 4, block_.rows.num_rows - 1);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      constexpr int kOwnBytes = S::kBytes == 2 || T::kWidensQueries ? 4 : 8;
      const unsigned char* from =
          query_row<T::kQuery>(p_, block_.rows, first + h, row) + lane_ % 4 * kOwnBytes;
      if (__builtin_expect(static_cast<long>(p_.tensors.vectorized), 1L) != 0) {
        load_query<true>(h, from);
      } else {
        load_query<false>(h, from);
      }
      k_scales_[h] = p_.variant.k_scales.of(first + h);
      query_scales_[h][0] = query_scales_[h][1] =
          T::kWidensQueries ? p_.q_scales.of(first + h) : 1.0F;
    }
    is_scaled_ = false;
  }

  /// Resets the state to the state of a row that has seen no key.
  FLASHPLAN_DEVICE void reset() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      shift_[h][0] = shift_[h][1] = kNoShift;
      sum_[h][0] = sum_[h][1] = 0.0F;
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
        for (float& x : o_[h][d]) x = 0.0F;
      }
    }
  }

  /// Loads the keys of a step.
  FLASHPLAN_DEVICE void load_keys(Fragments& keys, uint32_t stage) const {
    load<false>(keys, stage + Tile::offset(lane_ % 16, lane_ / 16));
  }
  /// Adds one step of keys to the state. `keys`: what load_keys() has loaded from `stage`, which
  /// also has the step's values. `first_key`: the position of the step's first key.
  FLASHPLAN_DEVICE void attend(const Fragments& keys, uint32_t stage, int32_t first_key) {
    scale_queries();
    Logits s;
    multiply_keys(s, keys);
    Fragments values;
    load_values(values, stage);
    if constexpr (T::Variant::kTransformsLogits) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const auto variant = variant_of(h);
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
          for (float& x : s[m][h]) x = variant.logit(x, {});
        }
      }
    }
    if (first_key < seen_by_all_.begin ||
        first_key + S::kKeys > min(seen_by_all_.end, context_.load_on_pages())) {
      mask(s, first_key);
    }
    rescale(s);
    multiply_values(s, values);
  }

  /// The {shift, sum} of row `j` of this lane, over the keys of the warp. All lanes must call it.
  FLASHPLAN_DEVICE float2 softmax(int head, int j) const {
    float sum = sum_[head][j];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffU, sum, step);
    return {shift_[head][j], sum};
  }
  /// Calls f(dim, value) for each element of o that this lane holds for its row `j`, 0 or 1.
  template <typename Function>
  FLASHPLAN_DEVICE void for_each_dim(int head, int j, Function f) const {
    // With 8-bit values, rows i and i + 8 of a product are dims 2 i and 2 i + 1 of its 16 dims.
    constexpr bool kInterleaved = S::kBytes == 1;
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
      const int dim = d * 16 + lane_ / 4 * (kInterleaved ? 2 : 1);
      f(dim, o_[head][d][j]);
      f(dim + (kInterleaved ? 1 : 8), o_[head][d][2 + j]);
    }
  }

 private:
  template <bool kAligned>
  FLASHPLAN_DEVICE void load_query(int head, const unsigned char* from) {
    const auto pair_at = [](const unsigned char* at) {
      if constexpr (kAligned) {
        return load_global_4(at);
      } else {
        if constexpr (T::kWidensQueries) return at[0] | static_cast<uint32_t>(at[1]) << 8;
        const auto* elements = reinterpret_cast<const uint16_t*>(at);
        return elements[0] | static_cast<uint32_t>(elements[1]) << 16;
      }
    };
#pragma unroll
    for (int k = 0; k < kDimTiles; ++k) {
      uint32_t (&query)[2] = query_[head][k];
      if constexpr (T::kWidensQueries) {
        // This loop only loads the 8-bit elements; scale_queries() widens them later. A thread that
        // widens an element waits for its load first, so it would issue the next load only then.
        query[0] = pair_at(from + k * 16);
        if constexpr (!kAligned) query[0] |= pair_at(from + k * 16 + 2) << 16;
        query[1] = 0;  // without a value, nvcc keeps all queries in local memory
      } else if constexpr (S::kBytes == 1 && kAligned) {
        const uint2 pairs = load_global_8(from + k * 32);
        query[0] = pairs.x;
        query[1] = pairs.y;
      } else {
        query[0] = pair_at(from + k * 32);
        query[1] = pair_at(from + k * 32 + (S::kBytes == 1 ? 4 : 16));
      }
    }
  }

  /// The variant with the k_scale of head `head`, a number below kHeads.
  FLASHPLAN_DEVICE typename T::Variant variant_of(int head) const {
    typename T::Variant variant(p_);
    variant.scale_logits(k_scales_[head]);
    return variant;
  }

  /// Widens 8-bit queries, or converts bfloat16 queries to float16, before the first product of a
  /// head. In the conversion each row is multiplied by the power of two that brings its largest
  /// element to [2^14, 2^15), and multiply_keys() divides the logits by it again. So an element
  /// becomes subnormal, and loses bits, only if it is 2^28 times smaller than the largest.
  FLASHPLAN_DEVICE void scale_queries() {
    if constexpr (T::kWidensQueries) {
      if (!is_scaled_) widen_queries();
      is_scaled_ = true;
      return;
    }
    if (!kScalesQueries || is_scaled_) return;
    is_scaled_ = true;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float largest = 0.0F;
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) {
#pragma unroll
        for (uint32_t pair : query_[h][k]) {
          const float2 x = Element<T::kQ>::unpack(pair);
          largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));  // ignores NaN
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 2));
      // The biased exponent of `largest` in float32, clamped so that both powers of two below are
      // normal numbers.
      const int exponent = min(max(__float_as_int(largest) >> 23, 15), 254);
      const float factor = __int_as_float((268 - exponent) << 23);  // 2^14 / 2^(exponent - 127)
      const float inverse = __int_as_float((exponent - 14) << 23);
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) {
#pragma unroll
        for (uint32_t& pair : query_[h][k]) {
          const float2 x = Element<T::kQ>::unpack(pair);
          pair = Element<kProduct>::pack(x.x * factor, x.y * factor);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        query_scales_[h][j] = __shfl_sync(0xffffffffU, inverse, (own_row() + j) * 4);
      }
    }
  }

  FLASHPLAN_DEVICE void widen_queries() {
    if constexpr (T::kWidensQueries) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        // This waits for the scales. In load_queries() the wait would delay the first keys.
        k_scales_[h] *= query_scales_[h][0];
#pragma unroll
        for (uint32_t (&query)[2] : query_[h]) {
          const uint2 pairs = Element<T::kQuery>::widen(query[0]);
          query[0] = pairs.x;
          query[1] = pairs.y;
        }
      }
    }
  }

  FLASHPLAN_DEVICE void load_values(Fragments& values, uint32_t stage) const {
    load<true>(values, stage + kHeads * S::kTileBytes +
                           Tile::offset(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2));
  }
  template <bool kTransposed>
  static FLASHPLAN_DEVICE void load(Fragments& fragments, uint32_t address) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const uint32_t at =
              Tile::advance(address, 2 * i) + h * S::kTileBytes + m * 16 * Tile::kRowBytes;
          kTransposed ? ldmatrix_transposed(fragments[h][m][i], at)
                      : ldmatrix(fragments[h][m][i], at);
        }
      }
    }
  }

  /// s = k q^T
  FLASHPLAN_DEVICE void multiply_keys(Logits& s, const Fragments& fragments) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        const uint32_t (&loaded)[kLoads][4] = fragments[h][m];
        float sums[2][4] = {};  // two chains of products have half the latency of one
#pragma unroll
        for (int k = 0; k < kDimTiles; ++k) {
          uint32_t keys[4];
          if constexpr (S::kBytes == 2) {
#pragma unroll
            for (int j = 0; j < 4; ++j) keys[j] = loaded[k][j];
          } else {
            const uint2 low = Element<T::kKv>::widen(loaded[k / 2][k % 2 * 2]);
            const uint2 high = Element<T::kKv>::widen(loaded[k / 2][k % 2 * 2 + 1]);
            keys[0] = low.x;
            keys[1] = high.x;
            keys[2] = low.y;
            keys[3] = high.y;
          }
          Element<kProduct>::mma(sums[k % 2], keys, query_[h][k][0], query_[h][k][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = sums[0][i] + sums[1][i];
          s[m][h][i] = kScalesQueries ? x * query_scales_[h][i % 2] : x;
        }
      }
    }
  }

  /// Sets logits to -infinity where the causal mask, the window or the end of the tile hides the
  /// key, or where the key's page id is outside of the cache.
  FLASHPLAN_DEVICE void mask(Logits& s, int32_t first_key) const {
    uint32_t exist = ~0U;  // bit i: key i of the step
    if (context_.load_on_pages() != kAllOnPages) {
      const int32_t key = first_key + lane_ % S::kKeys;
      exist = __ballot_sync(
          ~0U, key < block_.keys.end && is_on_page(p_.tensors.pages, context_.page_ids, key));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // Rows of padding are never written, so any keys will do for them.
      const KeySpan span = block_.visible_to(p_, min(own_row() + j, block_.rows.num_rows - 1));
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int own_key = lane_ / 4 + m * 16 + half * 8;
          const int32_t key = first_key + own_key;
          const bool is_seen = key >= span.begin && key < span.end && (exist >> own_key & 1) != 0;
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            float& x = s[m][h][half * 2 + j];
            x = is_seen ? x : -infinity();
          }
        }
      }
    }
  }

  /// If a scaled logit exceeds its row's shift by more than kSlack, raises the shifts, and rescales
  /// sums and o. Smaller excesses are allowed, because weights of up to 2^kSlack do no harm.
  FLASHPLAN_DEVICE void rescale(const Logits& s) {
    float largest[kHeads][2];
    bool grows = false;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float scale = variant_of(h).exp2_scale;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float x = fmaxf(s[0][h][j], s[0][h][2 + j]);
#pragma unroll
        for (int m = 1; m < kKeyTiles; ++m) x = fmaxf(x, fmaxf(s[m][h][j], s[m][h][2 + j]));
        largest[h][j] = x;
        grows |= __fmaf_rn(x, scale, -shift_[h][j]) > kSlack;
      }
    }
    if (!__any_sync(0xffffffffU, grows)) return;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float scale = variant_of(h).exp2_scale;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float x = largest[h][j];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, step));
        }
        const float new_shift = fmaxf(shift_[h][j], x * scale);
        const float shrink = exp2_fast(shift_[h][j] - new_shift);
        shift_[h][j] = new_shift;
        sum_[h][j] *= shrink;
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
          o_[h][d][j] *= shrink;
          o_[h][d][2 + j] *= shrink;
        }
      }
    }
  }

  /// o^T += v^T weights^T
  FLASHPLAN_DEVICE void multiply_values(const Logits& s, const Fragments& fragments) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float scale = variant_of(h).exp2_scale;
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        const uint32_t (&loaded)[kLoads][4] = fragments[h][m];
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[i] = exp2_fast(__fmaf_rn(s[m][h][i], scale, -shift_[h][i % 2]));
        }
        sum_[h][0] += w[0] + w[2];
        sum_[h][1] += w[1] + w[3];
        const uint32_t low_keys = transpose(Element<T::kWeight>::pack(w[0], w[1]));
        const uint32_t high_keys = transpose(Element<T::kWeight>::pack(w[2], w[3]));
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
          uint32_t values[4];
          if constexpr (S::kBytes == 2) {
#pragma unroll
            for (int j = 0; j < 4; ++j) values[j] = loaded[d][j];
          } else {
            // The four bytes of a register are an even and an odd dim of one key, then the same
            // dims of the next key.
            const auto widen = [&](uint32_t bytes) {
              return dequantize<T::kKv, T::kWeight>(__byte_perm(bytes, 0, 0x3120));
            };
            const uint2 low = widen(loaded[d / 2][d % 2]);
            const uint2 high = widen(loaded[d / 2][2 + d % 2]);
            values[0] = low.x;
            values[1] = low.y;
            values[2] = high.x;
            values[3] = high.y;
          }
          Element<T::kWeight>::mma(o_[h][d], values, low_keys, high_keys);
        }
      }
    }
  }

  static constexpr float kNoShift = -3e38F;
  static constexpr float kSlack = 8.0F;

  const AttentionParams& p_;
  const TileContext& context_;
  const RowBlock& block_;
  const int lane_;
  const KeySpan seen_by_all_;  // the keys that all rows see
  uint32_t query_[kHeads][kDimTiles][2];
  bool is_scaled_;
  // If kScalesQueries: the factors that undo the scaling of this lane's two rows. If
  // T::kWidensQueries: the q_scale of the head, by which widen_queries() multiplies k_scales_.
  float query_scales_[kHeads][2];
  float k_scales_[kHeads];
  // The softmax of this lane's two rows: the weight of a logit is exp2(scale * logit - shift).
  float shift_[kHeads][2];
  float sum_[kHeads][2];  // sum of the weights of this lane's keys
  float o_[kHeads][kDimTiles][4];
};

}  // namespace flashplan::device
