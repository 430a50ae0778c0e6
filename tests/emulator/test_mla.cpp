// SPDX-License-Identifier: Apache-2.0
// The sm90_mla kernels, run by the emulator, against double arithmetic: keys by boxes and row by
// row, of 16 bits and of 8, tiles of one block and more, cut and whole, without keys, shorter than
// planned, of one tensor or two, and logits that grow. Memory that must not be read is NaN.
#include "kernels/device/sm90/mla/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_batch.h"
#include "kernels/device/traits.h"
#include "run_ctas.h"
#include "run_together.h"

namespace flashplan::test {
namespace {

constexpr DType kBf16 = DType::kBFloat16;

struct Latents {
  std::vector<int32_t> kv_lens;
  int32_t num_heads = 16;
  int32_t qo_len = 1;
  int32_t page_size = 64;  // 0: ragged
  int32_t num_ctas = 1;
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
  bool by_rows = false;                    // no maps
  bool aligned = true;
  bool has_tails = false;     // the last dims are in tensors of their own
  bool writes_pairs = false;  // o in 16 bits
  bool has_sinks = false;
  float growth = 1.0F;  // of keys from block to block
  int32_t window = -1;  // keys before its own that a query sees; -1: all
};

/// For a kernel of kQk dims, of one CTA for each queue or of pairs.
template <int32_t kQk, DType kKv, bool kPairs>
class MlaBatch : public AttentionBatch {
  static constexpr int32_t kVo = 512;
  using Choices = device::Traits<kBf16, kKv, kQk, kVo, device::Standard>;
  using S = device::MlaShape<Choices, kPairs>;

 public:
  explicit MlaBatch(const Latents& l) : AttentionBatch(numbers_of(l)) {
    fill(1.0F, [&](int32_t key) { return std::pow(l.growth, static_cast<float>(key / 64)); });
    drop_pages_behind_keys();
    ScheduleShape shape = this->shape(S::kRowsOfTile, S::kTileKv);
    shape.item_steps = 16;
    make_schedule(shape, kVo);
    make_params();
    make_maps(shape, kQk, kVo, l.by_rows);
    CHECK_EQ(params_.maps.has_q, l.aligned && !l.by_rows);
  }

  void run(const std::vector<int32_t>& order) {
    begin_run();
    if constexpr (kPairs) {
      run_pairs(params_, order, S::kThreads, ++num_runs_, name_barriers,
                [&] { device::sm90_mla_pairs_kernel<Choices>(params_); });
    } else {
      run_one_by_one(params_, order, S::kThreads, [&] {
        if (threadIdx.x == 0) name_barriers();
        device::sm90_mla_kernel<Choices>(params_);
      });
    }
    CHECK(leaves_no_trace());
  }

 private:
  static BatchNumbers numbers_of(const Latents& l) {
    const int32_t tail_dims = l.has_tails ? kQk - kVo : 0;
    return {.qo_lens = std::vector<int32_t>(l.kv_lens.size(), l.qo_len),
            .kv_lens = l.kv_lens,
            .planned_lens = l.planned_lens,
            .group_size = l.num_heads,
            .page_size = l.page_size,
            .num_ctas = l.num_ctas,
            .head_dim_qk = kQk,
            .head_dim_vo = kVo,
            .q_tail_dims = tail_dims,
            .k_tail_dims = tail_dims,
            .shared_kv = true,
            .aligned = l.aligned,
            .kv_dtype = kKv,
            .o_dtype = l.writes_pairs ? kBf16 : DType::kFloat32,
            .mask = {.causal = true, .window_left = l.window},
            .has_sinks = l.has_sinks,
            .logits_scale = 1.0F / std::sqrt(static_cast<float>(kQk))};
  }

  /// So that a part of a slot that is filled before it is free is an error.
  static void name_barriers() {
    using Memory = device::MlaSharedMemory<S>;
    const device::MlaSmem<S> smem(*reinterpret_cast<Memory*>(device::smem));
    for (uint32_t i = 0; i < 2 * S::kSlots; ++i) {
      const auto part = static_cast<int>(i % 2);
      device::name_mbarriers("full", smem.full(i / 2, part).barrier, "empty",
                             smem.empty(i / 2, part), i);
    }
  }

