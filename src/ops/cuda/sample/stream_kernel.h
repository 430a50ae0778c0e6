// SPDX-License-Identifier: Apache-2.0
// sample() of many rows: one CTA reads each row, and does not hold it in shared memory. If top-k is
// small or min-p is given, the CTA lists the elements that may pass while it reads the row, and
// then draws from the list. With top-p or a large top-k alone, or without filters, it draws by
// draw_counted().
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/cluster_kernel.h"
#include "ops/cuda/sample/list.h"
#include "ops/cuda/sample/ways.h"

namespace flashplan::cuda {

/// draw_counted() as a function of its own, so that its registers do not make other loops spill.
template <DType kDType>
__device__ __noinline__ void draw_other(const SampleParams& p, int32_t row, CountedShared& shared,
                                        SampleShared& common) {
  draw_counted<kDType, false>(p, row, shared, common);
}

template <DType kDType>
class SampleStream : SampleList<kDType> {
  using Base = SampleList<kDType>;

 public:
  using Base::Base;

  /// Draws and writes the token. Returns false, and writes nothing, if the row has an error, or if
  /// its filters may keep more elements than the lists hold and cannot be applied without lists.
  /// The caller then draws the token or reports the error by draw_from_cluster().
  __device__ bool run() {
    if (threadIdx.x == 0) {
      row_.part.prefetch(kPrefetched);
      row_.shared.keys = KeyRange::empty();
      row_.read_parameters();
    }
    __syncthreads();
    if (row_.error_of_parameters() != SampleError::kNone) return false;
    const bool has_large_top_k = row_.shared.top_k > kMostStreamedTopK;
    const bool has_no_top_k = row_.shared.top_k >= row_.p.vocab;
    if (row_.shared.temperature != 0.0F && has_large_top_k && row_.shared.min_p == 0.0F) {
      const bool is_alone = has_no_top_k || row_.shared.top_p >= 1.0F;
      if (!is_alone || !is_countable(row_.p)) return false;
      draw_other<kDType>(row_.p, row_.index(), list_.counted, row_.shared);
      return true;
    }
    row_.scale = sampling::make_scale(0.0F, row_.shared.temperature, false);
    cut_ = sampling::keep_all(sampling::least_weight(row_.shared.min_p));
    top_k_ = row_.shared.temperature == 0.0F ? 1 : row_.shared.top_k;
    if (!probe()) return false;
    gather();
    if (!read_largest()) return false;
    if (!finish_lists()) {
      const bool is_all = top_k_ >= row_.p.vocab && row_.shared.top_p >= 1.0F;
      if (is_all) draw_from_min_p();
      return is_all;
    }
    if (draw_from_few_listed()) return true;
    filter();
    draw();
    return true;
  }

 private:
  using Base::bound_;
  using Base::cut_;
  using Base::draw;
  using Base::draw_from_few_listed;
  using Base::filter;
  using Base::finish_lists;
  using Base::kVec;
  using Base::list;
  using Base::list_;
  using Base::num_;
  using Base::read_largest;
  using Base::row_;
  using Base::top_k_;

  /// The first kProbed elements of the row are read before the others, to find a value that all
  /// candidates must reach.
  static constexpr int32_t kProbed = kRowWarps * RowPart<kDType, false>::kBlock;
  static constexpr int32_t kPrefetched = 3 * kProbed;  // keeps memory busy during probe()

