// SPDX-License-Identifier: Apache-2.0
// Every call of CUDA and NVRTC fails once, on a fake runtime: the call of the library that made it
// reports it or does without, nothing leaks, and when the same call is made again it succeeds.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "abi/params.h"
#include "check.h"
#include "cpp/problem.h"
#include "cuda/memory.h"
#include "fake_cuda.h"
#include "fake_plan.h"
#include "ops/cuda/launch.h"
#include "variant_compiler.h"

namespace flashplan::test {
namespace {

/// Something that a caller does, and that it may do again after an error.
struct Step {
  const char* name;
  std::function<Status()> call;
};

/// The errors of a step in which a call of CUDA failed.
bool is_error_of_cuda(const Status& status) {
  return status.code == StatusCode::kCudaError || status.code == StatusCode::kOutOfMemory;
}

/// Whether a failed call makes the library see no GPU, or a compiler's error.
bool is_told_otherwise(const std::string& call) {
  return call.starts_with("cudaGetDeviceCount") || call.starts_with("cudaGetDeviceProperties") ||
         call.starts_with("nvrtc");
}

/// A failed call leaves no error behind that another user of CUDA would find, and the thread as it
/// was.
void check_thread(const char* step) {
  if (fake_cuda::failed_to_restore()) fake_cuda::reset_thread();
  const bool is_as_before =
      fake_cuda::current_device() == 0 && fake_cuda::capture_mode() == cudaStreamCaptureModeGlobal;
  if (!is_as_before) check::fail(step, 0, "changed the thread: " + fake_cuda::first_failed());
  if (cudaGetLastError() != cudaSuccess) {
    check::fail(step, 0, "left an error behind: " + fake_cuda::first_failed());
  }
  fake_cuda::reset_thread();
}

/// Takes all steps. One that fails is taken again.
void take_steps(const std::vector<Step>& steps) {
  for (const Step& step : steps) {
    const int64_t before = fake_cuda::num_failed();
    const Status status = step.call();
    check_thread(step.name);
    if (status.ok()) continue;
    const std::string call = fake_cuda::first_failed();
    const bool is_fault = fake_cuda::num_failed() > before;
    const bool is_typed = is_error_of_cuda(status) || is_told_otherwise(call);
    if (!is_fault || !is_typed) check::fail(step.name, 0, call + ": " + status.message);
    const Status again = step.call();
    if (!again.ok()) check::fail(step.name, 0, "again after " + call + ": " + again.message);
  }
}

/// Takes all steps with every call failing from one on, then, when CUDA works again, once more.
void take_steps_without_cuda(const std::vector<Step>& steps) {
  for (const Step& step : steps) {
    const Status status = step.call();
    check_thread(step.name);
    const bool is_typed = is_error_of_cuda(status) || status.code == StatusCode::kNotReady ||
                          is_told_otherwise(fake_cuda::first_failed());
    if (!status.ok() && !is_typed) check::fail(step.name, 0, status.message);
  }
  fake_cuda::stop_failing();
  take_steps(steps);
}

const void* schedule_of_launch(void** arguments) {
  return static_cast<const AttentionParams*>(arguments[0])->schedule.starts;
}

/// Calls `make_steps`, which gives the steps of new objects, and takes them: for each n with the
/// n-th call failing, then with all calls failing from the n-th on. Objects die with the steps. The
/// code of variants stays loaded: `num_libraries` for each object.
void fail_each_call(const std::vector<cudaError_t>& codes,
                    const std::function<std::vector<Step>()>& make_steps, int num_libraries = 0) {
  for (const bool for_ever : {false, true}) {
    for (const cudaError_t code : codes) {
      bool is_over = false;
      for (int64_t n = 0; !is_over; ++n) {
        fake_cuda::Alive expected = fake_cuda::alive();
        expected.libraries += num_libraries;
        fake_cuda::fail_after(n, for_ever, code);
        {
          const std::vector<Step> steps = make_steps();
          for_ever ? take_steps_without_cuda(steps) : take_steps(steps);
        }
        check_thread("destructor");
        is_over = fake_cuda::num_failed() == 0;
        fake_cuda::stop_failing();
        const std::string call = fake_cuda::first_failed() + ", call " + std::to_string(n);
        if (!(fake_cuda::alive() == expected)) check::fail("leak", 0, call);
        const std::string mistakes = fake_cuda::take_mistakes();
        if (!mistakes.empty()) check::fail("mistakes", 0, call + ": " + mistakes);
      }
    }
  }
}

const std::vector<cudaError_t> kAnyError = {cudaErrorUnknown};
const std::vector<cudaError_t> kAnyErrorAndNoMemory = {cudaErrorUnknown, cudaErrorMemoryAllocation};

AttentionTensors on_gpu(AttentionTensors t) {
  for (TensorView* view : {&t.q, &t.k, &t.v, &t.block_table, &t.page_indptr, &t.page_indices,
                           &t.kv_lens, &t.o, &t.lse}) {
    if (!view->empty()) view->device = kGpu;
  }
  return t;
}

/// A paged problem on the GPU with a request for each number of queries, within bounds that hold
/// for all of them.
Problem problem_of(const std::vector<int32_t>& qo_lens) {
  Problem p;
  AttentionOptions& o = p.options;
  o.num_qo_heads = 4;
  o.num_kv_heads = 2;
  o.head_dim_qk = o.head_dim_vo = 128;
  o.q_dtype = o.kv_dtype = o.o_dtype = DType::kBFloat16;
  o.page_size = 16;
  o.device = kGpu;
  for (const int32_t qo_len : qo_lens) p.batch.add(qo_len, 40 + 30 * p.batch.size());
  Random random(1);
  fill_problem(random, p);
  o.max_qo_tokens = 256;
  return p;
}

/// A Plan with what its steps need.
struct Session {
  inline static const Problem decodes = problem_of({1, 1, 1});
  inline static const Problem prompts = problem_of({40, 40, 40});
  inline static const Problem mixed = problem_of({1, 40, 1});
  inline static const Outputs out{prompts};  // of any batch; nothing is written
  AttentionOptions options = decodes.options;
  Plan plan;
  std::unique_ptr<Workspace> workspace;

