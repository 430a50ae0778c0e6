// SPDX-License-Identifier: Apache-2.0
// The two matrix products of attention for one warp: 16 * kMmaM query rows against kKeys keys.
//
// 8-bit keys and values are widened to 16 bits in registers. ldmatrix distributes a row over the
// lanes of a warp in units of 16 bits. A unit is one element of a 16-bit row, but two neighbouring
// elements of an 8-bit row. So a lane gets other dims of a row if the row has 8 bits, and queries
// and outputs have the order of dims that fits. In each group of 16 dims, with c = lane % 4:
//   q and k: a lane holds dims 2c, 2c+1, 2c+8 and 2c+9 with 16-bit keys, and dims 4c to 4c+3 with
//   8-bit keys.
//   o: two accumulators of 8 columns hold the 16 dims. With 8-bit values, the first accumulator
//   holds the even dims and the second one the odd dims.
#pragma once

#include "kernels/device/numeric.h"
#include "kernels/device/sm80/shared_tile.h"

namespace flashplan::device {

/// The address from which this lane loads its elements of the fragments of 16 query rows from `row`
/// on. `kQ`: the dtype of queries in shared memory; load_query_fragment() widens 8-bit queries.
/// `kOrdered`: permute_query_dims() was called for these rows.
template <DType kQ, DType kKv, int kHeadDim, bool kOrdered>
FLASHPLAN_DEVICE uint32_t query_address(uint32_t q_tile, int row, int lane) {
  using Tile = SharedTile<kHeadDim * Element<kQ>::kBytes>;
  if constexpr (Element<kQ>::kBytes == 1) {
    return q_tile + Tile::offset(row + lane / 4, 0) + lane % 4 * 4;
  } else if constexpr (Element<kKv>::kBytes == 2 || kOrdered) {
    return q_tile + Tile::offset(row + lane % 16, lane / 16);
  } else {
    return q_tile + Tile::offset(row + lane / 4, lane % 4 / 2) + lane % 2 * 8;
  }
}

/// Loads fragment `k` (16 dims) of the rows at `address`.
template <DType kQ, DType kKv, int kHeadDim, bool kOrdered>
FLASHPLAN_DEVICE void load_query_fragment(uint32_t (&a)[4], uint32_t address, int k) {
  using Tile = SharedTile<kHeadDim * Element<kQ>::kBytes>;
  const uint32_t at = Tile::advance(address, Element<kQ>::kBytes * k);
  if constexpr (Element<kQ>::kBytes == 1) {
    static_assert(Element<kKv>::kBytes == 1);  // dims are in the order of 8-bit keys
    const uint2 first = Element<kQ>::widen(load_shared_4(at));
    const uint2 second = Element<kQ>::widen(load_shared_4(at + 8 * Tile::kRowBytes));
    a[0] = first.x;
    a[1] = second.x;
    a[2] = first.y;
    a[3] = second.y;
  } else if constexpr (Element<kKv>::kBytes == 2 || kOrdered) {
    ldmatrix(a, at);
  } else {
    const uint2 first = load_shared_8(at);
    const uint2 second = load_shared_8(at + 8 * kHeadDim * Element<kQ>::kBytes);
    a[0] = first.x;
    a[1] = second.x;
    a[2] = first.y;
    a[3] = second.y;
  }
}

/// Reorders the dims of kRows query rows in shared memory, from row `first_row` on, to fit 8-bit
/// keys (see "q and k" at the beginning of this file). All lanes of one warp call it. Afterwards
/// one ldmatrix loads a query fragment into four consecutive registers, which the instruction of
/// the matrix product requires. Without the new order a fragment takes two loads of two registers
/// each, and the registers must be copied before each product.
template <DType kQ, int kHeadDim, int kRows>
FLASHPLAN_DEVICE void permute_query_dims(uint32_t q_tile, int first_row, int lane) {
  using Tile = SharedTile<kHeadDim * Element<kQ>::kBytes>;
#pragma unroll 2
  for (int i = lane; i < kRows * kHeadDim / 16; i += 32) {
    const int row = first_row + i % kRows;
    const int chunk = i / kRows * 2;
    const uint32_t first = q_tile + Tile::offset(row, chunk);
    const uint32_t second = q_tile + Tile::offset(row, chunk + 1);
    const uint4 x = load_shared_16(first);
    const uint4 y = load_shared_16(second);
    store_shared_16(first, {x.x, x.z, y.x, y.z});
    store_shared_16(second, {x.y, x.w, y.y, y.w});
  }
}

/// The first of the two dims that this lane has in register i of fragment `k`. They are dims of row
/// lane / 4 + i % 2 * 8.
template <DType kKv>
FLASHPLAN_DEVICE int query_fragment_dim(int k, int i, int lane) {
  const int c = lane % 4;
  return k * 16 + (Element<kKv>::kBytes == 2 ? i / 2 * 8 + c * 2 : c * 4 + i / 2 * 2);
}

/// Which dims the accumulators of o have. For 8-bit v, two adjacent dims are in adjacent tiles.
template <DType kKv>
struct ValueLayout {
  static constexpr bool kInterleaved = Element<kKv>::kBytes == 1;

