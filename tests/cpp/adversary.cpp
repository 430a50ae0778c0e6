// SPDX-License-Identifier: Apache-2.0
// Random misuse of the C++ functions; meant for the sanitizers. A valid call is made wrong in one
// field: it must be refused, name the argument and write nothing, or, where the field does not
// matter, give the bytes of the valid call.
//   adversary [--seconds N] [--seed S] [--first C]   search, from case C on
//   adversary [--seed S] --case C                     one case again
#include <chrono>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "flashplan/flashplan.h"
#include "misuse.h"
#include "misuse_operators.h"
#include "problem.h"

// A report of a sanitizer ends in SIGABRT, whose handler says which case it was.
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
#ifdef __SANITIZE_ADDRESS__
constexpr int kSignals[] = {SIGABRT};
#else
constexpr int kSignals[] = {SIGABRT, SIGSEGV, SIGFPE, SIGILL, SIGBUS};
#endif

namespace flashplan::test {
namespace {

std::map<std::string, long long> tried;

Problem any_problem(Random& random) {
  Problem p = random_problem(random);
  const int32_t size = random.between(0, 4);
  for (int32_t r = 0; r < size; ++r) p.batch.add(random.between(0, 9), random.between(0, 60));
  if (random.one_in(3)) plan_upper_bounds(random, p, 20);
  if (random.one_in(3)) add_mask(random, p);
  if (random.one_in(3)) add_sinks(random, p);
  if (random.one_in(3)) add_head_scales(random, p);
  fill_problem(random, p);
  return p;
}

AttentionOptions any_options(Random& random) {
  AttentionOptions o = random_problem(random).options;
  o.max_batch_size = random.between(1, 9);
  o.max_qo_tokens = random.between(1, 99);
  const auto any = [&] {
    return random.pick(
        {0, 1, -1, 2, 3, 1000, 4096, 65536, 65537, 1 << 20, INT_MAX, INT_MIN, INT_MAX - 1});
  };
  const auto any_float = [&] {
    return random.pick(
        {0.0F, -0.0F, -1.0F, 1e-39F, 1e-45F, 1e-30F, 1e30F, 3e38F, INFINITY, -INFINITY, NAN});
  };
  for (int32_t i = random.between(1, 3); i > 0; --i) {
    switch (random.between(0, 17)) {
      case 0: o.num_qo_heads = any(); break;
      case 1: o.num_kv_heads = any(); break;
      case 2: o.head_dim_qk = any(); break;
      case 3: o.head_dim_vo = any(); break;
      case 4: o.page_size = any(); break;
      case 5: o.kv_layout = static_cast<KvLayout>(any()); break;
      case 6: o.q_dtype = static_cast<DType>(any()); break;
      case 7: o.kv_dtype = static_cast<DType>(any()); break;
      case 8: o.o_dtype = static_cast<DType>(any()); break;
      case 9: o.window_left = any(); break;
      case 10: o.softmax_scale = any_float(); break;
      case 11: o.softcap = any_float(); break;
      case 12: o.max_batch_size = any(); break;
      case 13: o.max_qo_tokens = any(); break;
      case 14: o.device.type = static_cast<DeviceType>(any()); break;
      case 15: o.device.index = any(); break;
      case 16: o.num_ctas = any(); break;
      default: o.workspace_bytes = static_cast<size_t>(any()); break;
    }
  }
  // What select_kernel allows may be more memory than there is.
  const int64_t rows = int64_t{o.max_qo_tokens} * o.num_qo_heads;
  if (o.max_batch_size > 1 << 16 || rows > 1 << 22) o.max_batch_size = o.max_qo_tokens = 1;
  if (o.num_ctas > 1000 && o.head_dim_vo > 1000) o.num_ctas = 3;
  return o;
}

void misuse_create(Random& random) {
  const AttentionOptions options = any_options(random);
  about = "create";
  Plan plan;
  const Status supported = is_supported(options);
  const Status status = Plan::create(options, random.one_in(50) ? nullptr : &plan);
  const std::string names =
      " num_qo_heads num_kv_heads head_dim_qk head_dim_vo head_dim_qk, head_dim_vo page_size "
      "kv_layout "
      "q_dtype kv_dtype o_dtype window_left softmax_scale softcap max_batch_size max_qo_tokens "
      "device num_ctas workspace plan ";
  if (!supported.ok()) check_refusal(supported, names);
  if (!status.ok()) return check_refusal(status, names);
  if (!supported.ok()) found("create() works, is_supported() says no");
  const auto known = [](auto value, int largest) {
    return static_cast<int>(value) >= 0 && static_cast<int>(value) <= largest;
  };
  if (!known(options.kv_layout, 1)) found("an unknown kv_layout was accepted");
  if (!known(options.device.type, 1)) found("an unknown device was accepted");
  const int32_t qo_indptr[] = {0, 1};
  const int32_t kv_lens[] = {random.pick({0, 1, 1000, INT_MAX})};
  const Status planned = plan.plan({qo_indptr, kv_lens, nullptr, 1});
  if (!planned.ok()) check_refusal(planned, " qo_indptr kv_lens ");
  if (plan.describe().empty()) found("describe() is empty");
  plan.timeline_svg();
  for (int32_t c = 0; c < plan.schedule().num_ctas; ++c) {
    if (plan.schedule().cta_cost[c] < 0) found("a negative cost");
  }
}

void misuse_plan(Random& random) {
  about = "plan";
  const Problem p = any_problem(random);
  Plan plan;
  if (!Plan::create(p.options, &plan).ok()) found("valid options were refused");
  Batch batch = p.batch_view();
  const std::string names = " qo_indptr kv_lens kv_indptr batch_size plan ";
  const bool some = batch.batch_size > 0;
  bool refuse = true;
  switch (random.between(0, 6)) {
    case 0: batch.qo_indptr = nullptr; break;
    case 1: batch.kv_lens = nullptr, refuse = some; break;
    case 2:
      batch.batch_size = random.pick({-1, INT_MIN, INT_MAX, p.options.max_batch_size + 1});
      break;
    case 3: plan = Plan(); break;
    case 4: {
      const Plan moved = std::move(plan);
      break;
    }
    case 5: batch.kv_indptr = nullptr, refuse = false; break;
    default: refuse = false; break;
  }
  const Status status = plan.plan(batch);
  if (status.ok() && refuse) found("a wrong batch was accepted");
  if (!status.ok()) check_refusal(status, names);
  plan.describe();
  plan.timeline_svg();
  if (plan.kernel_name() == nullptr) found("no name");
  (void)plan.workspace_bytes();
  (void)plan.options();
  // A Plan without a plan refuses to run.
  Outputs out(p);
  Workspace workspace(plan.workspace_bytes());
  Plan unplanned;
  if (random.one_in(2) && !Plan::create(p.options, &unplanned).ok()) found("refused");
  const Status run = unplanned.run(tensors_of(p, out, workspace));
  if (run.code != StatusCode::kNotReady) found("a run without a plan was not refused");
  check_refusal(run, " run ");
}

void misuse_run(Random& random) {
  const Problem p = any_problem(random);
  Plan plan;
  if (!Plan::create(p.options, &plan).ok()) found("valid options were refused");
  if (!plan.plan(p.batch_view()).ok()) found("a valid batch was refused");
  Outputs right(p);
  Workspace workspace(plan.workspace_bytes());
  about = "a valid run";
  if (!plan.run(tensors_of(p, right, workspace)).ok()) found("a valid run was refused");
  const std::string wrong = wrong_output(p, right);
  if (!wrong.empty()) found("differs from the reference: " + wrong);

  Outputs out(p);
  const Outputs before = out;
  AttentionTensors t = tensors_of(p, out, workspace);
  std::vector<Named> arguments = {{"q", &t.q, false},
                                  {"k", &t.k, false},
                                  {"v", &t.v, false},
                                  {"out", &t.o, true},
                                  {"lse", &t.lse, true}};
  for (const Named& table :
       {Named{"block_table", &t.block_table, false}, Named{"page_indptr", &t.page_indptr, false},
        Named{"page_indices", &t.page_indices, false}, Named{"kv_lens", &t.kv_lens, false},
        Named{"mask", &t.mask, false}, Named{"sinks", &t.sinks, false},
        Named{"k_scale", &t.k_scales, false}, Named{"v_scale", &t.v_scales, false}}) {
    if (!table.view->empty()) arguments.push_back(table);
  }
  Verdict verdict = Verdict::kRefuse;
  std::string names;
  if (random.one_in(6)) {
    about = "run with a wrong workspace or scale";
    names = " workspace k_scale v_scale ";
    switch (random.between(0, 3)) {
      case 0: t.workspace = nullptr; break;
      case 1: t.workspace_bytes -= 1; break;
      case 2: t.workspace = static_cast<char*>(t.workspace) + random.pick({1, 4, 128}); break;
      default:
        (random.one_in(2) ? t.k_scale : t.v_scale) = random.pick({0.0F, -1.0F, NAN, INFINITY});
    }
  } else if (about = "run"; !(random.one_in(4) && overlap(random, arguments, &names))) {
    const Named& argument = arguments[static_cast<size_t>(
        random.between(0, static_cast<int32_t>(arguments.size()) - 1))];
    about = std::string("run: ") + argument.name;
    verdict = spoil(random, *argument.view, argument.written);
    names = std::string(" ") + argument.name + ' ';
    // Tables name the pages of k and v.
    const bool has_pages = argument.view == &t.k || argument.view == &t.v;
    const bool is_table = std::string(argument.name).find("_") != std::string::npos;
    if (has_pages || is_table) names += "block_table page_indptr page_indices ";
    if (argument.view == &t.kv_lens && t.kv_lens.empty()) return;  // a run of the planned lengths
    const bool is_scale = argument.view == &t.k_scales || argument.view == &t.v_scales;
    if (is_scale && argument.view->rank == 1 && argument.view->shape[0] == 1) return;  // is valid
    if (argument.view == &t.sinks && t.sinks.dtype == DType::kBFloat16) return;        // is valid
    if ((is_scale || argument.view == &t.sinks) && argument.view->empty()) {
      argument.view->data = nullptr;
      const bool is_taken = plan.run(t).ok();
      const Outputs without = out;
      argument.view->data = &out;
      if (!is_taken || !plan.run(t).ok() || !(out == without)) found("read what is not given");
      return;
    }
    if (t.lse.empty()) {  // not given, so not written
      if (!plan.run(t).ok() || out.lse.bytes() != before.lse.bytes()) found("wrote an empty lse");
      return;
    }
  }
  const Status status = plan.run(t);
  if (!status.ok()) {
    check_refusal(status, names);
    if (!(out == before)) found("a refused run wrote");
    return;
  }
  if (verdict == Verdict::kRefuse) found("accepted");
  if (!(out == right)) found("an accepted run gives another result");
}

constexpr std::pair<const char*, void (*)(Random&)> kKinds[] = {
    {"create", misuse_create}, {"plan", misuse_plan},   {"run", misuse_run},
    {"run", misuse_run},       {"merge", misuse_merge}, {"append", misuse_append}};

void run_case(long long number) {
  current = number;
  Random random(seed * 1000003 + static_cast<uint64_t>(number));
  const auto& [name, body] = kKinds[static_cast<size_t>(number) % std::size(kKinds)];
  about = name;
  body(random);
  ++tried[name];
}

}  // namespace
}  // namespace flashplan::test

int main(int argc, char** argv) {
  using namespace flashplan::test;
  double seconds = 5;
  long long first = 0;
  long long only = -1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--seconds") seconds = std::atof(argv[i + 1]);
    if (option == "--seed") seed = std::strtoull(argv[i + 1], nullptr, 10);
    if (option == "--first") first = std::atoll(argv[i + 1]);
    if (option == "--case") only = std::atoll(argv[i + 1]);
  }
  for (const int number : kSignals) std::signal(number, on_signal);
  if (only >= 0) return run_case(only), 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (long long number = first; std::chrono::steady_clock::now() < end; ++number) run_case(number);
  std::printf("seed %llu, nothing found in", static_cast<unsigned long long>(seed));
  for (const auto& [name, count] : tried) std::printf(" %lld %s,", count, name.c_str());
  std::printf(" in %.0f s\n", seconds);
  return 0;
}