  Status create() {
    const Status status = Plan::create(options, &plan);
    if (status.ok()) workspace = std::make_unique<Workspace>(plan.workspace_bytes());
    return status;
  }
  /// After an error of CUDA the last plan is still there, or there is none; and another batch can
  /// be planned at once, on `other`.
  Status plan_for(const Problem& p, Stream stream, Stream other) {
    const Status status = plan.plan(p.batch_view(), stream);
    if (status.ok()) planned_ = &p;
    if (status.ok() || workspace == nullptr) return status;
    const Status run = run_on(stream);
    const bool is_typed = run.code == StatusCode::kNotReady || is_error_of_cuda(run);
    if (!run.ok() && !is_typed) check::fail("run after plan", 0, run.message);
    if (fake_cuda::is_working()) {
      const Problem& next = &p == &decodes ? prompts : decodes;
      CHECK_EQ(plan.plan(next.batch_view(), other).message, std::string());
    }
    return status;
  }
  /// Runs what was planned last.
  Status run_on(Stream stream) {
    if (workspace == nullptr || planned_ == nullptr) return plan.run({}, stream);
    return plan.run(on_gpu(tensors_of(*planned_, out, *workspace)), stream);
  }
  Status check_data(Stream stream) {
    const AttentionTensors t = on_gpu(tensors_of(decodes, out, *workspace));
    DeviceData data;
    data.block_table = t.block_table;
    data.page_indptr = t.page_indptr;
    data.page_indices = t.page_indices;
    data.num_pages = t.k.shape[0];
    return plan.check_device_data(data, stream);
  }

