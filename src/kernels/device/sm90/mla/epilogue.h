// SPDX-License-Identifier: Apache-2.0
// Writes the results of a consumer warpgroup of the sm90_mla family from registers to memory.
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/mla/merge.h"
#include "kernels/device/sm90/mla/shared_memory.h"
#include "kernels/device/sm90/output.h"

namespace flashplan::device {

template <typename S, int kWarpgroup>
class MlaEpilogue {
 public:
  using Accumulators = float[S::kHalfDims / 2];

  FLASHPLAN_DEVICE MlaEpilogue(const AttentionParams& p, const MlaSmem<S>& smem, int thread)
      : p_(p), output_(p), smem_(smem), thread_(thread) {}

  /// The factor of o and the lse of each of this thread's two rows.
  struct Scales {
    float o[2];
    float lse[2];
  };
  /// Adds up the sums of weights of both warpgroups, which have the same shifts. `sums`: of this
  /// thread's columns in its two rows. `tile`: number of the tile among those with steps.
  FLASHPLAN_DEVICE Scales scales(const Sm90Context& context, const float (&sums)[2],
                                 const float (&shifts)[2], uint32_t tile) const {
    float own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      own[half] = sums[half];
      own[half] += __shfl_xor_sync(0xffffffffU, own[half], 1);
      own[half] += __shfl_xor_sync(0xffffffffU, own[half], 2);
      if (thread_ % 4 == 0) {
        store_shared_4(smem_.sum(tile, kWarpgroup, row(half)), __float_as_uint(own[half]));
      }
    }
    barrier_wait(S::kConsumerBarrier, S::kConsumerThreads);
    Scales scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float other =
          __uint_as_float(load_shared_4(smem_.sum(tile, 1 - kWarpgroup, row(half))));
      // In one order, so that both warpgroups get the same bits.
      const float sum = kWarpgroup == 0 ? own[half] + other : other + own[half];
      scales.o[half] = sum == 0.0F ? 0.0F : reciprocal_fast(sum);
      scales.lse[half] = sum == 0.0F ? -infinity() : (shifts[half] + log2_fast(sum)) * kLn2;
    }
    if (context.tile.merge < 0) {
      if (p_.variant.sinks.data != nullptr) {
        const PackedRows rows = context.block().rows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int own_row = min(row(half), rows.num_rows - 1);
          output_.add_sink(OutputRow(p_, rows, 0, own_row).head, scales.o[half], scales.lse[half]);
        }
      }
      const float of_values = v_scale(p_, 0);
      scales.o[0] *= of_values;
      scales.o[1] *= of_values;
    }
    return scales;
  }

  /// Writes o / sum and lse, or partial results, which MlaMerge merges after the queue has ended.
  /// `is_final`: this is the last tile of the queue.
  FLASHPLAN_DEVICE void write(const Sm90Context& context, Accumulators& o, const Scales& scales,
                              bool is_final) const {
    const PackedRows rows = context.block().rows;
#pragma unroll
    for (int i = 0; i < S::kHalfDims / 2; ++i) o[i] *= scales.o[i / 2 % 2];
    if (context.tile.merge >= 0) {
      write_partial(context.tile, rows, o, scales.lse, is_final);
    } else {
      if (output_.has_chunks()) {
        write_chunks(rows, o);
      } else {
        write_anything(rows, o);
      }
      if (kWarpgroup == 0) write_lse(rows, scales.lse);
    }
  }

  /// Writes the results of a tile without keys, both warpgroups half of the rows each.
  __device__ __noinline__ void write_empty(const Sm90Context& context) const {
    constexpr int kQuads = S::kHeadDimVo / 4;
    const PackedRows rows = context.block().rows;
    for (int i = kWarpgroup * 128 + thread_; i < rows.num_rows * kQuads; i += S::kConsumerThreads) {
      write_result<S>(p_, typename S::Variant(p_), rows, 0, i / kQuads, i % kQuads * 4,
                      {0.0F, 0.0F, 0.0F, 0.0F}, 1.0F, -infinity());
    }
  }

 private:
  static constexpr int kDimTiles = S::kHalfDims / 8;
  static constexpr int kFirstDim = kWarpgroup * S::kHalfDims;

  FLASHPLAN_DEVICE int row(int half) const { return S::row(0, opaque(thread_), half); }

  FLASHPLAN_DEVICE void write_lse(const PackedRows& rows, const float (&lse)[2]) const {
    if (p_.tensors.lse.data == nullptr || opaque(thread_) % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) < rows.num_rows) OutputRow(p_, rows, 0, row(half)).write_lse(p_, lse[half]);
    }
  }

  /// Results of the dtype of q in aligned rows: four lanes write 64 bytes of a row at once.
  FLASHPLAN_DEVICE void write_chunks(const PackedRows& rows, const Accumulators& o) const {
    const int thread = opaque(thread_);
    const int lane = thread % 32;
    const int first_row = thread / 32 * 16;  // of the warp
    const auto pair = [&](int i, int half) {
      return Element<S::kQ>::pack(o[4 * i + 2 * half], o[4 * i + 2 * half + 1]);
    };
    // Lane r computes the address of row r; other lanes read it by a shuffle.
    const int own = min(first_row + lane % 16, rows.num_rows - 1);
    const auto* address = reinterpret_cast<const unsigned char*>(
        static_cast<uint16_t*>(p_.tensors.o.data) + OutputRow(p_, rows, 0, own).o(p_) + kFirstDim);
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
  }

  /// Results of any dtype and alignment: 16 dims of a warp's rows at a time are staged as floats in
  /// the memory of the weights, of which each warp has an eighth. Nobody reads weights between the
  /// barrier in scales() and the one here.
  FLASHPLAN_DEVICE void write_anything(const PackedRows& rows, const Accumulators& o) const {
    constexpr int kDims = 16;
    const int thread = opaque(thread_);
    const int lane = thread % 32;
    const int first_row = thread / 32 * 16;  // of the warp
    constexpr int kRowBytes = kDims * 4;
    static_assert(S::kConsumerWarps * 16 * kRowBytes <= S::kWeightsBytes);
    const uint32_t memory = smem_.weights() + (kWarpgroup * 4 + thread / 32) * 16 * kRowBytes;
#pragma unroll 1
    for (int first = 0; first < S::kHalfDims; first += kDims) {
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        if (n / (kDims / 8) * kDims != first) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          store_shared_8(
              memory + (half * 8 + lane / 4) * kRowBytes + (n * 8 % kDims + lane % 4 * 2) * 4,
              {__float_as_uint(o[4 * n + 2 * half]), __float_as_uint(o[4 * n + 2 * half + 1])});
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < 16 * kDims; i += 32) {
        const int r = i / kDims;
        if (first_row + r >= rows.num_rows) break;
        output_.write_one(
            OutputRow(p_, rows, 0, first_row + r).o(p_) + kFirstDim + first + i % kDims,
            __uint_as_float(load_shared_4(memory + r * kRowBytes + i % kDims * 4)));
      }
      __syncwarp();
    }
    barrier_wait(S::kConsumerBarrier, S::kConsumerThreads);
  }

  FLASHPLAN_DEVICE void write_partial(const WorkTile& tile, const PackedRows& rows,
                                      const Accumulators& o, const float (&lse)[2],
                                      bool is_final) const {
    const int lane = opaque(thread_) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= rows.num_rows) continue;
      const int64_t to = int64_t{tile.partial_row} + row(half);
      if (kWarpgroup == 0 && lane % 4 == 0) p_.workspace.partial_lse[to] = lse[half];
      float* values = p_.workspace.partial_o + to * S::kHeadDimVo + kFirstDim + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        *reinterpret_cast<float2*>(values + n * 8) = {o[4 * n + 2 * half], o[4 * n + 2 * half + 1]};
      }
    }
    barrier_wait(S::kConsumerBarrier, S::kConsumerThreads);
    if (kWarpgroup == 0 && thread_ == 0) MlaMerge<S>::arrive(p_, smem_, tile.merge, is_final);
  }

  const AttentionParams& p_;
  const Sm90Output<S> output_;
  const MlaSmem<S> smem_;
  const int thread_;
};

}  // namespace flashplan::device
