// SPDX-License-Identifier: Apache-2.0
// Writes the results of a consumer warpgroup of the sm90 family from registers to memory.
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/merge.h"
#include "kernels/device/sm90/output.h"
#include "kernels/device/sm90/shared_memory.h"

namespace flashplan::device {

/// All that runs while products of the next tile are in flight is inlined: before a call, the
/// compiler would wait for the products, and spill their registers.
template <typename S>
class Sm90Epilogue {
 public:
  using Accumulators = float[S::kHeadDimVo / 2];

  /// `first_row`: the first of this warpgroup's 64 rows of the tile.
  FLASHPLAN_DEVICE Sm90Epilogue(const AttentionParams& p, const Sm90Smem<S>& smem, int warpgroup,
                                int first_row, int thread)
      : p_(p),
        output_(p),
        smem_(smem),
        warpgroup_(warpgroup),
        first_row_(first_row),
        thread_(thread) {}

  /// What o is multiplied by, and the lse, of each of this thread's two rows.
  struct Scales {
    float o[2];
    float lse[2];
  };
  /// Computes the scales from the softmax state. `sums`: this thread's sums of weights, one for
  /// each of its two rows. This takes hundreds of clocks, so the caller does it while the last
  /// products of the head run.
  FLASHPLAN_DEVICE Scales scales(const Sm90Context& context, int32_t head, const float (&sums)[2],
                                 const float (&shifts)[2]) const {
    Scales scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (!S::Variant::kUseSoftmax) {
        scales.o[half] = 1.0F;
        scales.lse[half] = 0.0F;
        continue;
      }
      float sum = sums[half];
      sum += __shfl_xor_sync(0xffffffffU, sum, 1);
      sum += __shfl_xor_sync(0xffffffffU, sum, 2);
      scales.o[half] = sum == 0.0F ? 0.0F : reciprocal_fast(sum);
      scales.lse[half] = sum == 0.0F ? -infinity() : (shifts[half] + log2_fast(sum)) * kLn2;
    }
    if (context.tile.merge < 0) {
      if (p_.variant.sinks.data != nullptr) {
        const PackedRows rows = context.block().rows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int own = min(row(half), rows.num_rows - 1);
          output_.add_sink(OutputRow(p_, rows, head, own).head, scales.o[half], scales.lse[half]);
        }
      }
      const float of_values = v_scale(p_, head);
      scales.o[0] *= of_values;
      scales.o[1] *= of_values;
    }
    return scales;
  }

  /// Writes the results of one head: o / sum and lse, or partial results, which Sm90Merge merges
  /// after the queue has ended. `queries`: the shared memory of this warpgroup's queries, which
  /// may be overwritten, because the products with them have ended. `is_final`: this is the
  /// warpgroup's last head of the queue.
  FLASHPLAN_DEVICE void write(const Sm90Context& context, int32_t head, uint32_t queries,
                              const Accumulators& o, const Scales& scales, bool is_final) const {
    const PackedRows rows = context.block().rows;
    Accumulators scaled_o;
#pragma unroll
    for (int i = 0; i < S::kHeadDimVo / 2; ++i) scaled_o[i] = o[i] * scales.o[i / 2 % 2];
    if (context.tile.merge >= 0) {
      write_partial(context.tile, head, rows, scaled_o, scales.lse, is_final);
    } else {
      write_o(rows, head, queries, scaled_o);
      write_lse(rows, head, scales.lse);
    }
  }

  /// Writes the results of a tile without keys. Such tiles are rare, so it is not inlined: its code
  /// then lies behind the code that other tiles run.
  __device__ __noinline__ void write_empty(const Sm90Context& context) const {
    constexpr int kQuads = S::kHeadDimVo / 4;
    const WorkTile& tile = context.tile;
    const PackedRows rows = context.block().rows;
    const int num_rows = min(rows.num_rows - first_row_, 64);
    for (int h = 0; h < tile.num_kv_heads; ++h) {
      for (int i = thread_; i < num_rows * kQuads; i += 128) {
        write_result<S>(p_, typename S::Variant(p_), rows, tile.kv_head + h,
                        first_row_ + i / kQuads, i % kQuads * 4, {0.0F, 0.0F, 0.0F, 0.0F}, 1.0F,
                        -infinity());
      }
    }
  }

 private:
  static constexpr int kDimTiles = S::kHeadDimVo / 8;
  using RowOutput = Sm90RowOutput<S>;

  FLASHPLAN_DEVICE int row(int half) const { return S::row(first_row_, opaque(thread_), half); }

  FLASHPLAN_DEVICE void write_lse(const PackedRows& rows, int32_t head,
                                  const float (&lse)[2]) const {
    if (p_.tensors.lse.data == nullptr || opaque(thread_) % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) < rows.num_rows) {
        OutputRow(p_, rows, head, row(half)).write_lse(p_, lse[half]);
      }
    }
  }

  FLASHPLAN_DEVICE void write_o(const PackedRows& rows, int32_t head, uint32_t queries,
                                const Accumulators& o) const {
    const int thread = opaque(thread_);
    const int lane = thread % 32;
    const int first_row = first_row_ + thread / 32 * 16;  // first row of the warp
    const RowOutput output[2] = {{p_, rows, head, row(0)}, {p_, rows, head, row(1)}};
    const bool has_all_dims = p_.tensors.head_dim_vo == S::kHeadDimVo;
    if (!output_.has_chunks() || (S::kQBuffers == 1 && !has_all_dims)) {
      if constexpr (S::kQBuffers == 1) {
        write_anything(rows, head, o, output);
      } else {
        stage_and_write_anything(rows, head, queries, o);
      }
      return;
    }
    const auto pair = [&](int i, int half) {
      const int dim = i * 8 + lane % 4 * 2;
      return Element<S::kOutput>::pack(output[half](o[4 * i + 2 * half], dim),
                                       output[half](o[4 * i + 2 * half + 1], dim + 1));
    };
    if constexpr (S::kQBuffers == 1) {
      // Lane r computes the address of row r; other lanes read it by a shuffle.
      const int own = min(first_row + lane % 16, rows.num_rows - 1);
      const auto* address = reinterpret_cast<const unsigned char*>(
          static_cast<uint16_t*>(p_.tensors.o.data) + OutputRow(p_, rows, head, own).o(p_));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto* to = reinterpret_cast<uint4*>(
            const_cast<unsigned char*>(shuffled_pointer(address, half * 8 + lane / 4)));
        const bool has_row = first_row + half * 8 + lane / 4 < rows.num_rows;
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 4) {
          const uint4 chunk = transposed_in_four_lanes(
              {pair(n, half), pair(n + 1, half), pair(n + 2, half), pair(n + 3, half)});
          if (has_row) to[n + lane % 4] = chunk;
        }
      }
    } else {
      // The rows are staged in the memory of this warp's queries.
      const uint32_t memory = queries + thread / 32 * 16 * 128;
      // The address of chunk lane / 16 of row lane % 16. XOR with n * 16, n even, gives that of
      // chunk n + lane / 16.
      const uint32_t own = memory + lane % 16 * 128 + (((lane / 16) ^ lane) % 8 << 4);
#pragma unroll
      for (int n = 0; n < kDimTiles; n += 2) {
        stmatrix((own ^ (n % 8 << 4)) + n / 8 * S::Query::kBlockBytes, pair(n, 0), pair(n, 1),
                 pair(n + 1, 0), pair(n + 1, 1));
      }
      if (p_.maps.has_o && rows.num_rows >= first_row_ + 64) {
        fence_async_proxy();
        barrier_wait(S::kOwnBarrier + warpgroup_, 128);
        if (thread_ == 0) {
          const int token = static_cast<int>(rows.token(first_row_, p_.schedule.group_size));
#pragma unroll
          for (int block = 0; block < S::kHeadDimVo / 64; ++block) {
            tma_store_3d(&p_.maps.o, queries + block * S::Query::kBlockBytes, block * 64,
                         head * p_.schedule.group_size.value, token);
          }
          tma_store_commit();
        }
        return;
      }
      __syncwarp();
      constexpr int kChunks = S::kHeadDimVo / 8;  // 16-byte chunks of a row
#pragma unroll 1
      for (int i = lane; i < 16 * kChunks; i += 32) {
        const int r = i / kChunks;
        const int chunk = i % kChunks;
        if (first_row + r >= rows.num_rows) break;
        if (chunk * 8 >= p_.tensors.head_dim_vo) continue;
        auto* to = static_cast<uint16_t*>(p_.tensors.o.data) +
                   OutputRow(p_, rows, head, first_row + r).o(p_) + chunk * 8;
        const uint32_t from =
            memory + chunk / 8 * S::Query::kBlockBytes + r * 128 + ((chunk ^ r) % 8 << 4);
        *reinterpret_cast<uint4*>(to) = load_shared_16(from);
      }
    }
  }

  /// Writes results of any dtype, alignment and head dim from registers.
  FLASHPLAN_DEVICE void write_anything(const PackedRows& rows, int32_t head, const Accumulators& o,
                                       const RowOutput (&output)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= rows.num_rows) continue;
      const int64_t to = OutputRow(p_, rows, head, row(half)).o(p_);
