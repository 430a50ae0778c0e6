// SPDX-License-Identifier: Apache-2.0
// A batch for the Hopper kernels that widen 8-bit keys and values, run by the emulator.
#pragma once

#include "kernels/device/sm90/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_batch.h"
#include "kernels/device/traits.h"
#include "run_ctas.h"
#include "run_together.h"

namespace flashplan::test {

struct Requests {
  std::vector<int32_t> qo_lens;
  std::vector<int32_t> kv_lens;
  int32_t num_kv_heads = 1;
  int32_t group_size = 1;
  int32_t page_size = 16;  // 0: ragged
  int32_t num_ctas = 2;
  int32_t head_dim = 64;
  int32_t window_left = -1;
  int32_t prepare_reads = 2;
  int32_t max_prepared = 1000;
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
  int32_t prefix = 0;                      // keys that all requests share
  bool has_missing_pages = false;
  bool cuts_much = false;
  bool has_nan = false;             // among the keys
  bool is_csr = false;              // page ids
  bool has_narrow_queries = false;  // of 8 bits
  float growth = 0.0F;              // of keys: key i is a random one times i * growth; 0: times 1
  float softcap = 0.0F;             // 0: off
};

/// For a kernel of `kDims` dims.
template <int32_t kDims, typename Variant = device::Standard>
class WidenBatch : public AttentionBatch {
  using Choices = device::Traits<DType::kBFloat16, DType::kFloat8E4M3, kDims, kDims, Variant>;
  using S = device::Sm90Shape<Choices>;
  using Memory = device::Sm90SharedMemory<S>;

 public:
  explicit WidenBatch(const Requests& r) : AttentionBatch(numbers_of(r)) {
    fill(1.0F,
         [&](int32_t key) { return r.growth > 0.0F ? r.growth * static_cast<float>(key) : 1.0F; });
    if (r.has_nan) add_nan();
    drop_pages_behind_keys();
    if (r.has_missing_pages && r.page_size > 0) drop_some_pages();
    ScheduleShape shape = this->shape(S::kTileQ, S::kTileKv);
    shape.shares_prefixes = r.prefix > 0;
    shape.merges_readers_last = true;
    shape.item_steps = 8;
    shape.uncut_part = 16;
    shape.prepare_reads = r.prepare_reads;
    shape.prepares_some = true;
    shape.cost = {.tile = 3200,
                  .step = 2500,
                  .split = 3000,
                  .split_row = 40,
                  .write = 1000,
                  .write_row = 13,
                  .merge = 200,
                  .merge_row = 160,
                  .cached = 700,
                  .error_part = 6};
    if (r.cuts_much) shape.cost = {.tile = 10, .step = 2500, .split = 10, .error_part = 6};
    make_schedule(shape, kDims);
    make_params();
    // As src/api/run.cpp and most_prepared_tiles() do.
    const bool may_prepare = r.max_prepared > 0 && r.window_left < 0 && r.planned_lens.empty();
    prepare(shape, r.window_left < 0 ? r.max_prepared : 0, may_prepare);
  }
  int32_t num_prepared() const { return prepared_tiles_[0]; }

  void run(unsigned seed) {
    begin_run();
    std::fill(prepared_.begin(), prepared_.end(), Line{});
    run_together(n_.num_ctas, S::kThreads, seed, begin_cta, [&] {
      device::sm90_attention_kernel<Choices>(params_);
      device::bulk_store_wait();
      if (simt::cta->num_done + 1 == simt::cta->size) end_cta();
    });
    CHECK(leaves_no_trace());
    CHECK_EQ(num_left_, 0);
    for (const PreparedState& s : states_) {
      CHECK(s.claimed == 0 && s.keys == 0 && s.values == 0 && s.unused == 0);
    }
  }

 private:
  /// Aligned as the library aligns prepared keys; NaN.
  struct alignas(128) Line {
    Line() { std::fill(std::begin(bytes), std::end(bytes), 0xff); }
    unsigned char bytes[128];
  };

  static BatchNumbers numbers_of(const Requests& r) {
    BatchNumbers n = {.qo_lens = r.qo_lens,
                      .kv_lens = r.kv_lens,
                      .planned_lens = r.planned_lens,
                      .num_kv_heads = r.num_kv_heads,
                      .group_size = r.group_size,
                      .page_size = r.page_size,
                      .prefix = r.prefix,
                      .is_csr = r.is_csr,
                      .num_ctas = r.num_ctas,
                      .head_dim_qk = r.head_dim,
                      .head_dim_vo = r.head_dim,
                      .aligned = r.head_dim % 16 == 0,
                      .q_dtype = r.has_narrow_queries ? DType::kFloat8E4M3 : DType::kBFloat16,
                      .kv_dtype = DType::kFloat8E4M3,
                      .mask = {true, r.window_left},
                      .logits_scale = 1.0F / std::sqrt(static_cast<float>(r.head_dim)),
                      .softcap = r.softcap};
    for (int32_t h = 0; h < r.num_kv_heads && r.has_narrow_queries; ++h) {
      n.q_scales.push_back(0.7F + 0.3F * static_cast<float>(h % 3));
    }
    return n;
  }

