// SPDX-License-Identifier: Apache-2.0
// The range of values that has the threshold of top-p or a large top-k in a row that one CTA reads:
// by the bins of SampleCounted or, below these, by a histogram of keys.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/counted.h"

namespace flashplan::cuda {

/// The number of elements (top-k) or the mass in units of the bins (top-p) that the filter wants,
/// plus or minus the largest error of the sum of bins that is compared with it.
template <bool kFromProbs>
__device__ double wanted_of_bins(const SampleParams& p, int32_t row,
                                 const CountedRow<kFromProbs>& counted, double sign_of_error) {
  const int32_t top_k = p.top_k.of(row);
  if (top_k < p.vocab) return top_k * (1.0 + sign_of_error * 1e-3);
  using Values = ValueBins<kFromProbs>;
  const double wanted = p.top_p.of(row) * Values::mass_of_row(counted.total);
  const double rounding = rounding_of_row<kFromProbs>(p.vocab, counted.scale.largest);
  return wanted + sign_of_error * (2.0 * Values::kError * wanted + rounding);
}

/// The range of values that contains the threshold, as far as the sums of bins tell. The bins must
/// have all elements of the row. All threads of the CTA call it, and have read the bins when it
/// returns.
template <bool kFromProbs>
__device__ Range range_of_threshold(const SampleParams& p, int32_t row,
                                    const CountedRow<kFromProbs>& counted, CountedShared& shared,
                                    SampleShared& common) {
  using Values = ValueBins<kFromProbs>;
  const bool by_count = p.top_k.of(row) < p.vocab;
  const float place_of_largest = counted.bins.place_of(counted.scale.largest);
  const int first = first_bin(static_cast<int>(threadIdx.x));
  const auto amount_of = [&](int b) {
    // The last bin is not summed: its logits are listed, and of probabilities it has only -0.
    if (b < 0 || b == kValueBins - 1) return uint64_t{0};
    if (by_count) return uint64_t{Values::count_in(shared.bins[b], b)};
    return static_cast<uint64_t>(Values::mass(shared.bins[b], b, place_of_largest));
  };
  uint64_t own = 0;
#pragma unroll 1
  for (int b = first; b > first - kBinsOfThread; --b) own += amount_of(b);
  if (threadIdx.x == 0) common.selected[0] = common.selected[1] = 0;
  const SumsOfCta sums = sums_of_cta(own, common.warp_values);
  const uint64_t above_bins = by_count ? shared.num_listed : counted.listed_mass;
  const auto begin = static_cast<double>(above_bins + sums.before);
  const auto end = static_cast<double>(above_bins + sums.before + own);
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    const double wanted = wanted_of_bins(p, row, counted, side == 0 ? -1.0 : 1.0);
    if (threadIdx.x == 0 && wanted <= begin) common.selected[side] = kValueBins - 1;
    if (wanted <= begin || wanted > end) continue;
    double reached = begin + static_cast<double>(amount_of(first));
    int b = first;
    while (reached < wanted) reached += static_cast<double>(amount_of(--b));
    common.selected[side] = static_cast<uint32_t>(b);
  }
  __syncthreads();
  const auto high = static_cast<int>(common.selected[0]);
  const auto low = static_cast<int>(common.selected[1]);
  __syncthreads();
  return {
      low == 0 ? -INFINITY : counted.bins.value_of(static_cast<float>(low) - 0.1F),
      high == kValueBins - 1 ? INFINITY : counted.bins.value_of(static_cast<float>(high) + 1.1F)};
}

/// Divides a range of keys into 8,192 bins, and returns the keys of one bin: the one in which the
/// number of the row's elements, counted from the largest key down, reaches `wanted`, or the lowest
/// bin if none does. Masked elements, which may be most of the row, are not counted. The function
/// is not inlined, so that its registers make no other loop spill.
template <DType kDType>
__device__ __noinline__ KeyRange divide_by_counts(RowPart<kDType, false> row, KeyRange keys,
                                                  uint64_t wanted, CountedShared& shared,
                                                  SampleShared& common) {
  constexpr int kLogBins = 13;
  static_assert(1 << kLogBins == kValueBins);
  constexpr int kVec = RowPart<kDType, false>::kVec;
  const int shift = keys.shift(kLogBins);
  __syncthreads();  // all have read the list, which is in the memory of the bins
#pragma unroll 1
  for (int b = static_cast<int>(threadIdx.x); b < kValueBins; b += kRowThreads) {
    shared.bins[b] = 0;
  }
  if (threadIdx.x == 0) common.selected[0] = 0;
  __syncthreads();
  uint32_t num_above = 0;
  row.stream(row.count(), [&](const float (&x)[kVec], int i) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const uint32_t key = key_of(x[e]);
      if (i + e >= row.count() || x[e] == -INFINITY) continue;
      num_above += key > keys.most ? 1U : 0U;
      if (key >= keys.least && key <= keys.most) {
        atomicAdd(&shared.bins[(key - keys.least) >> shift], 1U);
      }
    }
  });
  const uint64_t above = sums_of_cta(num_above, common.warp_values).all;
  __syncthreads();  // all have read the sums of warps, and all have added to the bins
  const int first = first_bin(static_cast<int>(threadIdx.x));
  uint64_t own = 0;
#pragma unroll 1
  for (int b = first; b > max(first - kBinsOfThread, -1); --b) own += shared.bins[b];
  uint64_t reached = above + sums_of_cta(own, common.warp_values).before;
  if (reached < wanted && wanted <= reached + own) {
    int b = first;
    while ((reached += shared.bins[b]) < wanted) --b;
    common.selected[0] = static_cast<uint32_t>(b);
  }
  __syncthreads();
  keys.narrow(static_cast<int>(common.selected[0]), shift);
  return keys;
}

}  // namespace flashplan::cuda