  /// The first of this lane's dims.
  static FLASHPLAN_DEVICE int first_dim(int lane) { return lane % 4 * (kInterleaved ? 4 : 2); }

  /// Calls f(d, x, y) for this lane's pairs of dims below `num_dims`, a multiple of 16: x and y are
  /// dims first_dim() + d and first_dim() + d + 1 of row lane / 4 + half * 8.
  template <int kTiles, typename Function>
  static FLASHPLAN_DEVICE void for_each_pair(const float (&o)[kTiles][4], int half, int num_dims,
                                             Function f) {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      if (n * 8 >= num_dims) return;
      const float (&first)[4] = o[n];
      const float (&second)[4] = o[n + 1];
      if constexpr (kInterleaved) {
        f(n * 8, first[2 * half], second[2 * half]);
        f(n * 8 + 2, first[2 * half + 1], second[2 * half + 1]);
      } else {
        f(n * 8, first[2 * half], first[2 * half + 1]);
        f(n * 8 + 8, second[2 * half], second[2 * half + 1]);
      }
    }
  }
};

/// s += q k^T for the kKeys keys of a tile from `first_key` on. `query_fragment(a, m, k)` must load
/// into `a` 16 of the warp's query rows, from row 16 * m on, and of these rows 16 dims, from dim
/// 16 * k on. The loop computes products with 16 keys at a time, and loads keys two iterations
/// before it uses them: each scheduler has only two warps, too few to hide the latency of shared
/// memory by switching between them. gemm_qk() calls `meanwhile()` once, after it has issued the
/// first loads. `transform(pair, key, dim)` receives elements dim and dim + 1 of key number `key`
/// of the tile in `pair`, and returns the elements that the product takes instead.
template <DType kQ, DType kKv, int kHeadDim, int kMmaM, int kKeys, typename QueryFragment,
          typename Meanwhile, typename Transform>
FLASHPLAN_DEVICE void gemm_qk(float (&s)[kMmaM][kKeys / 8][4], uint32_t k_tile, int first_key,
                              int lane, QueryFragment query_fragment, Meanwhile meanwhile,
                              Transform transform) {
  constexpr int kBytes = Element<kKv>::kBytes;
  constexpr int kStepsPerPair = 2 / kBytes;  // k-steps of 16 dims in two chunks of a key's row
  using Tile = SharedTile<kHeadDim * kBytes>;
  constexpr int kPairs = Tile::kChunks / 2;
  constexpr int kGroups = kKeys / 16;
  const uint32_t address =
      k_tile + Tile::offset(first_key + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  uint32_t a[2][kStepsPerPair][kMmaM][4];
  uint32_t b[3][4];
  const auto load_a = [&](int pair) {
#pragma unroll
    for (int k = 0; k < kStepsPerPair; ++k) {
#pragma unroll
      for (int m = 0; m < kMmaM; ++m)
        query_fragment(a[pair % 2][k][m], m, pair * kStepsPerPair + k);
    }
  };
  const auto load_b = [&](int i) {
    ldmatrix(b[i % 3],
             Tile::advance(address, i / kGroups * 2) + i % kGroups * 16 * Tile::kRowBytes);
  };
  load_a(0);
  load_b(0);
  if (kPairs * kGroups > 1) load_b(1);
  meanwhile();
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int i = pair * kGroups + group;
      const int n = group * 2;
      if (i + 2 < kPairs * kGroups) load_b(i + 2);
      if (group == (kGroups > 1 ? kGroups - 2 : 0) && pair + 1 < kPairs) load_a(pair + 1);
      const auto& queries = a[pair % 2];
      const int key = first_key + group * 16 + lane / 4;
      if constexpr (kBytes == 2) {
        uint32_t keys[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          keys[j] = transform(b[i % 3][j], key + j / 2 * 8, pair * 16 + j % 2 * 8 + lane % 4 * 2);
        }
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) {
          Element<kQ>::mma(s[m][n], queries[0][m], keys[0], keys[1]);
          Element<kQ>::mma(s[m][n + 1], queries[0][m], keys[2], keys[3]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int dim = (2 * pair + j % 2) * 16 + lane % 4 * 4;
          uint2 dims = dequantize<kKv, kQ>(b[i % 3][j]);
          dims = {transform(dims.x, key + j / 2 * 8, dim),
                  transform(dims.y, key + j / 2 * 8, dim + 2)};
#pragma unroll
          for (int m = 0; m < kMmaM; ++m) {
            Element<kQ>::mma(s[m][n + j / 2], queries[j % 2][m], dims.x, dims.y);
          }
        }
      }
    }
  }
}