#pragma unroll
      for (int i = 0; i < 2 * kDimTiles; ++i) {
        const int dim = i / 2 * 8 + opaque(thread_) % 4 * 2 + i % 2;
        const float x = o[i / 2 * 4 + 2 * half + i % 2];
        if (dim < p_.tensors.head_dim_vo) output_.write_one(to + dim, output[half](x, dim));
      }
    }
  }

  /// Does what write_anything() does with a tenth of the instructions: 32 dims of this warp's rows
  /// at a time are staged as floats in the memory of its queries.
  FLASHPLAN_DEVICE void stage_and_write_anything(const PackedRows& rows, int32_t head,
                                                 uint32_t queries, const Accumulators& o) const {
    constexpr int kDims = 32;
    const int thread = opaque(thread_);
    const int lane = thread % 32;
    const int first_row = first_row_ + thread / 32 * 16;  // first row of the warp
    const uint32_t memory = queries + thread / 32 * 16 * 128;
#pragma unroll 1
    for (int first = 0; first < S::kHeadDimVo; first += kDims) {
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        if (n / (kDims / 8) * kDims != first) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          store_shared_8(
              memory + (half * 8 + lane / 4) * 128 + (n * 8 % kDims + lane % 4 * 2) * 4,
              {__float_as_uint(o[4 * n + 2 * half]), __float_as_uint(o[4 * n + 2 * half + 1])});
        }
      }
      __syncwarp();
      const int dim = first + lane;
