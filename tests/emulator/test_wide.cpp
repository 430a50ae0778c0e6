// SPDX-License-Identifier: Apache-2.0
// The sm90_wide kernels, run by the emulator, against double arithmetic: pages and ragged keys, by
// boxes and row by row, masks, windows, softcap, sinks, several kv heads, cut tiles, lengths that
// are shorter than planned, fewer dims than the kernel's, and logits that grow. CTAs run at the
// same time, and their warps in a random order. Memory that must not be read is NaN.
#include "kernels/device/sm90/wide/attention.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attention_batch.h"
#include "kernels/device/traits.h"
#include "run_ctas.h"
#include "run_together.h"

namespace flashplan::test {
namespace {

constexpr int kDims = 512;
constexpr float kSoftcap = 3.0F;

struct Requests {
  std::vector<int32_t> qo_lens;
  std::vector<int32_t> kv_lens;
  int32_t group_size = 1;
  int32_t num_kv_heads = 1;
  int32_t page_size = 0;  // 0: ragged
  int32_t num_ctas = 2;
  int32_t head_dim_qk = 512;
  int32_t head_dim_vo = 512;
  int32_t tail_dims = 0;  // of ragged keys, in a tensor that all heads share
  int32_t window_left = -1;
  bool causal = true;
  bool has_mask = false;  // random bits
  bool by_rows = false;   // no maps
  bool aligned = true;
  bool writes_floats = false;
  bool has_sinks = false;
  bool has_k_scales = false;
  int32_t missing_page = -1;               // a page of request 0 that the cache does not have
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
  float growth = 1.0F;                     // of keys from 64 to 64
};

template <DType kDType, typename Variant>
class WideBatch : public AttentionBatch {
  using Choices = device::Traits<kDType, kDType, kDims, kDims, Variant>;
  using S = device::WideShape<Choices>;

 public:
  explicit WideBatch(const Requests& r) : AttentionBatch(numbers_of(r)) {
    fill(1.0F, [&](int32_t key) { return std::pow(r.growth, static_cast<float>(key / 64)); });
    drop_pages_behind_keys();
    if (r.missing_page >= 0) places_.id(0, r.missing_page) = 0x7fffffff;
    ScheduleShape shape = this->shape(S::kTileQ, S::kTileKv);
    shape.item_steps = 16;
    shape.uncut_part = 16;
    make_schedule(shape, kDims);
    make_params();
    make_maps(shape, kDims, kDims, r.by_rows);
    const bool may_map = r.aligned && !r.by_rows && S::kTileQ % r.group_size == 0;
    CHECK_EQ(params_.maps.has_q, may_map);
  }

  void run(unsigned seed) {
    begin_run();
    run_together(n_.num_ctas, S::kThreads, seed, name_barriers,
                 [&] { device::sm90_wide_kernel<Choices>(params_); });
    CHECK(leaves_no_trace());
  }

 private:
  static BatchNumbers numbers_of(const Requests& r) {
    BatchNumbers n = {.qo_lens = r.qo_lens,
                      .kv_lens = r.kv_lens,
                      .planned_lens = r.planned_lens,
                      .num_kv_heads = r.num_kv_heads,
                      .group_size = r.group_size,
                      .page_size = r.page_size,
                      .num_ctas = r.num_ctas,
                      .head_dim_qk = r.head_dim_qk,
                      .head_dim_vo = r.head_dim_vo,
                      .k_tail_dims = r.tail_dims,
                      .aligned = r.aligned,
                      .q_dtype = kDType,
                      .kv_dtype = kDType,
                      .o_dtype = r.writes_floats ? DType::kFloat32 : kDType,
                      .mask = {r.causal, r.window_left},
                      .has_mask = r.has_mask,
                      .has_sinks = r.has_sinks,
                      .logits_scale = 2.0F / std::sqrt(static_cast<float>(r.head_dim_qk)),
                      .softcap = std::is_same_v<Variant, device::Softcap> ? kSoftcap : 0.0F};
    for (int32_t h = 0; h < r.num_kv_heads && r.has_k_scales; ++h) {
      n.k_scales.push_back(0.5F + 0.25F * static_cast<float>(h));
    }
    return n;
  }