/// Packs two tiles of 8 keys into the fragment of weights of 16 rows and 16 keys.
template <DType kWeight>
FLASHPLAN_DEVICE void pack_weights(uint32_t (&a)[4], const float (&first)[4],
                                   const float (&second)[4]) {
  a[0] = Element<kWeight>::pack(first[0], first[1]);
  a[1] = Element<kWeight>::pack(first[2], first[3]);
  a[2] = Element<kWeight>::pack(second[0], second[1]);
  a[3] = Element<kWeight>::pack(second[2], second[3]);
}

/// o += weights * v for the kKeys keys of a tile from `first_key` on, and dims from `first_dim` on.
/// `weight_fragment(a, m, step)` must load into `a` the weights of 16 of the warp's query rows,
/// from row 16 * m on, for 16 of the kKeys keys, from key 16 * step on. `transform(pair, key, dim)`
/// receives element `dim` of keys number `key` and key + 1 of the tile in `pair`, and returns the
/// elements that the product takes instead.
template <DType kWeight, DType kKv, int kHeadDim, int kKeys, int kMmaM, int kDimTiles,
          typename WeightFragment, typename Transform>
FLASHPLAN_DEVICE void gemm_pv(float (&o)[kMmaM][kDimTiles][4], uint32_t v_tile, int first_dim,
                              int first_key, int lane, WeightFragment weight_fragment,
                              Transform transform) {
  constexpr int kBytes = Element<kKv>::kBytes;
  using Tile = SharedTile<kHeadDim * kBytes>;
  constexpr int kPairs = kDimTiles * kBytes / 4;
  constexpr int kSteps = kKeys / 16;
  // Adding first_dim to an address must not change the permutation of chunks.
  static_assert(kDimTiles * 8 == kHeadDim || kDimTiles * 8 * kBytes % 128 == 0);
  const uint32_t address =
      v_tile + Tile::offset(first_key + lane % 16, lane / 16) + first_dim * kBytes;
  uint32_t b[3][4];
  const auto load_b = [&](int i) {
    ldmatrix_transposed(b[i % 3],
                        Tile::advance(address, i % kPairs * 2) + i / kPairs * 16 * Tile::kRowBytes);
  };
  load_b(0);
  load_b(1);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[kMmaM][4];
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) weight_fragment(a[m], m, step);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int i = step * kPairs + pair;
      if (i + 2 < kSteps * kPairs) load_b(i + 2);
      const int key = first_key + step * 16 + lane % 4 * 2;
      if constexpr (kBytes == 2) {
        uint32_t values[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          values[j] =
              transform(b[i % 3][j], key + j % 2 * 8, first_dim + pair * 16 + j / 2 * 8 + lane / 4);
        }
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) {
          Element<kWeight>::mma(o[m][2 * pair], a[m], values[0], values[1]);
          Element<kWeight>::mma(o[m][2 * pair + 1], a[m], values[2], values[3]);
        }
      } else {
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          // A register has an even and an odd dim of one key, then the same dims of the next key.
          const uint32_t (&bytes)[4] = b[i % 3];
          const int dim = first_dim + (2 * pair + chunk) * 16 + lane / 4 * 2;
          uint2 low = dequantize<kKv, kWeight>(__byte_perm(bytes[2 * chunk], 0, 0x3120));
          uint2 high = dequantize<kKv, kWeight>(__byte_perm(bytes[2 * chunk + 1], 0, 0x3120));
          low = {transform(low.x, key, dim), transform(low.y, key, dim + 1)};
          high = {transform(high.x, key + 8, dim), transform(high.y, key + 8, dim + 1)};
          const int n = 4 * pair + 2 * chunk;
#pragma unroll
          for (int m = 0; m < kMmaM; ++m) {
            Element<kWeight>::mma(o[m][n], a[m], low.x, high.x);
            Element<kWeight>::mma(o[m][n + 1], a[m], low.y, high.y);
          }
        }
      }
    }
  }
}

}  // namespace flashplan::device