#pragma unroll 1
      for (int r = 0; r < 16 && first_row + r < rows.num_rows; ++r) {
        const float x = __uint_as_float(load_shared_4(memory + r * 128 + lane * 4));
        if (dim < p_.tensors.head_dim_vo) {
          output_.write_one(OutputRow(p_, rows, head, first_row + r).o(p_) + dim,
                            RowOutput(p_, rows, head, first_row + r)(x, dim));
        }
      }
      __syncwarp();
    }
  }

  FLASHPLAN_DEVICE void write_partial(const WorkTile& tile, int32_t head, const PackedRows& rows,
                                      const Accumulators& o, const float (&lse)[2],
                                      bool is_final) const {
    const int lane = opaque(thread_) % 32;
    const int32_t heads_before = head - tile.kv_head;
    const int64_t first_row = int64_t{tile.partial_row} + heads_before * rows.num_rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= rows.num_rows) continue;
      const int64_t to = first_row + row(half);
      if (lane % 4 == 0) p_.workspace.partial_lse[to] = lse[half];
      float* values = p_.workspace.partial_o + to * S::kHeadDimVo + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        *reinterpret_cast<float2*>(values + n * 8) = {o[4 * n + 2 * half], o[4 * n + 2 * half + 1]};
      }
    }
    Sm90Merge<S>(p_, smem_, warpgroup_, first_row_, thread_)
        .arrive_at(tile.merge + heads_before, is_final);
  }

  const AttentionParams& p_;
  const Sm90Output<S> output_;
  const Sm90Smem<S> smem_;
  const int warpgroup_;
  const int first_row_;
  const int thread_;
};

}  // namespace flashplan::device