  static void name_barriers() {
    const device::MlaSmem<S> smem(reinterpret_cast<device::MlaSharedMemory<S>&>(device::smem));
    for (uint32_t block = 0; block < S::kSlots; ++block) {
      for (int part = 0; part < 2; ++part) {
        const uint32_t index = block * 2 + static_cast<uint32_t>(part);
        device::name_mbarriers("keys_full", smem.full(block, part).barrier, "keys_empty",
                               smem.empty(block, part), index);
        device::name_mbarriers("values_full", smem.values_full(block, part).barrier, "values_empty",
                               smem.values_empty(block, part), index);
      }
    }
    for (uint32_t i = 0; i < S::kContexts; ++i) {
      device::name_mbarriers("context_full", smem.context_full(i), "context_empty",
                             smem.context_empty(i), i);
    }
  }
};

template <DType kDType = DType::kBFloat16, typename Variant = device::Standard>
void check(const Requests& requests, const char* what) {
  WideBatch<kDType, Variant> batch(requests);
  check_together(batch, 0.02, what);
}

TEST(blocks_of_a_tile) {
  for (const int32_t kv_len : {1, 64, 65, 128, 192, 250}) {
    check({.qo_lens = {1}, .kv_lens = {kv_len}, .num_ctas = 1}, "one tile");
  }
  check({.qo_lens = {70, 3, 5, 0}, .kv_lens = {130, 3, 64, 40}, .group_size = 2}, "many tiles");
}
TEST(pages) {
  for (const int32_t page_size : {8, 16, 24, 64, 128}) {
    check({.qo_lens = {40, 3}, .kv_lens = {150, 70}, .group_size = 2, .page_size = page_size},
          "boxes");
  }
  check({.qo_lens = {20, 3}, .kv_lens = {150, 70}, .page_size = 5}, "small pages");
  check({.qo_lens = {20}, .kv_lens = {150}, .page_size = 16, .missing_page = 2}, "a missing page");
}
TEST(rows) {
  check({.qo_lens = {20, 9}, .kv_lens = {150, 70}, .page_size = 16, .by_rows = true}, "no maps");
  check({.qo_lens = {20, 9}, .kv_lens = {150, 70}, .by_rows = true}, "no maps");
  check({.qo_lens = {20}, .kv_lens = {90}, .aligned = false, .writes_floats = true}, "not aligned");
  check({.qo_lens = {20}, .kv_lens = {90}, .group_size = 3}, "groups of 3");
  check({.qo_lens = {20}, .kv_lens = {90}, .num_kv_heads = 2, .tail_dims = 72},
        "keys in two parts");
  check({.qo_lens = {20}, .kv_lens = {90}, .head_dim_qk = 511, .head_dim_vo = 257}, "odd dims");
}
TEST(heads) {
  check({.qo_lens = {10, 70},
         .kv_lens = {90, 200},
         .group_size = 2,
         .num_kv_heads = 3,
         .page_size = 16,
         .has_k_scales = true},
        "heads of pages");
  check({.qo_lens = {10, 0, 3}, .kv_lens = {90, 5, 3}, .num_kv_heads = 4, .has_sinks = true},
        "heads of ragged keys");
}
TEST(masks) {
  check({.qo_lens = {70}, .kv_lens = {130}, .causal = false}, "full");
  check({.qo_lens = {70}, .kv_lens = {300}, .page_size = 16, .window_left = 50}, "a window");
  check({.qo_lens = {70}, .kv_lens = {300}, .window_left = 100}, "a window of ragged keys");
  check({.qo_lens = {70, 5}, .kv_lens = {200, 90}, .page_size = 16, .has_mask = true}, "bits");
  check<DType::kBFloat16, device::Softcap>({.qo_lens = {70}, .kv_lens = {150}, .page_size = 16},
                                           "softcap");
}
TEST(cut_tiles) {
  check({.qo_lens = {6}, .kv_lens = {700}, .group_size = 2, .num_ctas = 4, .has_sinks = true},
        "pieces");
  check({.qo_lens = {3}, .kv_lens = {500}, .num_kv_heads = 2, .page_size = 16, .num_ctas = 4},
        "merges of few rows");
  check({.qo_lens = {70, 2, 5}, .kv_lens = {330, 0, 70}, .num_kv_heads = 2, .num_ctas = 3},
        "several tiles");
  check({.qo_lens = {4, 4},
         .kv_lens = {330, 40},
         .page_size = 16,
         .num_ctas = 5,
         .planned_lens = {1500, 200}},
        "pieces without keys");
}
TEST(fewer_dims) {
  for (const int32_t dims : {320, 384, 448}) {
    check({.qo_lens = {20},
           .kv_lens = {150},
           .page_size = 16,
           .num_ctas = 1,
           .head_dim_qk = dims,
           .head_dim_vo = dims},
          "whole blocks");
  }
  check({.qo_lens = {20}, .kv_lens = {150}, .num_ctas = 4, .head_dim_qk = 384, .head_dim_vo = 320},
        "different dims");
  check(
      {.qo_lens = {20}, .kv_lens = {150}, .num_ctas = 1, .head_dim_vo = 128, .writes_floats = true},
      "a half");
}
TEST(logits_that_grow) {
  check({.qo_lens = {3}, .kv_lens = {450}, .num_ctas = 1, .growth = 2.0F}, "growing");
  check({.qo_lens = {3}, .kv_lens = {450}, .growth = 0.5F}, "shrinking");
}
TEST(float16) {
  check<DType::kFloat16>({.qo_lens = {70}, .kv_lens = {150}, .page_size = 16}, "float16");
}

}  // namespace
}  // namespace flashplan::test
