// SPDX-License-Identifier: Apache-2.0
// Writes the results of a consumer warpgroup of the sm90_mla family from registers to memory.
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/mla/merge.h"
#include "kernels/device/sm90/mla/shared_memory.h"
#include "kernels/device/sm90/output.h"

namespace flashplan::device {

template <typename S>
class MlaEpilogue {
 public:
  using Accumulators = float[S::kHalfDims / 2];

  FLASHPLAN_DEVICE MlaEpilogue(const AttentionParams& p, const MlaSmem<S>& smem, int warpgroup,
                               int thread)
      : p_(p), output_(p), smem_(smem), warpgroup_(warpgroup), thread_(thread) {}

  /// The state of each of this thread's two rows: the factor by which o is multiplied, and the lse.
  struct State {
    float scale[2];
    float lse[2];
  };
  /// Adds up the sums of weights of both warpgroups, which use the same shifts. `sums`: over this
  /// thread's columns in its two rows. `number`: how many states of the queue came before this one,
  /// or the parity of that.
  FLASHPLAN_DEVICE State state(const float (&sums)[2], const float (&shifts)[2],
                               uint32_t number) const {
    float own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      own[half] = sums[half];
      own[half] += __shfl_xor_sync(0xffffffffU, own[half], 1);
      own[half] += __shfl_xor_sync(0xffffffffU, own[half], 2);
      if (thread_ % 4 == 0) {
        store_shared_4(smem_.sum(number, warpgroup_, row(half)), __float_as_uint(own[half]));
      }
    }
    barrier_wait(S::kConsumerBarrier, S::kConsumerThreads);
    State state;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float other =
          __uint_as_float(load_shared_4(smem_.sum(number, 1 - warpgroup_, row(half))));
      const float sum = own[half] + other;
      state.scale[half] = sum == 0.0F ? 0.0F : reciprocal_fast(sum);
      state.lse[half] = sum == 0.0F ? -infinity() : (shifts[half] + log2_fast(sum)) * kLn2;
    }
    return state;
  }

  /// Writes the result of a tile that belongs to no merge. If the tile has chunks, this is called
  /// with the state of each: it merges them, by the operations of MlaMerge, and writes the result
  /// after the last chunk. `is_last`: no chunk follows.
  FLASHPLAN_DEVICE void write(const Sm90Context& context, Accumulators& o, State& state,
                              int32_t chunk, bool is_last) const {
    const PackedRows rows = context.block().rows;
    const int32_t kv_head = head_of(context);
    if (p_.schedule.chunk_kv > 0) {
      multiply(o, state.scale);
      merge_chunk(o, state, chunk, is_last);
      if (!is_last) return;
    }
    finish(rows, kv_head, state);
    multiply(o, state.scale);
    if (!output_.has_chunks()) {
      write_anything(rows, kv_head, o);
    } else {
      write_chunks(rows, kv_head, o);
    }
    if (warpgroup_ == 0) write_lse(rows, kv_head, state.lse);
    barrier_wait(S::kConsumerBarrier, S::kConsumerThreads);  // weights may then overwrite results
  }

  /// Writes the state of chunk number `chunk` of a tile, or of the whole tile, as a partial result,
  /// which MlaMerge merges after the queue has ended.
  FLASHPLAN_DEVICE void write_partial(const Sm90Context& context, Accumulators& o,
                                      const State& state, int32_t chunk) const {
    multiply(o, state.scale);
    const int32_t num_rows = context.block().rows.num_rows;
    const int64_t first_row =
        context.tile.partial_row + chunk * S::kRowsOfTile + first_row_of_cta<S>();
    const int lane = opaque(thread_) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= num_rows) continue;
      const int64_t to = first_row + row(half);
      if (warpgroup_ == 0 && lane % 4 == 0) p_.workspace.partial_lse[to] = state.lse[half];
      float* values = p_.workspace.partial_o + to * S::kHeadDimVo + first_dim() + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        *reinterpret_cast<float2*>(values + n * 8) = {o[4 * n + 2 * half], o[4 * n + 2 * half + 1]};
      }
    }
  }

  /// Arrives at the merge of a tile that has written `written` of its `planned` states. In a
  /// batch-invariant plan it has written fewer than planned if the real kv length is below the
  /// planned one. `is_final`: this is the last tile of the queue.
  FLASHPLAN_DEVICE void arrive(const Sm90Context& context, int32_t written, int32_t planned,
                               bool is_final) const {
    if (written < planned) write_missing(context, written, planned);
    barrier_wait(S::kConsumerBarrier, S::kConsumerThreads);
    if (warpgroup_ == 0 && thread_ == 0) {
      MlaMerge<S>::arrive(p_, smem_, context.tile.merge, is_final);
    }
  }

  /// Writes the results of a tile without keys; each warpgroup writes half of the rows.
  __device__ __noinline__ void write_empty(const Sm90Context& context) const {
    constexpr int kQuads = S::kHeadDimVo / 4;
    const PackedRows rows = context.block().rows;
    for (int i = warpgroup_ * 128 + thread_; i < rows.num_rows * kQuads; i += S::kConsumerThreads) {
      write_result<S>(p_, typename S::Variant(p_), rows, head_of(context), i / kQuads,
                      i % kQuads * 4, {0.0F, 0.0F, 0.0F, 0.0F}, 1.0F, -infinity());
    }
  }

 private:
  static constexpr int kDimTiles = S::kHalfDims / 8;

  FLASHPLAN_DEVICE int first_dim() const { return warpgroup_ * S::kHalfDims; }
  FLASHPLAN_DEVICE int row(int half) const { return S::row(0, opaque(thread_), half); }
  /// The kv head of a tile. Where keys are values, there is only one.
  static FLASHPLAN_DEVICE int32_t head_of(const Sm90Context& context) {
    return S::kHasValues ? context.tile.kv_head : 0;
  }
  /// Whether results have dim `first` of this warpgroup's half. Where keys are values, results have
  /// all dims of the kernel.
  FLASHPLAN_DEVICE bool has_dims(int first) const {
    return !S::kHasValues || first_dim() + first < p_.tensors.head_dim_vo;
  }

  static FLASHPLAN_DEVICE void multiply(Accumulators& o, const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < S::kHalfDims / 2; ++i) o[i] *= factors[i / 2 % 2];
  }

  /// Adds the sinks of the rows' heads, and multiplies the factors of o by the scale of values.
  FLASHPLAN_DEVICE void finish(const PackedRows& rows, int32_t kv_head, State& state) const {
    if (p_.variant.sinks.data != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own_row = min(row(half), rows.num_rows - 1);
        output_.add_sink(OutputRow(p_, rows, kv_head, own_row).head, state.scale[half],
                         state.lse[half]);
      }
    }
    const float of_values = v_scale(p_, kv_head);
    state.scale[0] *= of_values;
    state.scale[1] *= of_values;
  }

  /// Merges the state of a chunk into that of the chunks before it, which is in this CTA's scratch
  /// memory: there each thread has its accumulators as float4, and behind them the maxima and sums
  /// of its rows. After the last chunk o and `state` are the results.
  FLASHPLAN_DEVICE void merge_chunk(Accumulators& o, State& state, int32_t chunk,
                                    bool is_last) const {
    constexpr int kQuads = S::kHalfDims / 8;
    auto* memory = reinterpret_cast<float4*>(static_cast<unsigned char*>(p_.workspace.scratch) +
                                             blockIdx.x * (p_.workspace.scratch_bytes / S::kCtas)) +
                   warpgroup_ * 128 + opaque(thread_);
    float4* rows = memory + kQuads * S::kConsumerThreads;
    MergedRow merged[2];
    merged[0].reset();
    merged[1].reset();
    if (chunk > 0) {
      const float4 before = *rows;
      merged[0] = {before.x, before.y};
      merged[1] = {before.z, before.w};
    }
    const float2 first = merged[0].add(state.lse[0]);
    const float2 second = merged[1].add(state.lse[1]);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      float4 so_far = {0.0F, 0.0F, 0.0F, 0.0F};
      if (chunk > 0) so_far = memory[n * S::kConsumerThreads];
      const float4 own = {
          merge_value(so_far.x, o[4 * n], first), merge_value(so_far.y, o[4 * n + 1], first),
          merge_value(so_far.z, o[4 * n + 2], second), merge_value(so_far.w, o[4 * n + 3], second)};
      if (!is_last) memory[n * S::kConsumerThreads] = own;
      o[4 * n] = own.x;
      o[4 * n + 1] = own.y;
      o[4 * n + 2] = own.z;
      o[4 * n + 3] = own.w;
    }
    if (!is_last) *rows = {merged[0].max, merged[0].sum, merged[1].max, merged[1].sum};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.scale[half] = merged[half].inverse();
      state.lse[half] = merged[half].lse();
    }
  }

  FLASHPLAN_DEVICE void write_lse(const PackedRows& rows, int32_t kv_head,
                                  const float (&lse)[2]) const {
    if (p_.tensors.lse.data == nullptr || opaque(thread_) % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= rows.num_rows) continue;
      OutputRow(p_, rows, kv_head, row(half)).write_lse(p_, lse[half]);
    }
  }

  /// Writes results of the dtype of q in aligned rows. 64 dims of 8 rows of a warp at a time are
  /// staged in the memory of the weights, so that 8 lanes write 128 bytes of a row at once. Each
  /// warp stages in an eighth of this memory. Nobody reads weights between the barrier in state()
  /// and that at the end of write().
  FLASHPLAN_DEVICE void write_chunks(const PackedRows& rows, int32_t kv_head,
                                     const Accumulators& o) const {
    const int thread = opaque(thread_);
    const int lane = thread % 32;
    const int first_row = thread / 32 * 16;  // first row of the warp
    if (first_row >= rows.num_rows) return;
    static_assert(S::kConsumerWarps * 8 * 128 <= S::kWeightsBytes);
    const uint32_t memory = smem_.weights() + (warpgroup_ * 4 + thread / 32) * 8 * 128;
    // Of the 128 staged bytes of row lane % 8, the 16 bytes number lane / 8. XOR with 64 gives the
    // address of the 16 bytes number lane / 8 + 4.
    const uint32_t own = memory + lane % 8 * 128 + (((lane / 8) ^ lane) % 8 << 4);
    const auto pair = [&](int i, int half) {
      return Element<S::kQ>::pack(o[4 * i + 2 * half], o[4 * i + 2 * half + 1]);
    };
    // Lane r computes the address, in o, of the warp's row r; other lanes get it by a shuffle.
    const int own_row = min(first_row + lane % 16, rows.num_rows - 1);
    const auto* address = reinterpret_cast<const unsigned char*>(
        static_cast<uint16_t*>(p_.tensors.o.data) + OutputRow(p_, rows, kv_head, own_row).o(p_) +
        first_dim());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4* to[2];
      bool has_row[2];
      uint32_t from[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = i * 4 + lane / 8;
        to[i] = reinterpret_cast<uint4*>(
                    const_cast<unsigned char*>(shuffled_pointer(address, half * 8 + r))) +
                lane % 8;
        has_row[i] = first_row + half * 8 + r < rows.num_rows;
        from[i] = memory + r * 128 + ((lane ^ r) % 8 << 4);
      }
#pragma unroll
      for (int n = 0; n < kDimTiles; n += 8) {
        __syncwarp();  // all lanes have read what was staged before
        stmatrix(own, pair(n, half), pair(n + 1, half), pair(n + 2, half), pair(n + 3, half));
        stmatrix(own ^ 64, pair(n + 4, half), pair(n + 5, half), pair(n + 6, half),
                 pair(n + 7, half));
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 chunk = load_shared_16(from[i]);
          if (has_row[i] && has_dims((n + lane % 8) * 8)) to[i][n] = chunk;
        }
      }
    }
  }

  /// Writes results of any dtype and alignment. 16 dims of a warp's rows at a time are staged as
  /// floats in the warp's eighth of the memory of the weights.
  FLASHPLAN_DEVICE void write_anything(const PackedRows& rows, int32_t kv_head,
                                       const Accumulators& o) const {
    constexpr int kDims = 16;
    const int thread = opaque(thread_);
    const int lane = thread % 32;
    const int first_row = thread / 32 * 16;  // first row of the warp
    constexpr int kRowBytes = kDims * 4;
    static_assert(S::kConsumerWarps * 16 * kRowBytes <= S::kWeightsBytes);
    const uint32_t memory = smem_.weights() + (warpgroup_ * 4 + thread / 32) * 16 * kRowBytes;
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
        if (!has_dims(first + i % kDims)) continue;
        output_.write_one(
            OutputRow(p_, rows, kv_head, first_row + r).o(p_) + first_dim() + first + i % kDims,
            __uint_as_float(load_shared_4(memory + r * kRowBytes + i % kDims * 4)));
      }
      __syncwarp();
    }
  }

  /// Writes empty states for chunks that were planned, but have no keys.
  __device__ __noinline__ void write_missing(const Sm90Context& context, int32_t written,
                                             int32_t planned) const {
    const int32_t num_rows = context.block().rows.num_rows;
    const int thread = warpgroup_ * 128 + thread_;
#pragma unroll 1
    for (int32_t chunk = written; chunk < planned; ++chunk) {
      const int64_t first_row =
          int64_t{context.tile.partial_row} + chunk * S::kRowsOfTile + first_row_of_cta<S>();
      float* o = p_.workspace.partial_o + first_row * S::kHeadDimVo;
#pragma unroll 1
      for (int i = thread; i < num_rows * S::kHeadDimVo; i += S::kConsumerThreads) o[i] = 0.0F;
#pragma unroll 1
      for (int row = thread; row < num_rows; row += S::kConsumerThreads) {
        p_.workspace.partial_lse[first_row + row] = -infinity();
      }
    }
  }

  const AttentionParams& p_;
  const Sm90Output<S> output_;
  const MlaSmem<S> smem_;
  const int warpgroup_;
  const int thread_;
};

}  // namespace flashplan::device
