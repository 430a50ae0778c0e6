// SPDX-License-Identifier: Apache-2.0
// Every allocation fails once, through the C++ and the C interface on the CPU: the call reports it
// or does without, nothing leaks, and when the same call is made again it succeeds. Each attempt
// has a process of its own, in which nothing has been used before.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocations.h"
#include "c_structs.h"
#include "check.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c.h"
#include "problem.h"
#include "small_options.h"
#include "variant_compiler.h"
#include "variant_options.h"

namespace flashplan::test {
namespace {

namespace fs = std::filesystem;

/// Something that a caller does, and that it may do again after an error.
struct Step {
  const char* name;
  std::function<Status()> call;
};

enum class Faults { kOnce, kForEver };

/// Lets allocation number `n` from now on fail, as long as it lives.
class Failing {
 public:
  Failing(int64_t n, Faults faults) {
    only_one_fails = faults == Faults::kOnce;
    allocations_left = n;
  }
  ~Failing() { allocations_left = kAllSucceed; }
  Failing(const Failing&) = delete;
  Failing& operator=(const Failing&) = delete;
  static bool is_over() { return allocations_left < 0; }
};

/// Takes the steps with an allocation failing in step number `which`, then that step again and the
/// others. False: the step made fewer allocations.
bool take_steps(const std::vector<Step>& steps, std::size_t which, int64_t n, Faults faults) {
  bool has_failed = false;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    if (i == which) {
      Status status;
      {
        const Failing failing(n, faults);
        status = step.call();
        has_failed = Failing::is_over();
      }
      const bool is_typed = status.code == StatusCode::kOutOfMemory;
      if (!status.ok() && !(has_failed && is_typed)) {
        check::fail(step.name, static_cast<int>(n), status.message);
      }
      if (status.ok()) continue;
    }
    const Status status = step.call();
    if (!status.ok()) check::fail(step.name, static_cast<int>(n), status.message);
  }
  return has_failed;
}

/// Runs `body` in a process of its own. Returns its status.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

constexpr int kFailed = 1;
constexpr int kIsOver = 2;  // the step made no allocation that failed

/// `make_steps` gives the steps of new objects. In each step each allocation fails, or every
/// `stride`-th after the first `stride` squared: in a process that is new, and in one that has
/// taken the steps before, where everything is freed in the end.
void fail_each_allocation(const std::function<std::vector<Step>()>& make_steps,
                          int64_t stride = 1) {
  const std::size_t num_steps = make_steps().size();
  for (const Faults faults : {Faults::kOnce, Faults::kForEver}) {
    for (std::size_t which = 0; which < num_steps; ++which) {
      for (const bool is_warm : {false, true}) {
        int result = 0;
        for (int64_t n = 0; result == 0; n += n < stride * stride ? 1 : stride) {
          result = in_child([&] {
            check::failures = 0;
            if (is_warm) take_steps(make_steps(), num_steps, 0, faults);
            const int64_t before = num_alive;
            const bool has_failed = take_steps(make_steps(), which, n, faults);
            if (is_warm) CHECK_EQ(num_alive, before);
            return check::failures > 0 ? kFailed : has_failed ? 0 : kIsOver;
          });
          if (result != 0 && result != kIsOver) {
            const std::string text = make_steps()[which].name + std::string(": ended with ");
            check::fail(is_warm ? "warm" : "new", static_cast<int>(n),
                        text + std::to_string(result));
            result = 0;
          }
        }
      }
    }
  }
}

/// Two requests that share two pages of keys, and work for several threads.
Problem small_problem() {
  Problem p;
  p.options = small_options(4);
  p.options.num_ctas = 8;
  p.options.max_batch_size = 2;
  p.batch.add(1, 1009);
  p.batch.add(2, 1010);
  Random random(1);
  fill_problem(random, p);
  p.batch.shared_prefixes = {0, 2, 8};
  return p;
}

struct Session {
  Problem problem = small_problem();
  Outputs out{problem};
  Plan plan;
  Workspace workspace{1 << 20};

  AttentionTensors tensors() { return tensors_of(problem, out, workspace); }
};

TEST(plans_and_runs) {
  CHECK(set_num_threads(3).ok());
  fail_each_allocation([] {
    const auto s = std::make_shared<Session>();
    return std::vector<Step>{
        {"is_supported", [=] { return is_supported(s->problem.options); }},
        {"create", [=] { return Plan::create(s->problem.options, &s->plan); }},
        {"plan", [=] { return s->plan.plan(s->problem.batch_view()); }},
        {"run", [=] { return s->plan.run(s->tensors()); }},
        {"check_device_data",
         [=] {
           const AttentionTensors t = s->tensors();
           DeviceData data;
           data.block_table = t.block_table;
           data.page_indptr = t.page_indptr;
           data.page_indices = t.page_indices;
           data.num_pages = t.k.shape[0];
           return s->plan.check_device_data(data);
         }},
        {"texts",
         [=] {
           s->plan.describe();
           s->plan.timeline_svg();
           show_config();
           return Status();
         }},
    };
  });
}

/// What the C interface is called with, made before.
struct CSession : Session {
  CTensors owner;
  Message message;
  CPlan plan;
  flashplan_options options = c_options(problem.options);
  flashplan_batch batch = c_batch(problem.batch_view());
  flashplan_attention_tensors run = c_tensors(tensors(), owner);
  std::vector<int32_t> groups = std::vector<int32_t>(6);

  static constexpr int32_t kStates = 9;  // more than merge_states has memory for
  HostTensor o{DType::kFloat32, {1, 1, 1}}, lse{DType::kFloat32, {1, 1}};
  HostTensor merged_o = o, merged_lse = lse;
  std::vector<const flashplan_tensor*> all_o{kStates, owner.add(o.view())};
  std::vector<const flashplan_tensor*> all_lse{kStates, owner.add(lse.view())};
  const flashplan_tensor* out_o = owner.add(merged_o.view());
  const flashplan_tensor* out_lse = owner.add(merged_lse.view());

