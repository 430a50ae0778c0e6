// SPDX-License-Identifier: Apache-2.0
// sample() with any filters: a cluster of CTAs keeps a row in its shared memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ops/cuda/sample/filters.h"
#include "ops/cuda/sample/ways.h"

namespace flashplan::cuda {

/// Draws and writes the token, or returns why there is none. After the last barrier of the
/// cluster no CTA touches the memory of another one, so each may end when it likes.
///
/// With top-p alone, tokens are tried until top-p keeps one. `kThresholdFirst`: the threshold of
/// top-p is found before the tries, since log-probabilities need it, and tells which token is kept.
/// Else the threshold is found only if top-p drops all tries.
template <bool kThresholdFirst, class Row>
__device__ SampleError choose_token(Row& row) {
  const SampleError of_row = load_row(row);
  const SampleError error = row.error_of_parameters();
  if (error != SampleError::kNone) return error;
  if (of_row != SampleError::kNone) return of_row;
  if (row.shared.temperature == 0.0F) return take_largest(row);
  row.scale = sampling::make_scale(row.largest, row.shared.temperature, Row::kIsFromProbs);
  if (!row.has_filters()) return draw_from_all(row);
  Cut cut = sampling::keep_all(sampling::least_weight(row.shared.min_p));
  const bool is_tried =
      sampling::is_tried(row.shared.top_k, row.shared.top_p, row.shared.min_p, row.p.vocab);
  if (is_tried && !kThresholdFirst) {
    const TriedToken tried = draw_by_tries(row, 0);
    if (tried.error != SampleError::kNone) return tried.error;
    if (tried.token != 0) {
      write_tried(row, tried.token, 1);
      return SampleError::kNone;
    }
  }
  if (!is_tried && (Row::kIsFromProbs || row.p.joint)) {
    const uint64_t all = count_row(row);
    if (Row::kIsFromProbs && !sampling::sums_to_one(all, row.largest))
      return SampleError::kProbabilities;
  }
  if (!row.p.joint && draw_from_gathered(row, cut)) return SampleError::kNone;
  const uint64_t total = apply_filters(row, &cut);
  if (is_tried && kThresholdFirst) {
    const TriedToken tried = draw_by_tries(row, cut.key);
    if (tried.error != SampleError::kNone) return tried.error;
    if (tried.token != 0) {
      write_tried(row, tried.token, total);
      return SampleError::kNone;
    }
    row.has_candidates = false;  // the tries have overwritten row.exchange
  }
  draw(row, cut);
  return SampleError::kNone;
}

/// Writes a token that top-p keeps. `total`: the mass of all that top-p keeps, for the
/// log-probability.
template <class Row>
__device__ void write_tried(Row& row, uint64_t token, uint64_t total) {
  if (!is_first_thread_of_cluster()) return;
  const uint32_t weight = row.weight_of(sampling::value_of(static_cast<uint32_t>(token >> 32)));
  write_token(row, static_cast<uint32_t>(token), weight, total);
}

/// Writes the first id of the largest value.
template <class Row>
__device__ SampleError take_largest(Row& row) {
  uint32_t first = ~0U;
  for (int i = static_cast<int>(threadIdx.x) * 4; i < row.part.count(); i += kRowThreads * 4) {
    float x[4];
    row.read(i, x);
#pragma unroll
    for (int e = 3; e >= 0; --e) {
      if (x[e] == row.largest) first = min(first, static_cast<uint32_t>(row.part.begin() + i + e));
    }
  }
  first = ~row.largest_of_cluster(~first);
  if (is_first_thread_of_cluster()) {
    row.write(static_cast<int32_t>(first), 0.0F, SampleError::kNone);
  }
  return SampleError::kNone;
}

/// Draws and writes the token of a row, or writes why there is none.
template <bool kThresholdFirst, class Row>
__device__ void draw_row(Row& row) {
  start_row(row);
  const SampleError error = choose_token<kThresholdFirst>(row);
  if (error != SampleError::kNone && is_first_thread_of_cluster()) {
    row.write(-1, NAN, error);
  }
}

/// Draws from a row by draw_row(), for kernels whose own method cannot draw from this row. It is
/// not inlined, so that its registers do not make the loops of those kernels spill.
template <DType kDType, bool kFromProbs>
__device__ __noinline__ void draw_from_cluster(const RowParams<SampleParams>& params,
                                               SampleShared& shared, float* memory) {
  SampleRow<kDType, kFromProbs, false> row(params.p, params.split, shared, memory);
  draw_row<true>(row);
}

namespace {

template <DType kDType, bool kFromProbs, bool kHeld, bool kThresholdFirst>
__global__ void __launch_bounds__(kRowThreads, kRowCtasOfSm)
    sample_kernel(const __grid_constant__ RowParams<SampleParams> params) {
  __shared__ SampleShared shared;
  extern __shared__ float4 memory[];
  if (is_without_row(params.p, row_of_cluster())) return;
  SampleRow<kDType, kFromProbs, kHeld> row(params.p, params.split, shared,
                                           reinterpret_cast<float*>(memory));
  draw_row<kThresholdFirst>(row);
}

}  // namespace

/// How many CTAs share a row.
inline int ctas_that_draw(const SampleParams& p, Device device) {
  constexpr int kMost = kMaxCluster / 2;  // sixteen CTAs bound no larger top-k (most_bounded())
  const int32_t top_k = p.top_k.each != nullptr ? most_bounded(kMost) : p.top_k.all;
  if (p.joint || top_k > most_bounded(kMost))
    return ctas_that_hold(p.num_rows, p.vocab, device, most_filtering_ctas(device));
  // A small top-k: the first CTA draws alone, so more CTAs gain little, but their warps must send
  // enough keys for a bound. A CTA with fewer elements than these has threads without one.
  constexpr int32_t kElementsOfCta = 4 * kRowThreads;
  int least = 1;
  while (least < kMost && most_bounded(least) < top_k && p.vocab > least * kElementsOfCta) {
    least *= 2;
  }
  return ctas_that_hold(p.num_rows, p.vocab, device, num_sms(device), least);
}

template <DType kDType>
Status sample_cluster(const SampleParams& p, Device device, Stream stream) noexcept {
  const RowDivision division = division_of_row(ctas_that_draw(p, device));
  const auto launch = [&](auto from_probs) {
    constexpr bool kFromProbs = decltype(from_probs)::value;
    const RowKernels<SampleParams> kernels{p.logprobs != nullptr
                                               ? sample_kernel<kDType, kFromProbs, true, true>
                                               : sample_kernel<kDType, kFromProbs, true, false>,
                                           sample_kernel<kDType, kFromProbs, false, true>};
    return launch_rows(kernels, p, device, stream, division);
  };
  return p.from_probs ? launch(std::true_type{}) : launch(std::false_type{});
}

}  // namespace flashplan::cuda
