// SPDX-License-Identifier: Apache-2.0
// Writes the results of a consumer warpgroup of the sm90 family from registers to memory.
#pragma once

#include "kernels/device/attention_state.h"
#include "kernels/device/hopper.h"
#include "kernels/device/sm90_shape.h"

namespace flashplan::device {

/// All functions are inlined: products of the next tile are in flight, and the compiler would wait
/// for them before a call.
template <typename S>
class Sm90Epilogue {
 public:
  using Accumulators = float[S::kHeadDimVo / 2];

  /// `first_row`: the first of this warpgroup's 64 rows of the tile.
  FLASHPLAN_DEVICE Sm90Epilogue(const AttentionParams& p, uint32_t base, int warpgroup,
                                int first_row, int thread)
      : p_(p), base_(base), warpgroup_(warpgroup), first_row_(first_row), thread_(thread) {}

  /// Writes the results of one head: o / sum and lse, or partial results, which the last warpgroup
  /// to arrive merges. `sums` and `shifts` are of this thread's columns. `queries` is the shared
  /// memory of this warpgroup's queries, which is free by now.
  FLASHPLAN_DEVICE void write(const Sm90Context& context, int32_t head, uint32_t queries,
                              const Accumulators& o, const float (&sums)[2],
                              const float (&shifts)[2]) const {
    const PackedRows rows = context.block().rows;
    float scale[2];
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (!S::Variant::kUseSoftmax) {
        scale[half] = 1.0F;
        lse[half] = 0.0F;
        continue;
      }
      float sum = sums[half];
      sum += __shfl_xor_sync(0xffffffffU, sum, 1);
      sum += __shfl_xor_sync(0xffffffffU, sum, 2);
      scale[half] = sum == 0.0F ? 0.0F : reciprocal_fast(sum);
      lse[half] = sum == 0.0F ? -infinity() : (shifts[half] + log2_fast(sum)) * kLn2;
    }
    if (context.tile.merge >= 0) {
      write_partial(context.tile, head, rows, o, scale, lse);
    } else {
      if (p_.variant.sinks != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int own = min(row(half), rows.num_rows - 1);
          add_sink(OutputRow(p_, rows, head, own).head, scale[half], lse[half]);
        }
      }
      write_o(rows, head, queries, o, scale);
      write_lse(rows, head, lse);
    }
  }

  /// Writes the results of a tile without keys.
  FLASHPLAN_DEVICE void write_empty(const Sm90Context& context) const {
    constexpr int kQuads = S::kHeadDimVo / 4;
    const WorkTile& tile = context.tile;
    const PackedRows rows = context.block().rows;
    const int num_rows = min(rows.num_rows - first_row_, 64);
    for (int h = 0; h < tile.num_kv_heads; ++h) {
      for (int i = thread_; i < num_rows * kQuads; i += 128) {
        write_four(rows, tile.kv_head + h, first_row_ + i / kQuads, i % kQuads * 4,
                   {0.0F, 0.0F, 0.0F, 0.0F}, -infinity());
      }
    }
  }

 private:
  static constexpr int kDimTiles = S::kHeadDimVo / 8;

  /// What the variant makes of the results of a row.
  struct Output {
    const AttentionParams& p;
    ElementPosition at;  // of dim 0

    FLASHPLAN_DEVICE Output(const AttentionParams& p, const PackedRows& rows, int32_t kv_head,
                            int row)
        : p(p), at() {
      if constexpr (S::Variant::kTransformsOutput) {
        at = element_position(p, rows, first_position(p, rows), kv_head, row, 0);
      }
    }
    FLASHPLAN_DEVICE float operator()(float x, int dim) const {
      if constexpr (!S::Variant::kTransformsOutput) return x;
      // Of dims that are not there, the last one is computed, and not written.
      return typename S::Variant(p).output(x, at.next(min(dim, p.tensors.head_dim_vo - 1)));
    }
  };

  FLASHPLAN_DEVICE int row(int half) const { return S::row(first_row_, opaque(thread_), half); }

  FLASHPLAN_DEVICE DType o_dtype() const { return device::o_dtype<typename S::Variant>(p_); }
  /// Whether o has the dtype of the kernel, in rows of aligned chunks of 16 bytes.
  FLASHPLAN_DEVICE bool writes_chunks() const {
    return p_.tensors.vectorized && o_dtype() == S::kQ;
  }

  /// Lets the sink of a query head join a row's result, scale * o and lse.
  FLASHPLAN_DEVICE void add_sink(uint32_t qo_head, float& scale, float& lse) const {
    asm volatile("");  // a branch, not selections for every row
    const float2 joined = with_sink(p_.variant.sinks[qo_head], lse);
    scale *= joined.x;
    lse = joined.y;
  }

  FLASHPLAN_DEVICE void write_lse(const PackedRows& rows, int32_t head,
                                  const float (&lse)[2]) const {
    if (p_.tensors.lse.data == nullptr || opaque(thread_) % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) < rows.num_rows) {
        p_.tensors.lse.data[OutputRow(p_, rows, head, row(half)).lse(p_)] = lse[half];
      }
    }
  }

  FLASHPLAN_DEVICE void write_o(const PackedRows& rows, int32_t head, uint32_t queries,
                                const Accumulators& o, const float (&scale)[2]) const {
    const int thread = opaque(thread_);
    const int lane = thread % 32;
    const int first_row = first_row_ + thread / 32 * 16;  // of the warp
    const float values_scale = v_scale(p_, head);
    const float total_scale[2] = {scale[0] * values_scale, scale[1] * values_scale};
    const Output output[2] = {{p_, rows, head, row(0)}, {p_, rows, head, row(1)}};
    const bool has_all_dims = p_.tensors.head_dim_vo == S::kHeadDimVo;
    // Kernels that are compiled at run time have one way for all rows that can be staged, since
    // writing anything from registers is much code.
    constexpr bool kStagesAll = !S::Variant::kIsBuiltIn && S::kQBuffers > 1;
    if (kStagesAll ? o_dtype() != S::kQ
                   : !writes_chunks() || (S::kQBuffers == 1 && !has_all_dims)) {
      write_anything(rows, head, o, total_scale, output);
      return;
    }
    const auto pair = [&](int i, int half) {
      const int dim = i * 8 + lane % 4 * 2;
      return Element<S::kQ>::pack(
          output[half](o[4 * i + 2 * half] * total_scale[half], dim),
          output[half](o[4 * i + 2 * half + 1] * total_scale[half], dim + 1));
    };
    if constexpr (S::kQBuffers == 1) {
      // Lane r computes the address of row r; other lanes read it by a shuffle.
      const int own = min(first_row + lane % 16, rows.num_rows - 1);
      const auto* address = reinterpret_cast<const unsigned char*>(
          static_cast<uint16_t*>(p_.tensors.o.data) + OutputRow(p_, rows, head, own).o(p_));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto* to = reinterpret_cast<uint32_t*>(
            const_cast<unsigned char*>(shuffled_pointer(address, half * 8 + lane / 4)));
        if (first_row + half * 8 + lane / 4 < rows.num_rows) {
#pragma unroll
          for (int n = 0; n < kDimTiles; ++n) to[n * 4 + lane % 4] = pair(n, half);
        }
      }
    } else {
      // The rows are staged in the memory of this warp's queries.
      const uint32_t memory = queries + thread / 32 * 16 * 128;
      // The address of chunk 0 of this lane's row. XOR with n * 16 gives that of chunk n, n even.
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
          for (int block = 0; block < S::Value::kBlocks; ++block) {
            tma_store_3d(&p_.maps.o, queries + block * S::Query::kBlockBytes, block * 64,
                         head * p_.schedule.group_size.value, token);
          }
          tma_store_commit();
        }
        return;
      }
      __syncwarp();
      constexpr int kChunks = S::kHeadDimVo / 8;  // of 16 bytes in a row
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
        if (kStagesAll && !p_.tensors.vectorized) {
          const int num_valid = min(p_.tensors.head_dim_vo - chunk * 8, 8);
#pragma unroll 1
          for (int j = 0; j < num_valid; ++j) {
            to[j] = static_cast<uint16_t>(load_shared_2(from + j * 2));
          }
          continue;
        }
        *reinterpret_cast<uint4*>(to) = load_shared_16(from);
      }
    }
  }

  /// Results of any dtype, alignment and head dim, from registers.
  FLASHPLAN_DEVICE void write_anything(const PackedRows& rows, int32_t head, const Accumulators& o,
                                       const float (&scale)[2], const Output (&output)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= rows.num_rows) continue;
      const int64_t to = OutputRow(p_, rows, head, row(half)).o(p_);
