// SPDX-License-Identifier: Apache-2.0
// The engine on a GPU through the public API, against the engine on the CPU: values, and the order
// of plans and runs on streams and in graphs. Without a GPU there is nothing to test.
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "flashplan/flashplan.h"
#include "problem.h"

namespace flashplan::test {
namespace {

constexpr Device kGpu = {DeviceType::kCuda, 0};

bool has_gpu() {
  if (cuda::num_devices() > 0) return true;
  std::cout << "no GPU: skipped" << std::endl;
  return false;
}

#define CHECK_CUDA(call) CHECK_EQ(std::string(cudaGetErrorString(call)), "no error")

/// Device memory with the contents of a HostTensor.
class DeviceTensor {
 public:
  explicit DeviceTensor(const HostTensor& host) : view_(host.view()), bytes_(host.bytes().size()) {
    if (view_.empty()) return;
    CHECK_CUDA(cudaMalloc(&view_.data, bytes_ + 1));
    CHECK_CUDA(cudaMemcpy(view_.data, host.bytes().data(), bytes_, cudaMemcpyHostToDevice));
    view_.device = kGpu;
  }
  ~DeviceTensor() {
    if (!view_.empty()) static_cast<void>(cudaFree(view_.data));
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  const TensorView& view() const { return view_; }
  void read(HostTensor* host) const {
    CHECK_CUDA(cudaMemcpy(host->view().data, view_.data, bytes_, cudaMemcpyDeviceToHost));
  }

 private:
  TensorView view_;
  std::size_t bytes_;
};

/// The inputs of a problem on the device, and a workspace full of NaN.
class DeviceInputs {
 public:
  DeviceInputs(const Problem& p, std::size_t workspace_bytes)
      : q_(p.q),
        k_(p.k),
        v_(p.v),
        block_table_(p.block_table),
        page_indptr_(p.page_indptr),
        page_indices_(p.page_indices),
        kv_lens_(p.kv_lens),
        mask_(p.mask),
        workspace_(HostTensor(DType::kFloat32, {static_cast<int64_t>(workspace_bytes / 4 + 1)})) {
    tensors_.q = q_.view();
    tensors_.k = k_.view();
    tensors_.v = v_.view();
    tensors_.block_table = block_table_.view();
    tensors_.page_indptr = page_indptr_.view();
    tensors_.page_indices = page_indices_.view();
    tensors_.kv_lens = kv_lens_.view();
    tensors_.mask = mask_.view();
    tensors_.k_scale = p.k_scale;
    tensors_.v_scale = p.v_scale;
    tensors_.workspace = workspace_.view().data;
    tensors_.workspace_bytes = workspace_bytes;
  }
  AttentionTensors with(const DeviceTensor& o, const DeviceTensor& lse) const {
    AttentionTensors t = tensors_;
    t.o = o.view();
    t.lse = lse.view();
    return t;
  }