  static void begin_cta() {
    const device::Sm90Smem<S> smem(*reinterpret_cast<Memory*>(device::smem));
    const auto name = device::name_mbarriers;
    for (uint32_t i = 0; i < S::kSlots; ++i) {
      name("slot_full", smem.slot_full(i), "slot_empty", smem.slot_empty(i), i);
    }
    for (uint32_t i = 0; i < S::kQBarriers; ++i) {
      name("q_full", smem.q_full(i), "q_empty", smem.q_empty(i), i);
    }
    for (uint32_t i = 0; i < S::kContexts; ++i) {
      name("context_full", smem.context_full(i), "context_empty", smem.context_empty(i), i);
    }
  }
  /// All slots must have been freed, and nothing may be under way.
  static void end_cta() {
    const device::Sm90Smem<S> smem(*reinterpret_cast<Memory*>(device::smem));
    if (!device::copy_engine().copies.empty()) simt::fail("copies are under way at the end");
    const auto must_be_over = [](uint32_t at) {
      const device::Mbarrier& word = *device::at_shared<device::Mbarrier>(at);
      if (word.pending != word.count || word.bytes != 0) {
        device::fail_at(at, "some have arrived, and others have not, at the end");
      }
    };
    for (uint32_t i = 0; i < S::kSlots; ++i) {
      must_be_over(smem.slot_full(i));
      must_be_over(smem.slot_empty(i));
      if (device::mbarrier_facts()[smem.slot_full(i)].num_phases !=
          device::mbarrier_facts()[smem.slot_empty(i)].num_phases) {
        device::fail_at(smem.slot_full(i), "a slot was not freed");
      }
    }
    for (uint32_t i = 0; i < S::kQBarriers; ++i) {
      must_be_over(smem.q_full(i));
      must_be_over(smem.q_empty(i));
    }
  }

  void add_nan() {
    for (int32_t r = 0; r < batch_size(); ++r) {
      for (int32_t key = 0; key < kv_len(r); ++key) {
        for (int32_t h = 0; h < n_.num_kv_heads; ++h) {
          if (random_() % 100 == 0) k_.write(places_.row(r, key) * n_.num_kv_heads + h, 3, NAN);
        }
      }
    }
  }
  void drop_some_pages() {
    for (int32_t r = 0; r < batch_size(); ++r) {
      for (int32_t i = 0; i < places_.most_pages(); ++i) {
        if (random_() % 5 == 0) places_.id(r, i) = random_() % 2 == 0 ? 0x7fffffff : -1;
      }
    }
  }

  void prepare(const ScheduleShape& shape, int32_t max_prepared, bool has_states) {
    const Schedule& s = schedule();
    prepared_tiles_.assign(s.segments.size() + 1, -7);
    const PreparedTiles to = {prepared_tiles_.data() + 1, prepared_tiles_.data()};
    choose_prepared_kv(batch_, shape, s.segments, max_prepared, to);
    const auto num_prepared = static_cast<size_t>(prepared_tiles_[0]);
    const auto num_heads = static_cast<size_t>(n_.num_kv_heads);
    states_.assign((num_prepared + 32) * num_heads, {});
    const size_t key_bytes = num_prepared * num_heads * S::kKeyBytes;
    const size_t value_bytes = num_prepared * num_heads * S::kValueBytes;
    prepared_.assign((key_bytes + value_bytes) / sizeof(Line) + 1, {});
    for (QueueStart& start : starts_) {
      start.first_prepared[0] = start.first_prepared[1] = kNotPrepared;
      for (int32_t i = 0; i < std::min(start.end - start.begin, 2); ++i) {
        const auto segment = static_cast<size_t>(start.tiles[i].segment);
        start.first_prepared[i] = prepared_tiles_[segment + 1];
      }
    }
    PreparedKv& kv = params_.prepared;
    kv.keys = prepared_.data()->bytes;
    kv.values = kv.keys + key_bytes;
    kv.first_tiles = prepared_tiles_.data() + 1;
    kv.num_tiles = prepared_tiles_.data();
    kv.states = has_states ? states_.data() : nullptr;
    kv.num_left = &num_left_;
    kv.num_kv_heads = n_.num_kv_heads;
  }

  std::vector<int32_t> prepared_tiles_;  // their number, then the first one of each segment
  std::vector<Line> prepared_;
  std::vector<PreparedState> states_;
  int32_t num_left_ = 0;
};

}  // namespace flashplan::test