  Status done(flashplan_status code) { return as_status(code, message); }
};

TEST(the_c_interface) {
  fail_each_allocation([] {
    const auto s = std::make_shared<CSession>();
    return std::vector<Step>{
        {"is_supported", [=] { return s->done(flashplan_is_supported(&s->options, s->message)); }},
        {"create",
         [=] {
           flashplan_plan* made = nullptr;
           const Status status = s->done(flashplan_plan_create(&s->options, &made, s->message));
           CHECK_EQ(made != nullptr, status.ok());
           s->plan.reset(made);
           return status;
         }},
        {"plan",
         [=] {
           return s->done(flashplan_plan_plan(s->plan.get(), &s->batch, nullptr, s->message));
         }},
        {"run",
         [=] { return s->done(flashplan_plan_run(s->plan.get(), &s->run, nullptr, s->message)); }},
        {"texts",
         [=] {
           flashplan_plan_describe(s->plan.get(), nullptr, 0);
           flashplan_show_config(nullptr, 0);
           return Status();
         }},
        {"find_shared_prefixes",
         [=] {
           int32_t count = 0;
           return s->done(flashplan_find_shared_prefixes(
               &s->batch, s->options.page_size, s->run.block_table, s->run.page_indptr,
               s->run.page_indices, s->groups.data(), &count, s->message));
         }},
        {"merge_states",
         [=] {
           return s->done(flashplan_merge_states(s->all_o.data(), s->all_lse.data(), s->kStates,
                                                 s->out_o, s->out_lse, nullptr, s->message));
         }},
    };
  });
}

/// Tensors of the operators that draw and count tokens.
struct Tokens {
  HostTensor logits{DType::kFloat32, {2, 5}};
  HostTensor history{DType::kInt32, {2, 1}}, lens = int_tensor({1, 0});
  HostTensor ids = int_tensor({0, 0}), accepted = ids;
  HostTensor draft_tokens{DType::kInt32, {2, 1}};
  HostTensor draft{DType::kFloat32, {2, 1, 5}}, target{DType::kFloat32, {2, 2, 5}};
  HostTensor tokens{DType::kInt32, {2, 2}}, nodes{DType::kInt32, {2, 1}};

  Tokens() {
    for (int64_t r = 0; r < 2; ++r) {
      history.set_bits({r, 0}, 3);
      draft_tokens.set_bits({r, 0}, 1);
      for (int64_t token = 0; token < 5; ++token) {
        logits.set({r, token}, static_cast<double>(token));
        draft.set({r, 0, token}, 0.2);
        for (int64_t i = 0; i < 2; ++i) target.set({r, i, token}, 0.2);
      }
    }
  }
};

TEST(operators) {
  fail_each_allocation([] {
    const auto t = std::make_shared<Tokens>();
    return std::vector<Step>{
        {"sample",
         [=] {
           SampleOptions options;
           options.top_k = 3;
           return sample(t->logits.view(), options, {t->ids.view(), {}, {}});
         }},
        {"softmax", [=] { return softmax(t->logits.view(), 1.0F, {}, t->logits.view()); }},
        {"apply_penalties",
         [=] {
           PenaltyOptions options;
           options.frequency = 0.5F;
           return apply_penalties(t->logits.view(), t->history.view(), t->lens.view(), options);
         }},
        {"speculative_verify",
         [=] {
           Drafts drafts;
           drafts.tokens = t->draft_tokens.view();
           drafts.draft_probs = t->draft.view();
           drafts.target_probs = t->target.view();
           return speculative_verify(drafts, {},
                                     {t->tokens.view(), t->accepted.view(), t->nodes.view(), {}});
         }},
    };
  });
}

/// A compiler that keeps what it has made for the next call, since each attempt needs it.
class KeepingCompiler {
 public:
  KeepingCompiler() {
    const std::string script = folder_.path() / "cxx";
    const std::string kept = folder_.path() / "kept.so";
    std::ofstream(script) << "#!/bin/sh\n[ -f " << kept << " ] || { c++ \"$@\" && cp variant.so "
                          << kept << ".new && mv " << kept << ".new " << kept << "; } && cp "
                          << kept << " variant.so\n";
    CHECK_EQ(::chmod(script.c_str(), 0700), 0);
    ::setenv("CXX", script.c_str(), 1);
  }
  ~KeepingCompiler() { ::unsetenv("CXX"); }

 private:
  TemporaryFolder folder_;
};

TEST(variants) {
  const KeepingCompiler compiler;
  const fs::path cache = fresh_variants.cache.path();
  const TemporaryFolder temporary;  // where attempts without memory may leave something
  ::setenv("TMPDIR", temporary.path().c_str(), 1);
  constexpr int64_t kStride = 11;  // a create() makes 600 allocations, and takes milliseconds
  fail_each_allocation(
      [&] {
        fs::remove_all(cache);
        const auto variant = std::make_shared<Variant>();
        const auto plan = std::make_shared<Plan>();
        return std::vector<Step>{
            {"variant",
             [=] {
               VariantDescription description;
               description.name = "shifted";
               description.value = "return x + 1.0f;";
               return Variant::create(description, variant.get());
             }},
            {"is_supported", [=] { return is_supported(options_with(*variant)); }},
            {"create", [=] { return Plan::create(options_with(*variant), plan.get()); }},
            {"log",
             [=] {
               variant->compile_log();
               return Status();
             }},
        };
      },
      kStride);
  ::unsetenv("TMPDIR");
}

}  // namespace
}  // namespace flashplan::test