  unsigned num_runs_ = 0;
};

template <int32_t kQk = 576, DType kKv = kBf16, bool kPairs = false>
void check(const Latents& latents, const char* what) {
  MlaBatch<kQk, kKv, kPairs> batch(latents);
  check_one_by_one(batch, latents.num_ctas, 0.02, what);
}

TEST(blocks_of_a_tile) {
  for (const int32_t kv_len : {1, 64, 65, 128, 192, 250}) {
    check({.kv_lens = {kv_len}}, "one tile");
  }
  check({.kv_lens = {64, 130, 1, 0, 192}, .writes_pairs = true}, "many tiles");
  check({.kv_lens = {130, 70}, .num_heads = 96}, "tiles across tokens");
}
TEST(pages) {
  for (const int32_t page_size : {0, 1, 5, 8, 16, 24, 128}) {
    check({.kv_lens = {150, 70}, .qo_len = 3, .page_size = page_size}, "pages");
  }
  check({.kv_lens = {150, 70}, .by_rows = true, .writes_pairs = true}, "no maps");
  check({.kv_lens = {150, 70}, .by_rows = true, .aligned = false}, "not aligned");
  check({.kv_lens = {90}, .page_size = 16, .has_tails = true}, "two tensors");
  check({.kv_lens = {90}, .page_size = 1, .by_rows = true, .has_tails = true}, "two tensors");
}
TEST(cut_tiles) {
  check({.kv_lens = {700}, .num_heads = 12, .num_ctas = 4, .has_sinks = true}, "pieces");
  check({.kv_lens = {500}, .num_heads = 3, .num_ctas = 4}, "merges of few rows");
  check({.kv_lens = {330, 0, 70}, .num_heads = 40, .qo_len = 2, .num_ctas = 3}, "several tiles");
  check({.kv_lens = {330, 40}, .num_ctas = 5, .planned_lens = {1500, 200}}, "pieces without keys");
}
TEST(logits_that_grow) {
  check({.kv_lens = {450}, .growth = 2.0F}, "growing");
  check({.kv_lens = {450}, .num_ctas = 2, .growth = 0.5F}, "shrinking");
}
template <DType kKv>
void check_8_bits() {
  for (const int32_t page_size : {0, 1, 5, 16, 64, 128}) {
    check<576, kKv>({.kv_lens = {150, 64, 70}, .qo_len = 3, .page_size = page_size}, "pages");
  }
  for (const int32_t kv_len : {1, 64, 65, 128, 250}) {
    check<576, kKv>({.kv_lens = {kv_len, 0, kv_len}, .writes_pairs = true}, "tiles");
  }
  check<576, kKv>({.kv_lens = {150, 70}, .page_size = 16, .by_rows = true, .aligned = false},
                  "not aligned");
  check<576, kKv>({.kv_lens = {700}, .num_heads = 12, .num_ctas = 4, .has_sinks = true}, "pieces");
  check<576, kKv>({.kv_lens = {330, 0, 70}, .num_heads = 40, .qo_len = 2, .num_ctas = 3}, "cut");
  check<576, kKv>({.kv_lens = {330, 40}, .num_ctas = 5, .planned_lens = {1500, 200}}, "shorter");
  check<576, kKv>({.kv_lens = {450}, .num_ctas = 2, .growth = 1.5F}, "growing");
}
TEST(keys_of_8_bits) {
  check_8_bits<DType::kFloat8E4M3>();
  check_8_bits<DType::kFp8DsMla>();
  for (const int32_t page_size : {1, 64}) {
    check<576, DType::kFloat8E4M3>(
        {.kv_lens = {90, 200}, .page_size = page_size, .has_tails = true}, "two tensors");
    check<512, DType::kFloat8E4M3>({.kv_lens = {90, 200}, .page_size = page_size}, "no tail");
  }
}
template <DType kKv>
void check_pairs() {
  constexpr auto check_pair = [](const Latents& latents, const char* what) {
    check<576, kKv, true>(latents, what);
  };
  for (const int32_t kv_len : {1, 64, 65, 250}) {
    check_pair({.kv_lens = {kv_len, 0, kv_len}, .num_heads = 128, .writes_pairs = true}, "tiles");
  }
  for (const int32_t page_size : {0, 1, 5, 64}) {
    check_pair({.kv_lens = {150, 64, 70}, .num_heads = 64, .qo_len = 2, .page_size = page_size},
               "pages");
  }
  check_pair({.kv_lens = {150, 70}, .num_heads = 40, .qo_len = 5}, "short tiles");
  check_pair({.kv_lens = {150, 300}, .num_heads = 16, .num_ctas = 3, .has_sinks = true},
             "rows for one CTA");
  check_pair({.kv_lens = {150, 70}, .num_heads = 80, .by_rows = true, .aligned = false},
             "not aligned");
  check_pair({.kv_lens = {700}, .num_heads = 128, .num_ctas = 4, .has_sinks = true}, "pieces");
  check_pair({.kv_lens = {330, 0, 70}, .num_heads = 80, .qo_len = 2, .num_ctas = 3}, "cut");
  check_pair({.kv_lens = {330, 40}, .num_heads = 72, .num_ctas = 5, .planned_lens = {1500, 200}},
             "shorter");
  check_pair({.kv_lens = {450}, .num_heads = 128, .num_ctas = 2, .growth = 1.5F}, "growing");
  check_pair({.kv_lens = {300, 90}, .num_heads = 32, .qo_len = 7, .window = 40}, "window");
}
TEST(pairs_of_ctas) {
  check_pairs<DType::kFloat8E4M3>();
  check_pairs<DType::kFp8DsMla>();
  check<576, DType::kFloat8E4M3, true>(
      {.kv_lens = {90, 200}, .num_heads = 128, .page_size = 64, .has_tails = true}, "two tensors");
}
TEST(whole_rows_as_values) {
  check<512>({.kv_lens = {150, 64}, .page_size = 16}, "boxes");
  check<512>({.kv_lens = {150, 64}, .page_size = 3}, "rows");
}

}  // namespace
}  // namespace flashplan::test
