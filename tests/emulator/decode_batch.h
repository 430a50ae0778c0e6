// SPDX-License-Identifier: Apache-2.0
// Batches of decodes for the sm80 kernels, run by the emulator.
#pragma once

#include "kernels/device/sm80/attention.h"

#include <cmath>
#include <vector>

#include "attention_batch.h"
#include "run_ctas.h"

namespace flashplan::test {

constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;

/// What is asked of a batch of decodes.
struct Decodes {
  std::vector<int32_t> kv_lens;
  int32_t num_kv_heads = 1;
  int32_t group_size = 1;
  int32_t qo_len = 1;
  int32_t page_size = 16;  // 0: ragged
  int32_t num_ctas = 1;
  int32_t window_left = -1;
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
  bool misses_pages = false;  // some keys that queries see have page ids outside of the cache
  float sharpness = 1.0F;     // standard deviation of the logits
  int32_t tail_dims = 0;      // the last dims of ragged keys, in a tensor of their own
  int32_t chunk_kv = 0;       // see ScheduleShape
};

/// For heads of kDims dims. `q_gain` multiplies the queries, and divides the logits.
template <typename Choices, int32_t kDims>
class DecodeBatch : public AttentionBatch {
  using T = device::Tiling<Choices, 228>;

 public:
  DecodeBatch(const Decodes& d, bool aligned, float q_gain = 1.0F)
      : AttentionBatch(numbers_of(d, aligned, q_gain)) {
    fill(q_gain, [](int32_t) { return 1.0F; });
    drop_pages_behind_keys();
    drop_pages_before_window();
    if (d.misses_pages) drop_some_pages();
    ScheduleShape shape = this->shape(T::kTileQ, T::kTileKv);
    const bool pairs_heads = device::kPairedDims<T> == kDims && d.chunk_kv == 0;
    shape.heads_at_once = pairs_heads ? 2 : 1;
    make_schedule(shape, T::kHeadDimVo);
    make_params();
    params_.workspace.scratch = scratch_.data();
    params_.workspace.scratch_bytes = static_cast<int64_t>(scratch_.size() * sizeof(float));
  }

  std::vector<float> run(const std::vector<int32_t>& order) {
    begin_run();
    run_one_by_one(params_, order, T::kThreads,
                   [&] { device::attention_kernel<Choices, true>(params_); });
    CHECK(leaves_no_trace());
    return results();
  }
  std::vector<float> run() { return run(in_order(n_.num_ctas)); }
  /// Whether a work tile of two kv heads has some of their keys.
  bool cuts_pairs() const {
    const auto& tiles = schedule().tiles;
    return std::any_of(tiles.begin(), tiles.end(), [](const WorkTile& tile) {
      return tile.merge >= 0 && tile.num_kv_heads == 2;
    });
  }

 private:
  static BatchNumbers numbers_of(const Decodes& d, bool aligned, float q_gain) {
    BatchNumbers n = {.qo_lens = std::vector<int32_t>(d.kv_lens.size(), d.qo_len),
                      .kv_lens = d.kv_lens,
                      .planned_lens = d.planned_lens,
                      .num_kv_heads = d.num_kv_heads,
                      .group_size = d.group_size,
                      .page_size = d.page_size,
                      .num_ctas = d.num_ctas,
                      .head_dim_qk = kDims,
                      .head_dim_vo = kDims,
                      .k_tail_dims = d.tail_dims,
                      .aligned = aligned,
                      .q_dtype = T::kQuery,
                      .kv_dtype = T::kKv,
                      .o_dtype = DType::kFloat32,
                      .mask = {true, d.window_left},
                      .logits_scale = d.sharpness / std::sqrt(static_cast<float>(kDims)) / q_gain,
                      .chunk_kv = d.chunk_kv};
    // Queries of 8 bits have a scale for each kv head.
    for (int32_t h = 0; h < d.num_kv_heads && T::kWidensQueries; ++h) {
      n.q_scales.push_back(0.7F + 0.3F * static_cast<float>(h % 3));
    }
    return n;
  }

  /// Pages before the window of a request get ids outside of the cache, and every second one the id
  /// of the cache's last page, which no request has, and whose rows are NaN.
  void drop_pages_before_window() {
    if (n_.page_size == 0) return;
    for (int32_t r = 0; r < batch_size(); ++r) {
      const int32_t position = kv_len(r) - n_.qo_lens[static_cast<size_t>(r)];
      const KeySpan seen = n_.mask.visible(position, {0, kv_len(r)});
      for (int32_t i = 0; (i + 1) * n_.page_size <= seen.begin; ++i) {
        places_.id(r, i) = i % 2 == 0 ? places_.num_pages() - 1 : kNoPages[i / 3 % 4];
      }
    }
  }
  /// Every third page, also of those that a query sees.
  void drop_some_pages() {
    for (int32_t r = 0; r < batch_size() && n_.page_size > 0; ++r) {
      for (int32_t i = (3 - r % 3) % 3; i < places_.most_pages(); i += 3) {
        places_.id(r, i) = kNoPages[i / 3 % 4];
      }
    }
  }
  static constexpr int32_t kNoPages[] = {-1, 0x7fffffff, -0x7fffffff - 1, 0x10000000};

  // A CTA keeps the state of a row that it merges, and each of its threads its own statistics.
  std::vector<float> scratch_ = std::vector<float>(T::kTileQ * T::kHeadDimVo / 4 * 6, NAN);
};

}  // namespace flashplan::test
