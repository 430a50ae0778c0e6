// SPDX-License-Identifier: Apache-2.0
// What a kernel of a plan with lists of keys is given, on a fake runtime. The kernel is not run.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "abi/params.h"
#include "check.h"
#include "cpp/fake_kernels.h"
#include "cpp/problem.h"
#include "cpp/random_batch.h"
#include "fake_cuda.h"
#include "flashplan/flashplan.h"
#include "kernels/kernel_list.h"

namespace flashplan::cuda {

std::span<const Kernel> kernels() noexcept {
  static const std::vector<Kernel> all = [] {
    static const char code[1] = {};
    Kernel kernel = test::fake_kernel("sm90_mla_bf16_d576x512", {90, 'a'});
    kernel.family = &kSm90MlaFamily;
    kernel.head_dim_qk = 576;
    kernel.head_dim_vo = 512;
    kernel.geometry.tile_q = 64;
    kernel.geometry.bodies = {{{64, 2}}};
    kernel.geometry.uses_tensor_maps = true;
    kernel.tuning = sm90_mla_tuning();
    kernel.code = {nullptr, code, code, nullptr};
    return std::vector<Kernel>{kernel};
  }();
  return all;
}

}  // namespace flashplan::cuda

namespace flashplan::test {
namespace {

constexpr Device kGpu = {DeviceType::kCuda, 0};
constexpr int32_t kTopk = 300;

AttentionParams launched;

const void* keep_launch(void** arguments) {
  launched = *static_cast<const AttentionParams*>(arguments[0]);
  return launched.schedule.starts;
}

AttentionOptions options_of_lists() {
  AttentionOptions o;
  o.num_qo_heads = 128;
  o.num_kv_heads = 1;
  o.head_dim_qk = 576;
  o.head_dim_vo = 512;
  o.q_dtype = o.kv_dtype = o.o_dtype = DType::kBFloat16;
  o.shared_kv = true;
  o.topk = kTopk;
  o.softmax_scale = 0.1F;
  o.page_size = 64;
  o.max_batch_size = 3;
  o.max_qo_tokens = 20;
  o.device = kGpu;
  return o;
}

TEST(each_token_is_a_request_with_a_list) {
  fake_cuda::set_memory_of_launch(&keep_launch);
  Plan plan;
  CHECK_EQ(Plan::create(options_of_lists(), &plan).message, std::string());
  HostBatch batch;
  batch.add(2, 1000);
  batch.add(0, 50);
  batch.add(1, 70);
  CHECK_EQ(plan.plan(batch.view()).message, std::string());

  HostTensor q(DType::kBFloat16, {20, 128, 576});
  HostTensor cache(DType::kBFloat16, {4, 64, 576});
  HostTensor o(DType::kBFloat16, {20, 128, 512});
  HostTensor lists(DType::kInt32, {20, 290});
  HostTensor lens(DType::kInt32, {20});
  Workspace workspace(plan.workspace_bytes());
  AttentionTensors t;
  t.q = q.view();
  t.k = cache.view();
  t.o = o.view();
  t.topk_indices = lists.view();
  t.topk_lens = lens.view();
  t.workspace = workspace.data();
  t.workspace_bytes = workspace.size();
  for (TensorView* view : {&t.q, &t.k, &t.o, &t.topk_indices, &t.topk_lens}) view->device = kGpu;
  CHECK_EQ(plan.run(t).message, std::string());
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);

  CHECK(launched.lists.slots == t.topk_indices.data);
  CHECK_EQ(launched.lists.row_stride, 290);
  CHECK_EQ(launched.lists.size, 290);
  CHECK(launched.tensors.kv_lens == t.topk_lens.data);
  CHECK(launched.tensors.pages.ids == nullptr);
  CHECK_EQ(launched.tensors.pages.page_size.value, 64);
  CHECK_EQ(launched.tensors.pages.num_pages, 4);
  // Queries are brought by boxes, listed keys are not, although the pages would allow it.
  CHECK(launched.maps.has_q);
  CHECK(!launched.maps.has_kv);
  const ScheduleParams& schedule = launched.schedule;
  std::vector<int32_t> keys(3);
  for (int32_t cta = 0; cta < schedule.num_ctas; ++cta) {
    for (int32_t i = schedule.starts[cta].begin; i < schedule.starts[cta].end; ++i) {
      const WorkTile& tile = schedule.tiles[i];
      const Segment& segment = schedule.segments[tile.segment];
      CHECK_EQ(segment.qo_begin, tile.segment);
      CHECK_EQ(segment.qo_len, 1);
      CHECK_EQ(segment.kv_row, tile.segment);
      keys[static_cast<size_t>(tile.segment)] += tile.kv_end - tile.kv_begin;
    }
  }
  CHECK(keys == std::vector<int32_t>({2 * kTopk, 2 * kTopk, 2 * 70}));  // of two row tiles each
  CHECK_EQ(fake_cuda::take_mistakes(), std::string());
}

}  // namespace
}  // namespace flashplan::test