#pragma unroll
      for (int i = 0; i < 2 * kDimTiles; ++i) {
        const int dim = i / 2 * 8 + opaque(thread_) % 4 * 2 + i % 2;
        const float x = o[i / 2 * 4 + 2 * half + i % 2] * scale[half];
        if (dim < p_.tensors.head_dim_vo) store_one(to + dim, output[half](x, dim));
      }
    }
  }
  FLASHPLAN_DEVICE void store_one(int64_t element, float x) const {
    if (o_dtype() == DType::kFloat32) {
      static_cast<float*>(p_.tensors.o.data)[element] = x;
    } else {
      const uint32_t pair = o_dtype() == DType::kFloat16 ? Element<DType::kFloat16>::pack(x, 0.0F)
                                                         : Element<DType::kBFloat16>::pack(x, 0.0F);
      static_cast<uint16_t*>(p_.tensors.o.data)[element] = static_cast<uint16_t>(pair);
    }
  }

  FLASHPLAN_DEVICE void write_partial(const WorkTile& tile, int32_t head, const PackedRows& rows,
                                      const Accumulators& o, const float (&scale)[2],
                                      const float (&lse)[2]) const {
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
        *reinterpret_cast<float2*>(values + n * 8) = {o[4 * n + 2 * half] * scale[half],
                                                      o[4 * n + 2 * half + 1] * scale[half]};
      }
    }
    arrive_at(tile.merge + heads_before);
  }

  /// Arrives at a merge, and merges if this warpgroup is the last. As a rule the rows of each
  /// warpgroup are merged apart, with an arrival counter of their own.
  FLASHPLAN_DEVICE void arrive_at(int32_t number) const {
    const Merge merge = p_.schedule.merges[number];  // loaded while the others arrive
    const bool shares = S::Variant::kIsBuiltIn && (merge.parent >= 0 || merge.num_readers > 0);
    const int id = S::kOwnBarrier + warpgroup_;
    barrier_wait(id, 128);
    if (thread_ == 0) {
      if (shares && merge.num_readers == 0) {
        wait_for_prefixes(p_, merge, p_.schedule.arrivals + kArrivalsPerMerge * number);
      }
      const int counter = shares ? 0 : first_row_ / 64;
      const int32_t expected = shares ? arrivals_of_sharer(merge) : merge.num_pieces;
      store_shared_4(flags(), is_last_to_arrive(number, counter, expected));
    }
    barrier_wait(id, 128);
    if (load_shared_4(flags()) == 0) return;
    if (shares) {
      finish_sharer(number);
    } else {
      merge_states(merge);
    }
  }

  FLASHPLAN_DEVICE bool is_last_to_arrive(int32_t number, int counter, int32_t expected) const {
    int32_t* arrivals = p_.schedule.arrivals + kArrivalsPerMerge * number + counter;
    const bool is_last = arrive(arrivals) + 1 == expected;
    if (is_last) *arrivals = 0;  // for the next run
    return is_last;
  }
  /// Four words of shared memory for this warpgroup.
  FLASHPLAN_DEVICE uint32_t flags() const { return base_ + S::kFlags + warpgroup_ * 16; }

  /// The rows of a request may be those of two warpgroups in the tile of its prefix. So the rows of
  /// a sharer are merged at once, after all warpgroups have arrived for each piece of its own, and
  /// its prefixes once each.
  FLASHPLAN_DEVICE int32_t arrivals_of_sharer(const Merge& merge) const {
    if (merge.rows.num_rows <= 64) return merge.num_pieces;
    const int32_t prefixes = merge.num_readers == 0 ? num_prefixes(p_, merge) : 0;
    return (merge.num_pieces - prefixes) * S::kWarpgroups + prefixes;
  }

  /// Merges the rows of a request that is complete. A prefix that is complete arrives at the merges
  /// of the requests that read it, and merges those that are complete by that.
  FLASHPLAN_DEVICE void finish_sharer(int32_t number) const {
    const Merge& merge = p_.schedule.merges[number];
    const bool is_prefix = merge.num_readers > 0;
    const int32_t first_request = is_prefix ? merge.first_reader : number;
    const int id = S::kOwnBarrier + warpgroup_;
#pragma unroll 1
    for (int32_t first = 0; first < max(merge.num_readers, 1); first += 128) {
      const int32_t own = first + thread_;
      bool is_last = !is_prefix && own == 0;
      if (own < merge.num_readers) {
        const int32_t request = first_request + own * merge.reader_step;
        is_last = is_last_to_arrive(request, 0, arrivals_of_sharer(p_.schedule.merges[request]));
      }
      const uint32_t of_warp = __ballot_sync(0xffffffffU, is_last);
      barrier_wait(id, 128);  // the flags before have been read
      if (thread_ % 32 == 0) store_shared_4(flags() + thread_ / 32 * 4, of_warp);
      barrier_wait(id, 128);
#pragma unroll 1
      for (int warp = 0; warp < 4; ++warp) {
        uint32_t left = load_shared_4(flags() + warp * 4);
#pragma unroll 1
        for (; left != 0; left &= left - 1) {
          const int32_t reader = first + warp * 32 + __ffs(static_cast<int>(left)) - 1;
          merge_with_prefixes(p_.schedule.merges[first_request + reader * merge.reader_step]);
        }
      }
    }
  }

  /// Merges the states of a request's rows in the order of their keys, then those of the prefixes
  /// that it reads, from the innermost outwards. A thread has 4 dims of a row.
  FLASHPLAN_DEVICE void merge_with_prefixes(const Merge& merge) const {
    constexpr int kQuads = S::kHeadDimVo / 4;
    constexpr int kStatesAtOnce = S::kWarpgroups > 2 ? 6 : 12;  // more are spilled
    const PackedRows& rows = merge.rows;
#pragma unroll 1
    for (int quad = thread_; quad < rows.num_rows * kQuads; quad += 128) {
      const int row = quad / kQuads;
      const int dim = quad % kQuads * 4;
      MergedRow merged;
      merged.reset();
      float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
      const Merge* from = &merge;
#pragma unroll 1
      for (;;) {
        const int32_t parent = from->parent;
        int64_t at = int64_t{from->first_partial_row} +
                     rows.row_in(from->rows, p_.schedule.group_size) + row;
#pragma unroll 1
        for (int32_t left = from->num_states; left > 0; left -= kStatesAtOnce) {
          float4 added[kStatesAtOnce];
          float lse[kStatesAtOnce];
#pragma unroll
          for (int i = 0; i < kStatesAtOnce; ++i) {
            const int64_t state = at + i * p_.schedule.tile_q;
            lse[i] = load_if(i < left, p_.workspace.partial_lse + state, -infinity());
            added[i] =
                load_4_if(i < left, p_.workspace.partial_o + state * S::kHeadDimVo + dim, 0.0F);
          }
          at += kStatesAtOnce * p_.schedule.tile_q;
#pragma unroll
          for (int i = 0; i < kStatesAtOnce; ++i) {
            o = merge_values(o, added[i], merged.add(lse[i]));
          }
        }
        if (parent < 0) break;
        from = p_.schedule.merges + parent;
      }
      write_four(rows, merge.kv_head, row, dim, scaled(o, merged.inverse()), merged.lse());
    }
  }

  /// Merges this warpgroup's rows. Few rows have a separate function with little code: where a
  /// launch ends with a merge, it mostly waits for instructions that no cache has yet.
  FLASHPLAN_DEVICE void merge_states(const Merge& merge) const {
    constexpr int kFewRows = 16;
    if constexpr (!S::Variant::kIsBuiltIn) {
      merge_few_rows(merge, first_row_, min(merge.rows.num_rows, first_row_ + 64));
    } else if (merge.rows.num_rows <= kFewRows) {
      merge_few_rows(merge, 0, merge.rows.num_rows);
    } else {
      merge_many_rows(merge);
    }
  }

  /// Merges rows [begin, end). A warp merges a row: each lane computes the weight of one state,
  /// then adds 4 dims of all states.
  FLASHPLAN_DEVICE void merge_few_rows(const Merge& merge, int begin, int end) const {
    constexpr int kQuads = S::kHeadDimVo / 4;
    constexpr int kQuadsOfLane = kQuads > 32 ? kQuads / 32 : 1;
    // Loads in flight hide the latency of memory.
    constexpr int kStatesAtOnce = !S::Variant::kIsBuiltIn ? 4
                                  : S::kWarpgroups > 2    ? 6
                                                          : 16 / kQuadsOfLane;
    const int lane = thread_ % 32;
    const int64_t state_rows = p_.schedule.tile_q;
#pragma unroll 1
    for (int row = begin + thread_ / 32; row < end; row += 4) {
      MergedRow merged;
      merged.reset();
      float4 o[kQuadsOfLane];
#pragma unroll
      for (float4& quad : o) quad = {0.0F, 0.0F, 0.0F, 0.0F};
      const int64_t first_row = int64_t{merge.first_partial_row} + row;
#pragma unroll 1
      for (int first = 0; first < merge.num_states; first += 32) {
        const int count = min(merge.num_states - first, 32);
        const int64_t from = first_row + first * state_rows;
        const float lse =
            load_if(lane < count, p_.workspace.partial_lse + from + lane * state_rows, -infinity());
        float weight = 1.0F;
        if constexpr (S::Variant::kUseSoftmax) {
          const float shrink = merged.add_of_lanes(lse, &weight);
#pragma unroll
          for (float4& quad : o) quad = scaled(quad, shrink);
        }
#pragma unroll 1
        for (int n = 0; n < count; n += kStatesAtOnce) {
          float4 added[kStatesAtOnce][kQuadsOfLane];
#pragma unroll
          for (int i = 0; i < kStatesAtOnce; ++i) {
#pragma unroll
            for (int q = 0; q < kQuadsOfLane; ++q) {
              const int64_t element = (from + (n + i) * state_rows) * S::kHeadDimVo;
              const int dim = (q * 32 + lane) % kQuads * 4;
              added[i][q] = load_4_if(n + i < count, p_.workspace.partial_o + element + dim, 0.0F);
            }
          }
#pragma unroll
          for (int i = 0; i < kStatesAtOnce; ++i) {
            const float of_state = __shfl_sync(0xffffffffU, weight, n + i);
#pragma unroll
            for (int q = 0; q < kQuadsOfLane; ++q) {
              o[q] = merge_values(o[q], added[i][q], {1.0F, of_state});
            }
          }
        }
      }
#pragma unroll
      for (int q = 0; q < kQuadsOfLane; ++q) {
        if (lane < kQuads) {
          write_four(merge.rows, merge.kv_head, row, (q * 32 + lane) * 4,
                     S::Variant::kUseSoftmax ? scaled(o[q], merged.inverse()) : o[q], merged.lse());
        }
      }
    }
  }

  /// A thread merges 4 dims of kAtOnce rows at a time, and adds states in the order of their keys.
  FLASHPLAN_DEVICE void merge_many_rows(const Merge& merge) const {
    constexpr int kAtOnce = S::kHeadDimVo > 128 ? 2 : 4;
    const PackedRows& rows = merge.rows;
    constexpr int kQuads = S::kHeadDimVo / 4;
    constexpr int kRowStep = 128 / kQuads;
    const int num_rows = min(rows.num_rows - first_row_, 64);
    const int dim = thread_ % kQuads * 4;
#pragma unroll 1
    for (int first = thread_ / kQuads; first < num_rows; first += kAtOnce * kRowStep) {
      MergedRow merged[kAtOnce];
      float4 o[kAtOnce];
      int64_t from[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = min(first + i * kRowStep, num_rows - 1);
        from[i] = int64_t{merge.first_partial_row} + first_row_ + r;
        merged[i].reset();
        o[i] = {0.0F, 0.0F, 0.0F, 0.0F};
      }
#pragma unroll 1
      for (int n = 0; n < merge.num_states; ++n) {
        float lse[kAtOnce];
        float4 added[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          lse[i] = load_if(true, p_.workspace.partial_lse + from[i], 0.0F);
          added[i] = load_4_if(true, p_.workspace.partial_o + from[i] * S::kHeadDimVo + dim, 0.0F);
          from[i] += p_.schedule.tile_q;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          o[i] = merge_values(o[i], added[i], merged[i].add(lse[i]));
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = first + i * kRowStep;
        if (r < num_rows) {
          write_four(rows, merge.kv_head, first_row_ + r, dim, scaled(o[i], merged[i].inverse()),
                     merged[i].lse());
        }
      }
    }
  }

  /// Writes dims [dim, dim + 4) of a row's result, and its lse with the first dims. It calls no
  /// function, because products may be in flight.
  FLASHPLAN_DEVICE void write_four(const PackedRows& rows, int32_t kv_head, int row, int dim,
                                   float4 o, float lse) const {
    const OutputRow to(p_, rows, kv_head, row);
    float scale = 1.0F;
    if (p_.variant.sinks != nullptr) add_sink(to.head, scale, lse);
    o = scaled(o, scale * v_scale(p_, kv_head));
    const Output output(p_, rows, kv_head, row);
    o = {output(o.x, dim), output(o.y, dim + 1), output(o.z, dim + 2), output(o.w, dim + 3)};
    if (writes_chunks()) {
      if (dim >= p_.tensors.head_dim_vo) return;
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p_.tensors.o.data) + to.o(p_) + dim) = {
          Element<S::kQ>::pack(o.x, o.y), Element<S::kQ>::pack(o.z, o.w)};
    } else {
      const float values[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (dim + i < p_.tensors.head_dim_vo) {
          store_one(to.o(p_) + dim + i, values[i]);
        }
      }
    }
    if (dim == 0 && p_.tensors.lse.data != nullptr) p_.tensors.lse.data[to.lse(p_)] = lse;
  }

  const AttentionParams& p_;
  const uint32_t base_;
  const int warpgroup_;
  const int first_row_;
  const int thread_;
};

}  // namespace flashplan::device
