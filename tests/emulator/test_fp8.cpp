// SPDX-License-Identifier: Apache-2.0
// The sm90_fp8 kernel, run by the emulator, against double arithmetic: prompts, drafts and decodes,
// whole and cut, of tensors that are aligned or not, of requests that are shorter than planned.
// Rows are copied one by one, since there are no tensor maps.
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "decode_batch.h"
#include "kernels/device/sm90/fp8/attention.h"

namespace flashplan::test {
namespace {

constexpr int32_t kDims = 128;
using Choices =
    device::Traits<DType::kFloat8E4M3, DType::kFloat8E4M3, kDims, kDims, device::Standard>;

struct Fp8Kernel {
  using Shape = device::Sm90Fp8Shape<Choices>;
  static void run(const AttentionParams& params) {
    if (device::thread_index() == 0) device::reset_named_barriers();
    device::sm90_fp8_attention_kernel<Choices>(params);
  }
};

/// The same with tensor maps as cuda/tensor_maps.cpp makes them: two elements are one of 16 bits.
struct MappedFp8Kernel : Fp8Kernel {
  static void add_maps(const Decodes& d, AttentionParams* params) {
    using device::EmulatedMap;
    const TensorParams& t = params->tensors;
    TensorMaps& maps = params->maps;
    const auto put = [](TensorMap* map, const void* data, EmulatedMap from) {
      from.data = static_cast<const uint16_t*>(data);
      std::memcpy(map, &from, sizeof(from));
    };
    const int32_t group = d.group_size;
    const auto num_tokens = static_cast<int64_t>(d.kv_lens.size()) * d.qo_len;
    const auto of_queries = [&](int32_t rows) {
      return EmulatedMap{nullptr,
                         {{{64, 1},
                           {d.num_kv_heads * group, t.q.head_stride / 2},
                           {num_tokens, t.q.token_stride / 2}}},
                         {64, group, rows / group, 1, 1}};
    };
    maps.has_q = Shape::kTileQ % group == 0;
    maps.has_q_tokens = true;
    put(&maps.q, t.q.data, of_queries(Shape::kTileQ));
    put(&maps.q_tokens, t.q.data, of_queries(group));
    const bool paged = d.page_size > 0;
    const int32_t divisor = d.page_size | Shape::kTileKv;
    const int32_t rows = paged ? divisor & -divisor : Shape::kTileKv;
    if (rows < 8) return;
    maps.has_kv = maps.has_all_blocks = true;
    maps.box_rows = rows;
    const int64_t token = t.k.token_stride / 2;
    const int64_t slab = t.k.head_stride / 2;
    int64_t num_rows = 8;
    int64_t num_slabs = d.num_kv_heads;
    if (paged) {
      maps.boxes_of_step = Shape::kTileKv / rows;
      maps.steps_of_batch = 32 / maps.boxes_of_step;
      const int64_t per_page = t.k.page_stride / t.k.head_stride;
      maps.k_slabs_per_page = maps.v_slabs_per_page = static_cast<int32_t>(per_page);
      num_slabs += (t.pages.num_pages - 1) * per_page;
    } else {
      for (const int32_t n : d.planned_lens.empty() ? d.kv_lens : d.planned_lens) {
        maps.num_kv_tokens += n;
      }
      num_rows = maps.num_kv_tokens;
    }
    const EmulatedMap of_keys = {nullptr,
                                 {{{64, 1},
                                   {num_rows, token},
                                   {1, 64},
                                   {(paged ? d.page_size : rows) / 8, 8 * token},
                                   {num_slabs, slab}}},
                                 {64, 8, 1, rows / 8, 1}};
    put(&maps.k, t.k.data, of_keys);
    put(&maps.v, t.v.data, of_keys);
  }
};

template <typename Kernel>
Results check_kernel(const Decodes& decodes, const char* what, bool aligned) {
  Batch16<Choices, kDims, Kernel> batch(decodes, 1, aligned);
  const Results results = batch.run();
  const double error = batch.error_of(results);
  // A weight of e4m3 errs by up to 1/16.
  if (!(error < 0.06)) {
    check::fail(__FILE__, __LINE__, std::string(what) + ": error " + std::to_string(error));
  }
  return results;
}

bool equal_bits(const Results& a, const Results& b) {
  return std::memcmp(a.o.data(), b.o.data(), a.o.size() * 4) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * 4) == 0;
}

/// By tensor maps, and row by row from tensors that are aligned or not, by warps in any order.
void check(const Decodes& decodes, const char* what) {
  const Results results = check_kernel<MappedFp8Kernel>(decodes, what, true);
  simt::shuffles_warps = true;
  for (const bool aligned : {true, false}) {
    if (!equal_bits(check_kernel<Fp8Kernel>(decodes, what, aligned), results)) {
      check::fail(__FILE__, __LINE__, std::string(what) + ": other bits without tensor maps");
    }
  }
  simt::shuffles_warps = false;
}

TEST(one_tile) {
  check({.kv_lens = {64}, .qo_len = 64, .num_ctas = 1}, "one step, one warpgroup");
  check({.kv_lens = {128}, .qo_len = 128, .num_ctas = 1}, "one step, two warpgroups");
  check({.kv_lens = {300}, .qo_len = 100, .page_size = 0, .num_ctas = 1}, "steps");
}
TEST(batches) {
  check(
      {.kv_lens = {300, 130, 700}, .num_kv_heads = 2, .group_size = 4, .qo_len = 40, .num_ctas = 1},
      "heads and tiles of many rows");
  check({.kv_lens = {300, 2, 0, 129, 128, 127},
         .num_kv_heads = 2,
         .group_size = 3,
         .qo_len = 1,
         .page_size = 5,
         .num_ctas = 1},
        "tiles of few rows");
  check({.kv_lens = {400, 10, 350, 0, 300, 500},
         .num_kv_heads = 1,
         .group_size = 5,
         .qo_len = 20,
         .page_size = 1,
         .num_ctas = 2,
         .planned_lens = {700, 300, 400, 200, 380, 640}},
        "shorter than planned");
  check({.kv_lens = {900, 450},
         .num_kv_heads = 2,
         .group_size = 2,
         .qo_len = 33,
         .num_ctas = 3,
         .window_left = 203},
        "a window");
  check({.kv_lens = {600, 90}, .num_kv_heads = 2, .qo_len = 30, .num_ctas = 2, .sharpness = 12.0F},
        "logits that grow");
}

}  // namespace
}  // namespace flashplan::test
