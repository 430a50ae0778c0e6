// SPDX-License-Identifier: Apache-2.0
// Every way a Plan can refuse options and batches on the host: the code, the named argument, and
// that the object is usable afterwards. For tensors see test_run_status.cpp.
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "allocations.h"
#include "check.h"
#include "flashplan/flashplan.h"
#include "problem.h"
#include "refusal.h"
#include "small_options.h"

namespace flashplan::test {
namespace {

constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

static_assert(std::is_nothrow_move_constructible_v<Plan>);
static_assert(!std::is_copy_constructible_v<Plan>);
static_assert(std::is_trivially_copyable_v<Status>);

TEST(options) {
  struct Bad {
    const char* argument;
    std::function<void(AttentionOptions&)> change;
    StatusCode code = StatusCode::kInvalidArgument;
  };
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<Bad> all = {
      {"num_qo_heads", [](auto& o) { o.num_qo_heads = 0; }},
      {"num_qo_heads", [](auto& o) { o.num_qo_heads = -4; }},
      {"num_qo_heads", [](auto& o) { o.num_qo_heads = 3; }},
      {"num_qo_heads", [](auto& o) { o.num_qo_heads = o.num_kv_heads = 65537; }},
      {"num_kv_heads", [](auto& o) { o.num_kv_heads = 0; }},
      {"num_kv_heads", [](auto& o) { o.num_kv_heads = std::numeric_limits<int32_t>::min(); }},
      {"head_dim_qk", [](auto& o) { o.head_dim_qk = 0; }},
      {"head_dim_qk", [](auto& o) { o.head_dim_qk = kMaxInt; }},
      {"head_dim_vo", [](auto& o) { o.head_dim_vo = -1; }},
      {"head_dim_qk", [](auto& o) { o.head_dim_qk = 4097; }},
      {"head_dim_vo", [](auto& o) { o.head_dim_vo = 1 << 20; }},
      {"head_dim_vo", [](auto& o) { o.head_dim_vo = 4097; }},
      {"page_size", [](auto& o) { o.page_size = -1; }},
      {"window_left", [](auto& o) { o.window_left = -2; }},
      {"softmax_scale", [](auto& o) { o.softmax_scale = 0.0F; }},
      {"softmax_scale", [](auto& o) { o.softmax_scale = -1.0F; }},
      {"softmax_scale", [](auto& o) { o.softmax_scale = kNan; }},
      {"softmax_scale", [=](auto& o) { o.softmax_scale = infinity; }},
      {"softcap", [](auto& o) { o.softcap = -1.0F; }},
      {"softcap", [](auto& o) { o.softcap = kNan; }},
      {"max_batch_size", [](auto& o) { o.max_batch_size = 0; }},
      {"max_batch_size", [](auto& o) { o.max_batch_size = kMaxInt; }},
      {"max_batch_size", [](auto& o) { o.max_batch_size = (1 << 20) + 1; }},
      {"max_qo_tokens", [](auto& o) { o.max_qo_tokens = 0; }},
      {"max_qo_tokens", [](auto& o) { o.max_qo_tokens = kMaxInt; }},
      {"max_qo_tokens", [](auto& o) { o.max_qo_tokens = (1 << 24) + 1; }},
      {"max_qo_tokens", [](auto& o) { o.num_qo_heads = 1 << 16, o.max_qo_tokens = 1 << 24; }},
      {"num_ctas", [](auto& o) { o.num_ctas = -1; }},
      {"num_ctas", [](auto& o) { o.num_ctas = kMaxInt; }},
      {"num_ctas", [](auto& o) { o.num_ctas = 4097; }},
      {"workspace", [](auto& o) { o.workspace_bytes = 0; }},
      {"workspace", [](auto& o) { o.workspace_bytes = 100; }},
      {"q_dtype", [](auto& o) { o.q_dtype = DType::kInt32; }, StatusCode::kUnsupported},
      {"kv_dtype", [](auto& o) { o.q_dtype = DType::kFloat8E4M3; }, StatusCode::kUnsupported},
      {"kv_dtype", [](auto& o) { o.kv_dtype = DType::kFloat16; }, StatusCode::kUnsupported},
      {"o_dtype", [](auto& o) { o.o_dtype = DType::kFloat8E5M2; }, StatusCode::kUnsupported},
      {"q_dtype", [](auto& o) { o.q_dtype = static_cast<DType>(77); }, StatusCode::kUnsupported},
      {"kv_layout", [](auto& o) { o.kv_layout = static_cast<KvLayout>(7); }},
      {"device", [](auto& o) { o.device.index = 9; }},
      {"device", [](auto& o) { o.device.type = static_cast<DeviceType>(7); }},
      {"device", [](auto& o) { o.device.type = DeviceType::kCuda; }, StatusCode::kUnsupported},
  };
  Plan plan;
  CHECK(Plan::create(small_options(), &plan).ok());
  for (const Bad& bad : all) {
    AttentionOptions options = small_options();
    bad.change(options);
    check_refused(Plan::create(options, &plan), bad.code, bad.argument);
    if (std::string(bad.argument) != "workspace") {
      check_refused(is_supported(options), bad.code, bad.argument);
    }
    CHECK_EQ(plan.options().num_qo_heads, 4);  // the earlier plan is still there
  }
}

TEST(out_of_memory) {
  Plan plan;
  CHECK(Plan::create(small_options(), &plan).ok());
  HostBatch batch;
  batch.add(1, 10);
  CHECK(plan.plan(batch.view()).ok());
  for (int64_t left = 0;; ++left) {
    Plan other;
    allocations_left = left;
    const Status created = Plan::create(small_options(), &other);
    const bool no_text = plan.describe().empty() && plan.timeline_svg().empty();
    allocations_left = std::numeric_limits<int64_t>::max();
    if (created.ok()) break;
    CHECK(created.code == StatusCode::kOutOfMemory);
    CHECK(created.message[0] != '\0');
    CHECK_EQ(other.workspace_bytes(), 0U);
    CHECK(no_text);
    CHECK(left < 100);
  }
  CHECK(!plan.describe().empty());
}

TEST(defaults_are_filled_in) {
  AttentionOptions options = small_options();
  options.num_ctas = 0;
  Plan plan;
  CHECK(Plan::create(options, &plan).ok());
  CHECK(plan.options().num_ctas > 0);
  CHECK_EQ(*plan.options().softmax_scale, 1.0F / std::sqrt(8.0F));
  CHECK_EQ(*plan.options().workspace_bytes, plan.workspace_bytes());
  CHECK(std::string(plan.kernel_name()).rfind("cpu_", 0) == 0);
}

TEST(batches) {
  struct Bad {
    const char* argument;
    std::vector<int32_t> qo_indptr;
    std::vector<int32_t> kv_lens;
    std::vector<int32_t> kv_indptr = {};
    int32_t page_size = 0;
  };
  const std::vector<Bad> all = {
      {"qo_indptr[0]", {1, 2}, {5}},
      {"qo_indptr[0]", {-1, 2}, {5}},
      {"qo_indptr[2]", {0, 2, 1}, {5, 5}},
      {"qo_indptr[1]", {0, -7}, {5}},
      {"qo_indptr[1]", {0, 17}, {5}},
      {"qo_indptr[1]", {0, kMaxInt}, {5}},
      {"kv_lens[1]", {0, 1, 2}, {5, -3}},
      {"kv_lens[0]", {0, 1}, {std::numeric_limits<int32_t>::min()}},
      {"kv_lens", {0, 1, 2, 3, 4, 5}, {1, 1, 1, 1, 1}},
      {"kv_lens", {0, 1, 2}, {kMaxInt, 1}},
      {"kv_indptr[0]", {0, 1}, {5}, {-1, 6}},
      {"kv_indptr[1]", {0, 1}, {5}, {0, 4}},
      {"kv_indptr[2]", {0, 1, 2}, {5, 0}, {0, 6, 5}},
      {"kv_indptr[1]", {0, 1}, {kMaxInt}, {5, kMaxInt}},
      {"kv_indptr[2]", {0, 1, 2}, {5, 0}, {0, kMaxInt, -2}},
      {"kv_indptr", {0, 1}, {5}, {0, 5}, 16},
  };
  for (const Bad& bad : all) {
    Plan plan;
    CHECK(Plan::create(small_options(bad.page_size), &plan).ok());
    Batch batch;
    batch.qo_indptr = bad.qo_indptr.data();
    batch.kv_lens = bad.kv_lens.data();
    batch.kv_indptr = bad.kv_indptr.empty() ? nullptr : bad.kv_indptr.data();
    batch.batch_size = static_cast<int32_t>(bad.kv_lens.size());
    check_refused(plan.plan(batch), StatusCode::kInvalidArgument, bad.argument);
    HostBatch good;
    good.add(1, 10);
    CHECK(plan.plan(good.view()).ok());
  }

  Plan plan;
  CHECK(Plan::create(small_options(), &plan).ok());
  HostBatch batch;
  batch.add(1, 10);
  Batch view = batch.view();
  view.batch_size = -1;
  check_refused(plan.plan(view), StatusCode::kInvalidArgument, "kv_lens");
  view = batch.view();
  view.qo_indptr = nullptr;
  check_refused(plan.plan(view), StatusCode::kInvalidArgument, "qo_indptr");
  view = batch.view();
  view.kv_lens = nullptr;
  check_refused(plan.plan(view), StatusCode::kInvalidArgument, "kv_lens");
}

// Costs are sums of 64 bits: what could overflow them is refused, what is just below is planned.
TEST(most_work_of_a_batch) {
  AttentionOptions options = small_options(1 << 20);
  options.num_qo_heads = options.num_kv_heads = 1 << 16;
  options.max_qo_tokens = 1 << 24;
  options.workspace_bytes = {};
  Plan plan;
  CHECK_EQ(Plan::create(options, &plan).message, std::string());
  HostBatch batch;
  batch.add(1 << 13, kMaxInt);
  check_refused(plan.plan(batch.view()), StatusCode::kInvalidArgument, "kv_lens");
  HostBatch smaller;
  smaller.add((1 << 12) - 1, kMaxInt);
  smaller.add(0, kMaxInt);
  CHECK_EQ(plan.plan(smaller.view()).message, std::string());
  const ScheduleView schedule = plan.schedule();
  for (int32_t c = 0; c < schedule.num_ctas; ++c) CHECK(schedule.cta_cost[c] > 0);
}

// The last request has no keys, so k and v need no rows for it, wherever it begins.
TEST(an_empty_last_request_after_a_gap) {
  Problem p;
  p.options = small_options();
  Random random(1);
  p.batch.add(1, 5);
  p.batch.add(1, 0);
  p.kv_indptr = {0, 9, 9};
  fill_problem(random, p);
  p.kv_indptr = {0, 9, 9};
  p.k = HostTensor(DType::kFloat32, {5, 2, 8});
  p.v = HostTensor(DType::kFloat32, {5, 2, 8});
  fill_random(random, p.k, 5);
  fill_random(random, p.v, 5);
  Outputs out(p);
  CHECK_EQ(run_problem(p, out), "");
  CHECK_EMPTY(wrong_output(p, out));
}

// Keys of a paged cache may be more than any int32 can count together.
TEST(very_long_paged_requests) {
  Plan plan;
  CHECK(Plan::create(small_options(1), &plan).ok());
  HostBatch batch;
  for (int i = 0; i < 4; ++i) batch.add(1, kMaxInt);
  CHECK_EQ(plan.plan(batch.view()).message, std::string());
}

TEST(not_ready) {
  Plan none;
  HostBatch batch;
  batch.add(1, 10);
  check_refused(none.plan(batch.view()), StatusCode::kNotReady, "plan");
  check_refused(none.run({}), StatusCode::kNotReady, "run");
  check_refused(none.check_device_data({}), StatusCode::kNotReady, "check_device_data");
  CHECK_EQ(none.workspace_bytes(), 0U);
  CHECK_EQ(std::string(none.kernel_name()), "");
  CHECK_EQ(none.options().num_qo_heads, 0);
  CHECK_EQ(none.describe(), "no plan yet\n");
  CHECK(none.schedule().tiles == nullptr);
  CHECK_EQ(none.timeline_svg(), "");

  Plan plan;
  CHECK(Plan::create(small_options(), &plan).ok());
  check_refused(plan.run({}), StatusCode::kNotReady, "run");
  check_refused(plan.check_device_data({}), StatusCode::kNotReady, "check_device_data");
  CHECK(plan.plan(batch.view()).ok());
  Plan moved = std::move(plan);
  check_refused(plan.run({}), StatusCode::kNotReady, "run");
  CHECK(moved.plan(batch.view()).ok());
}

TEST(device_data) {
  Plan plan;
  AttentionOptions options = small_options();
  options.page_size = 16;
  CHECK(Plan::create(options, &plan).ok());
  HostBatch batch;
  batch.add(1, 40);
  CHECK(plan.plan(batch.view()).ok());
  int32_t ids[] = {7, 0, 3};
  int32_t kv_len = 40;
  int64_t slots[] = {-1, 127};
  DeviceData data;
  data.block_table = contiguous(ids, DType::kInt32, {}, {1, 3});
  data.kv_lens = contiguous(&kv_len, DType::kInt32, {}, {1});
  data.slot_mapping = contiguous(slots, DType::kInt64, {}, {2});
  data.num_pages = 8;
  CHECK(plan.check_device_data(data).ok());
  slots[1] = -2;
  check_refused(plan.check_device_data(data), StatusCode::kInvalidArgument, "slot_mapping[1]");
  slots[1] = 128;
  check_refused(plan.check_device_data(data), StatusCode::kInvalidArgument, "slot_mapping[1]");
  ids[2] = 8;
  check_refused(plan.check_device_data(data), StatusCode::kInvalidArgument, "block_table[0, 2]");
  kv_len = 41;
  check_refused(plan.check_device_data(data), StatusCode::kInvalidArgument, "kv_lens[0]");
  data.num_pages = -1;
  check_refused(plan.check_device_data(data), StatusCode::kInvalidArgument, "num_pages");
  data.block_table.device = {DeviceType::kCuda, 0};
  check_refused(plan.check_device_data(data), StatusCode::kInvalidType, "block_table");
}

TEST(descriptions) {
  Plan plan;
  CHECK(Plan::create(small_options(), &plan).ok());
  HostBatch batch;
  batch.add(1, 10);
  batch.add(3, 5000);
  CHECK(plan.plan(batch.view()).ok());
  CHECK(plan.describe().size() > 100);
  const std::string svg = plan.timeline_svg();
  CHECK(svg.find("<svg") != std::string::npos);
  CHECK(svg.find("</svg>") != std::string::npos);
  CHECK(show_config().find("version: " + std::string(version())) != std::string::npos);
}

TEST(threads) {
  const int32_t before = num_threads();
  for (const int32_t count : {0, -1, std::numeric_limits<int32_t>::min()}) {
    check_refused(set_num_threads(count), StatusCode::kInvalidArgument, "num_threads");
  }
  CHECK_EQ(num_threads(), before);
}

}  // namespace
}  // namespace flashplan::test