 private:
  DeviceTensor q_, k_, v_, block_table_, page_indptr_, page_indices_, kv_lens_, mask_, workspace_;
  AttentionTensors tensors_;
};

struct DeviceOutputs {
  DeviceTensor o, lse;
  explicit DeviceOutputs(const Problem& p) : o(Outputs(p).o), lse(Outputs(p).lse) {}
};

class TestStream {
 public:
  TestStream() { CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~TestStream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  operator Stream() const { return stream_; }
  void wait() const { CHECK_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Holds a stream back until it is opened; opens by itself after some seconds, which is a failure.
class Gate {
 public:
  explicit Gate(Stream stream) {
    CHECK_CUDA(
        cudaLaunchHostFunc(stream, [](void* gate) { static_cast<Gate*>(gate)->hold(); }, this));
  }
  void open() {
    CHECK(!was_late_);
    is_open_ = true;
  }

 private:
  void hold() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (!is_open_ && !was_late_) {
      std::this_thread::yield();
      was_late_ = std::chrono::steady_clock::now() > end;
    }
  }
  std::atomic<bool> is_open_{false};
  std::atomic<bool> was_late_{false};
};

/// What the CPU gives for the same tensors; `got` has been run on the GPU.
std::string difference(const Problem& p, const DeviceOutputs& got) {
  Problem on_cpu = p;
  on_cpu.options.device = Device();
  on_cpu.options.num_ctas = 0;
  Outputs want(p);
  const std::string failed = run_problem(on_cpu, want);
  if (!failed.empty()) return failed;
  Outputs out(p);
  got.o.read(&out.o);
  got.lse.read(&out.lse);
  for (int64_t token = 0; token < out.o.size(0); ++token) {
    for (int64_t head = 0; head < p.options.num_qo_heads; ++head) {
      const auto where = " of token " + std::to_string(token) + " head " + std::to_string(head);
      const double lse = out.lse.get({token, head});
      const double want_lse = want.lse.get({token, head});
      const bool same = lse == want_lse || (std::isnan(lse) && std::isnan(want_lse)) ||
                        std::fabs(lse - want_lse) <= 1e-3 * std::max(1.0, std::fabs(want_lse));
      if (!same)
        return "lse" + where + ": " + std::to_string(lse) + ", not " + std::to_string(want_lse);
      for (int64_t d = 0; d < p.options.head_dim_vo; ++d) {
        // Weights are rounded to the dtype of q before they meet values of up to 2 * v_scale.
        const double x = out.o.get({token, head, d});
        const double y = want.o.get({token, head, d});
        if (!(std::fabs(x - y) <= 0.03 || (std::isnan(x) && std::isnan(y)))) {
          return "o" + where + ": " + std::to_string(x) + ", not " + std::to_string(y);
        }
      }
    }
  }
  return "";
}

TEST(small_problems) {
  if (!has_gpu()) return;
  Random random(1);
  const TestStream stream;
  int done = 0;
  for (int i = 0; i < 2000 && done < 100; ++i) {
    Problem p = random_problem(random);
    p.options.device = kGpu;
    if (!is_supported(p.options).ok()) continue;
    for (int32_t r = random.between(0, 5); r > 0; --r) {
      const int32_t qo_len = random.one_in(2) ? 1 : random.between(0, 200);
      p.batch.add(qo_len, random.one_in(8) ? 0 : random.between(1, random.pick({130, 3000})));
    }
    if (random.one_in(3)) plan_upper_bounds(random, p, random.pick({1, 100, 2000}));
    if (random.one_in(3)) add_mask(random, p);
    fill_problem(random, p);
    Plan plan;
    CHECK_EMPTY(Plan::create(p.options, &plan).message);
    const DeviceInputs inputs(p, plan.workspace_bytes());
    const DeviceOutputs out(p);
    CHECK_EMPTY(plan.plan(p.batch_view(), stream).message);
    CHECK_EMPTY(plan.run(inputs.with(out.o, out.lse), stream).message);
    stream.wait();
    const std::string wrong = difference(p, out);
    if (!wrong.empty())
      check::fail(__FILE__, __LINE__, "round " + std::to_string(i) + ": " + wrong);
    ++done;
  }
  CHECK_EQ(done, 100);
}

/// One set of tensors for batches of every size up to its bounds.
Problem shared_problem(Random& random) {
  Problem p;
  AttentionOptions& o = p.options;
  o.device = kGpu;
  o.num_qo_heads = 4;
  o.num_kv_heads = 2;
  o.head_dim_qk = o.head_dim_vo = 64;
  o.max_batch_size = 8;
  o.max_qo_tokens = 256;
  p.q = HostTensor(o.q_dtype, {256, 4, 64});
  p.k = HostTensor(o.kv_dtype, {8 * 2000, 2, 64});
  p.v = HostTensor(o.kv_dtype, {8 * 2000, 2, 64});
  for (HostTensor* tensor : {&p.q, &p.k, &p.v}) fill_random(random, *tensor, tensor->size(0));
  return p;
}

void new_batch(Random& random, Problem* p) {
  p->batch = HostBatch();
  for (int32_t r = random.between(1, 8); r > 0; --r) {
    p->batch.add(random.between(0, 32), random.between(0, 2000));
  }
}

TEST(plans_may_be_made_ahead) {
  if (!has_gpu()) return;
  Random random(2);
  Problem p = shared_problem(random);
  Plan plan;
  CHECK_EMPTY(Plan::create(p.options, &plan).message);
  const DeviceInputs inputs(p, plan.workspace_bytes());
  const TestStream stream;
  for (int round = 0; round < 5; ++round) {
    std::vector<Problem> problems;
    std::vector<std::unique_ptr<DeviceOutputs>> outs;
    for (int i = 0; i < 12; ++i) {
      new_batch(random, &p);
      problems.push_back(p);
      outs.push_back(std::make_unique<DeviceOutputs>(p));
    }
    Gate gate(stream);
    for (size_t i = 0; i < problems.size(); ++i) {
      if (i == 4) gate.open();  // so many need nothing of the device
      CHECK_EMPTY(plan.plan(problems[i].batch_view(), stream).message);
      CHECK_EMPTY(plan.run(inputs.with(outs[i]->o, outs[i]->lse), stream).message);
    }
    stream.wait();
    for (size_t i = 0; i < problems.size(); ++i) CHECK_EMPTY(difference(problems[i], *outs[i]));
  }
}

TEST(streams_follow_each_other) {
  if (!has_gpu()) return;
  Random random(3);
  Problem p = shared_problem(random);
  Plan plan;
  CHECK_EMPTY(Plan::create(p.options, &plan).message);
  const DeviceInputs inputs(p, plan.workspace_bytes());
  const TestStream streams[3];
  for (int round = 0; round < 20; ++round) {
    std::vector<Problem> problems;
    std::vector<std::unique_ptr<DeviceOutputs>> outs;
    for (int i = 0; i < 4; ++i) {
      new_batch(random, &p);
      const size_t first = outs.size();
      for (int runs = random.between(1, 2); runs > 0; --runs) {
        problems.push_back(p);
        outs.push_back(std::make_unique<DeviceOutputs>(p));
      }
      const Stream held = streams[random.between(0, 2)];
      Gate gate(held);
      const Stream upload = streams[random.between(0, 2)];
      CHECK_EMPTY(plan.plan(p.batch_view(), upload).message);
      for (size_t run = first; run < outs.size(); ++run) {
        const Stream stream = random.one_in(2) ? upload : Stream(streams[random.between(0, 2)]);
        CHECK_EMPTY(plan.run(inputs.with(outs[run]->o, outs[run]->lse), stream).message);
      }
      gate.open();
      CHECK_CUDA(cudaStreamSynchronize(held));  // the gate must outlive its use
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    for (size_t i = 0; i < problems.size(); ++i) CHECK_EMPTY(difference(problems[i], *outs[i]));
  }
}

TEST(a_captured_run_serves_every_later_plan) {
  if (!has_gpu()) return;
  Random random(4);
  Problem p = shared_problem(random);
  Problem largest = p;
  for (int i = 0; i < 8; ++i) largest.batch.add(32, 2000);
  Plan plan;
  CHECK_EMPTY(Plan::create(p.options, &plan).message);
  const DeviceInputs inputs(p, plan.workspace_bytes());
  const DeviceOutputs out(largest);
  const TestStream stream;
  for (const bool empty_at_capture : {false, true}) {
    Problem captured = largest;
    if (empty_at_capture) captured.batch = HostBatch();
    CHECK_EMPTY(plan.plan(captured.batch_view(), stream).message);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    const Status refused = plan.plan(largest.batch_view(), stream);
    CHECK_EQ(static_cast<int>(refused.code), static_cast<int>(StatusCode::kNotReady));
    CHECK_EQ(std::string(refused.message),
             "stream: expected no capture under way, got a capturing stream");
    CHECK_EQ(plan.schedule().num_tokens, captured.batch.qo_tokens());
    CHECK_EMPTY(plan.run(inputs.with(out.o, out.lse), stream).message);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
    for (int i = 0; i < 30; ++i) {
      new_batch(random, &p);
      CHECK_CUDA(cudaMemsetAsync(out.o.view().data, 0xff, 258 * 4 * 64 * 2, stream));
      CHECK_CUDA(cudaMemsetAsync(out.lse.view().data, 0xff, 258 * 4 * 4, stream));
      CHECK_EMPTY(plan.plan(p.batch_view(), stream).message);
      CHECK_CUDA(cudaGraphLaunch(replay, stream));
      stream.wait();
      // As an output of the largest batch, whose further rows stay as they were.
      Problem padded = p;
      padded.batch.add(256 - p.batch.qo_tokens(), 0);
      Outputs got(padded);
      out.o.read(&got.o);
      out.lse.read(&got.lse);
      const DeviceOutputs only(p);
      CHECK_CUDA(cudaMemcpy(only.o.view().data, out.o.view().data, Outputs(p).o.bytes().size(),
                            cudaMemcpyDeviceToDevice));
      CHECK_CUDA(cudaMemcpy(only.lse.view().data, out.lse.view().data,
                            Outputs(p).lse.bytes().size(), cudaMemcpyDeviceToDevice));
      CHECK_EMPTY(difference(p, only));
      for (int64_t row = p.batch.qo_tokens(); row < got.lse.size(0); ++row) {
        CHECK(std::isnan(got.lse.get({row, 0})) && std::isnan(got.o.get({row, 0, 0})));
      }
    }
    CHECK_CUDA(cudaGraphExecDestroy(replay));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
}

TEST(a_stream_of_another_device_is_refused) {
  if (!has_gpu() || cuda::num_devices() < 2) return;
  Random random(5);
  Problem p = shared_problem(random);
  new_batch(random, &p);
  p.options.device = {DeviceType::kCuda, 1};
  Plan plan;
  CHECK_EMPTY(Plan::create(p.options, &plan).message);
  const TestStream stream;  // of device 0
  CHECK_EQ(std::string(plan.plan(p.batch_view(), stream).message),
           "stream: expected a stream of cuda:1, got one of cuda:0");
  int current = -1;
  CHECK_CUDA(cudaGetDevice(&current));
  CHECK_EQ(current, 0);
}

}  // namespace
}  // namespace flashplan::test