  /// Finds a bound for the list in the row's first elements. False if the row has too few elements.
  __device__ bool probe() {
    if (row_.part.count() < kProbed) return false;
    float largest = -INFINITY;
    float smallest = INFINITY;  // the smallest of the words' largest elements
    row_.part.stream(kProbed, [&](const float (&x)[kVec], int i) {
      float of_word = x[0];
#pragma unroll
      for (int e = 1; e < kVec; ++e) of_word = fmaxf(of_word, x[e]);
      words()[i / kVec] = key_of(of_word);
      largest = fmaxf(largest, of_word);
      smallest = fminf(smallest, of_word);
    });
    share_keys(row_.shared, {key_of(smallest), key_of(largest)});
    const KeyRange probed = row_.shared.keys;
    __syncthreads();  // gather() changes the shared range
    if (cut_.min_weight != 0) {
      min_p_depth_ = row_.depth_of_min_p(cut_.min_weight);
      bound_ = sampling::value_of(probed.most) - min_p_depth_;
    }
    if (top_k_ > kMostStreamedTopK) return true;
    // At least top_k words have a largest element that reaches the least key of the range that is
    // found, so at least top_k elements reach it. Keys more than kSpan below the row's largest key
    // found so far count as one key, so that the others are divided into narrow ranges.
    constexpr int kNumWords = kProbed / kVec;
    constexpr uint32_t kSpan = 1U << 26;  // a range of keys: eight powers of two
    const uint32_t low = probed.most - min(probed.most - probed.least, kSpan);
    KeyRange keys{low, probed.most};
    keys.narrow(row_.search(), static_cast<uint64_t>(top_k_), 0, [&](const auto& add) {
      for (int w = static_cast<int>(threadIdx.x); w < kNumWords; w += kRowThreads) {
        add(max(words()[w], low), 1U);
      }
    });
    const uint32_t least = keys.least == low ? probed.least : keys.least;
    bound_ = fmaxf(bound_, sampling::value_of(least));
    return true;
  }

  /// Draws with min-p alone, which keeps more than the lists hold, and writes the token.
  __device__ void draw_from_min_p() {
    const CountedRow<false> row_to_draw{.random = row_.shared.random, .scale = row_.scale};
    KeptOfRow<kDType, false> kept(row_.p, row_.index(), row_to_draw, list_.counted, row_.shared);
    kept.keep_all(cut_.min_weight);
    kept.write_token();
  }

  /// The keys of the probed words' largest elements, in the memory of the lists.
  __device__ uint32_t* words() { return &list_.keys[0][0]; }

  /// Lists the elements that reach the bound, which rises with the largest value where there is
  /// min-p; finds the row's largest value.
  __device__ void gather() {
    float largest = -INFINITY;  // NaN if there is one
    float bound = bound_;
    num_ = 0;
    row_.part.stream(
        row_.part.count(),
        [&](const float (&x)[kVec], int i) {
          float of_word = x[0];
#pragma unroll
          for (int e = 1; e < kVec; ++e) of_word = larger_or_nan(of_word, x[e]);
          largest = larger_or_nan(largest, of_word);
          if (__ballot_sync(~0U, of_word >= bound) != 0) list(x, i, bound);
        },
        [&](int /*block*/) {
          if (cut_.min_weight == 0) return;
          const uint32_t most = __reduce_max_sync(~0U, key_of(largest));
          // After each of its blocks, a warp raises its bound to what `most` of all warps allows.
          if (lane_of_thread() == 0) atomicMax(&row_.shared.keys.most, most);
          const uint32_t of_all = *static_cast<volatile uint32_t*>(&row_.shared.keys.most);
          bound = fmaxf(bound, sampling::value_of(of_all) - min_p_depth_);
        });
    share_keys(row_.shared, {~0U, key_of(largest)});
  }

  float min_p_depth_ = 0.0F;  // how far below the largest value min-p may keep elements
};

namespace {

constexpr int kStreamCtasOfSm = 2;  // with a third, registers would be spilled

template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, kStreamCtasOfSm)
    stream_kernel(const __grid_constant__ RowParams<SampleParams> params) {
  __shared__ SampleShared shared;
  extern __shared__ float4 memory[];
  auto* floats = reinterpret_cast<float*>(memory);
  if (is_without_row(params.p, row_of_cluster())) return;
  if (SampleStream<kDType>(params.p, params.split, shared, floats).run()) return;
  __syncthreads();
  draw_from_cluster<kDType, false>(params, shared, floats);
}

}  // namespace

template <DType kDType>
Status sample_stream(const SampleParams& p, Device device, Stream stream) noexcept {
  const RowParams<SampleParams> params{p, {.part = p.vocab, .held = false}};
  const int bytes = SampleList<kDType>::kListed * 4 + static_cast<int>(sizeof(StreamList));
  return launch(stream_kernel<kDType>, grid_of_rows(p, 1, device, bytes), device, stream, params);
}

}  // namespace flashplan::cuda