 private:
  const Problem* planned_ = nullptr;
};

TEST(plans_and_runs) {
  const TestStream one, other;
  fake_cuda::set_memory_of_launch(&schedule_of_launch);
  fail_each_call(kAnyErrorAndNoMemory, [&] {
    const auto s = std::make_shared<Session>();
    const Stream a = one;
    const Stream b = other;
    return std::vector<Step>{
        {"create", [=] { return s->create(); }},
        {"plan", [=] { return s->plan_for(s->prompts, a, b); }},
        {"run", [=] { return s->run_on(a); }},
        {"another kernel", [=] { return s->plan_for(s->decodes, a, b); }},
        {"its run", [=] { return s->run_on(a); }},
        {"check_device_data", [=] { return s->workspace ? s->check_data(a) : Status(); }},
        {"run on another stream", [=] { return s->run_on(b); }},
        {"run again", [=] { return s->run_on(a); }},
        {"plan on another stream", [=] { return s->plan_for(s->prompts, b, a); }},
        {"run there", [=] { return s->run_on(b); }},
        {"plans ahead", [=] { return s->plan_for(s->decodes, b, a); }},
        {"plans ahead", [=] { return s->plan_for(s->prompts, b, a); }},
        {"plans ahead", [=] { return s->plan_for(s->decodes, a, b); }},
        {"last run", [=] { return s->run_on(a); }},
    };
  });
}

TEST(runs_of_two_kernels) {
  const TestStream one, other;
  fake_cuda::set_memory_of_launch(&schedule_of_launch);
  fail_each_call(kAnyError, [&] {
    const auto s = std::make_shared<Session>();
    const Stream a = one;
    const Stream b = other;
    s->options.batch_invariant = true;
    return std::vector<Step>{
        {"create", [=] { return s->create(); }},
        {"plan", [=] { return s->plan_for(s->mixed, a, b); }},
        {"run", [=] { return s->run_on(a); }},
        {"run on another stream", [=] { return s->run_on(b); }},
        {"plan there", [=] { return s->plan_for(s->mixed, b, a); }},
        {"run again", [=] { return s->run_on(a); }},
        {"plan for one kernel", [=] { return s->plan_for(s->prompts, a, b); }},
        {"its run", [=] { return s->run_on(b); }},
    };
  });
}

/// Where a run fails after its first launch, what comes next on another stream waits for it.
TEST(runs_that_fail_between_two_launches) {
  const TestStream one, other;
  fake_cuda::set_memory_of_launch(&schedule_of_launch);
  bool is_over = false;
  for (int64_t n = 0; !is_over; ++n) {
    Session s;
    s.options.batch_invariant = true;
    CHECK(s.create().ok());
    CHECK(s.plan_for(s.mixed, one, one).ok());
    fake_cuda::fail_after(n);
    static_cast<void>(s.run_on(one));  // it may do without some calls
    is_over = fake_cuda::num_failed() == 0;
    fake_cuda::stop_failing();
    fake_cuda::reset_thread();
    CHECK(s.plan_for(s.decodes, other, other).ok());
    CHECK_EQ(fake_cuda::take_mistakes(), std::string());
  }
}

TEST(captured_runs) {
  const TestStream stream;
  fake_cuda::set_memory_of_launch(&schedule_of_launch);
  fail_each_call(kAnyErrorAndNoMemory, [&] {
    const auto s = std::make_shared<Session>();
    const Stream on = stream;
    return std::vector<Step>{
        {"create", [=] { return s->create(); }},
        {"plan", [=] { return s->plan_for(s->prompts, on, on); }},
        {"captured run",
         [=] {
           fake_cuda::set_capturing(on, true);
           const Status status = s->run_on(on);
           fake_cuda::set_capturing(on, false);
           return status;
         }},
        {"next plan", [=] { return s->plan_for(s->decodes, on, on); }},
    };
  });
}

/// What plan.h promises of streams that die: only that of the last plan() is needed, until the next
/// one on another stream.
TEST(streams_that_were_destroyed) {
  fake_cuda::set_memory_of_launch(&schedule_of_launch);
  for (const bool is_too_early : {false, true}) {
    Session s;
    CHECK(s.create().ok());
    const TestStream last;
    {
      const TestStream other;
      {
        const TestStream first;
        CHECK(s.plan_for(s.prompts, first, first).ok());
        CHECK(s.run_on(first).ok());
        if (!is_too_early) CHECK(s.plan_for(s.decodes, other, other).ok());
      }
      CHECK_EQ(fake_cuda::take_mistakes(), std::string());
      CHECK(s.run_on(other).ok());
      CHECK_EQ(fake_cuda::take_mistakes().empty(), !is_too_early);
      if (is_too_early) continue;
      CHECK(s.plan_for(s.prompts, last, last).ok());
      CHECK(s.run_on(other).ok());  // this stream needs not be there afterwards
    }
    CHECK(s.run_on(last).ok());
    CHECK(s.plan_for(s.decodes, last, last).ok());
    CHECK_EQ(fake_cuda::take_mistakes(), std::string());
  }
}

/// A variant of a new name, so that nothing of it is loaded.
Variant new_variant() {
  static int32_t count = 0;
  const std::string name = "shifted" + std::to_string(count++);
  VariantDescription description;
  description.name = name.c_str();
  description.output = "return x + 1.0f;";
  Variant variant;
  CHECK(Variant::create(description, &variant).ok());
  return variant;
}

TEST(variants) {
  ::setenv("FLASHPLAN_NVRTC", FLASHPLAN_FAKE_NVRTC, 1);
  const TestStream stream;
  fake_cuda::set_memory_of_launch(&schedule_of_launch);
  constexpr int kKernelsOfPlan = 2;
  const auto make_steps = [&] {
    const auto s = std::make_shared<Session>();
    const Stream on = stream;
    s->options.variant = new_variant();
    return std::vector<Step>{
        {"create",
         [=] {
           const Status status = s->create();
           const std::string log = s->options.variant.compile_log();
           CHECK(log.empty() || log == "a log\n");
           return status;
         }},
        {"plan", [=] { return s->plan_for(s->prompts, on, on); }},
        {"run", [=] { return s->run_on(on); }},
    };
  };
  fail_each_call(kAnyError, make_steps, kKernelsOfPlan);
}

struct NoParams {};
void no_kernel(NoParams /*params*/) {}

TEST(operators_and_memory) {
  const TestStream stream;
  fake_cuda::set_memory_of_launch(nullptr);
  fail_each_call(kAnyErrorAndNoMemory, [&] {
    const auto memory = std::make_shared<void*>();
    const auto byte = std::make_shared<char>();
    const Stream on = stream;
    return std::vector<Step>{
        {"launch of a cluster",
         [=] {
           const cuda::Grid grid = {{1}, {32}, 16, 64 << 10};
           return cuda::launch(no_kernel, grid, kGpu, on, NoParams());
         }},
        {"allocate", [=] { return cuda::allocate(kGpu.index, 1, memory.get()); }},
        {"copy_to_host",
         [=] {
           return *memory != nullptr ? cuda::copy_to_host(kGpu.index, *memory, 1, byte.get(), on)
                                     : Status();
         }},
        {"release",
         [=] {
           cuda::release(kGpu.index, std::exchange(*memory, nullptr));
           return Status();
         }},
        {"create_stream",
         [=] {
           Stream made = nullptr;
           const Status status = cuda::create_stream(kGpu.index, &made);
           if (status.ok()) static_cast<void>(cudaStreamDestroy(made));
           static_cast<void>(cudaGetLastError());  // of this cudaStreamDestroy()
           return status;
         }},
        {"synchronize", [=] { return cuda::synchronize(kGpu.index, on); }},
    };
  });
}

}  // namespace
}  // namespace flashplan::test
