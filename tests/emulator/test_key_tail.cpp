// SPDX-License-Identifier: Apache-2.0
// The sm90 kernels for ragged keys whose last dims are in a tensor of their own, run by the
// emulator, against double arithmetic: by boxes and row by row. CTAs run at the same time, and
// their warps in a random order. Memory that must not be read is NaN.
#include "kernels/device/sm90/attention.h"

#include <cmath>
#include <vector>

#include "attention_batch.h"
#include "kernels/device/traits.h"
#include "run_ctas.h"
#include "run_together.h"

namespace flashplan::test {
namespace {

constexpr DType kBf16 = DType::kBFloat16;

struct Requests {
  std::vector<int32_t> qo_lens;
  std::vector<int32_t> kv_lens;
  int32_t num_kv_heads = 2;
  int32_t num_ctas = 3;
  int32_t head_dim_qk = 192;
  int32_t head_dim_vo = 128;
  int32_t tail_dims = 64;
  bool by_rows = false;  // no maps
  int32_t window_left = -1;
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
};

/// For a kernel of kQk and kVo dims.
template <int kQk, int kVo>
class TailBatch : public AttentionBatch {
  struct Choices : device::Traits<kBf16, kBf16, kQk, kVo, device::Standard> {
    static constexpr bool kHasKeyTail = true;
  };
  using S = device::Sm90Shape<Choices>;

 public:
  explicit TailBatch(const Requests& r) : AttentionBatch(numbers_of(r)) {
    fill(1.0F, [](int32_t) { return 1.0F; });
    ScheduleShape shape = this->shape(S::kTileQ, S::kTileKv);
    shape.merges_readers_last = true;
    shape.item_steps = 8;
    shape.uncut_part = 16;
    shape.cost = {.tile = 10, .step = 2500, .split = 10, .error_part = 6};  // there are many cuts
    make_schedule(shape, kVo);
    make_params();
    make_maps(shape, kQk, kVo, r.by_rows);
    CHECK_EQ(params_.maps.has_q, n_.aligned && !r.by_rows);
  }

  void run(unsigned seed) {
    begin_run();
    run_together(
        n_.num_ctas, S::kThreads, seed, [] {},
        [&] { device::sm90_attention_kernel<Choices>(params_); });
    CHECK(leaves_no_trace());
  }

 private:
  static BatchNumbers numbers_of(const Requests& r) {
    const int32_t own_dims = r.head_dim_qk - r.tail_dims;
    return {.qo_lens = r.qo_lens,
            .kv_lens = r.kv_lens,
            .planned_lens = r.planned_lens,
            .num_kv_heads = r.num_kv_heads,
            .num_ctas = r.num_ctas,
            .head_dim_qk = r.head_dim_qk,
            .head_dim_vo = r.head_dim_vo,
            .k_tail_dims = r.tail_dims,
            .aligned = own_dims % 8 == 0 && r.tail_dims % 8 == 0,
            .mask = {true, r.window_left},
            .logits_scale = 1.0F / std::sqrt(static_cast<float>(r.head_dim_qk))};
  }
};

template <int kQk = 192, int kVo = 128>
void check(const Requests& requests, const char* what) {
  TailBatch<kQk, kVo> batch(requests);
  check_together(batch, 0.02, what);
}

const std::vector<int32_t> kQoLens = {1, 200, 5, 0};
const std::vector<int32_t> kKvLens = {1, 300, 129, 40};

TEST(by_boxes) {
  check({.qo_lens = kQoLens, .kv_lens = kKvLens}, "whole blocks");
  check({.qo_lens = {30, 150}, .kv_lens = {300, 170}, .tail_dims = 128}, "a tail of two blocks");
  check({.qo_lens = kQoLens, .kv_lens = kKvLens, .head_dim_qk = 160, .tail_dims = 32},
        "part of a block");
  check({.qo_lens = kQoLens, .kv_lens = kKvLens, .head_dim_vo = 96, .window_left = 60}, "a window");
  check({.qo_lens = {30, 20}, .kv_lens = {300, 0}, .planned_lens = {900, 90}}, "shorter");
  check<256, 256>({.qo_lens = kQoLens, .kv_lens = kKvLens, .head_dim_qk = 256, .head_dim_vo = 256},
                  "256 dims");
}
TEST(by_rows) {
  check({.qo_lens = kQoLens, .kv_lens = kKvLens, .by_rows = true}, "no maps");
  check({.qo_lens = {30, 20},
         .kv_lens = {300, 70},
         .head_dim_qk = 150,
         .head_dim_vo = 100,
         .tail_dims = 33},
        "not aligned");
  check({.qo_lens = {30, 20}, .kv_lens = {300, 70}, .tail_dims = 40}, "a block of both");
}

}  // namespace
}  // namespace flashplan::test
