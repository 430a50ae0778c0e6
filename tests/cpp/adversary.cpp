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

void misuse_merge(Random& random) {
  about = "merge";
  const DType dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  const int64_t shape[] = {random.between(0, 4), random.between(1, 3), random.pick({1, 8, 33})};
  std::vector<HostTensor> o;
  std::vector<HostTensor> lse;
  const int32_t count = random.between(1, 4);
  for (int32_t s = 0; s <= count; ++s) {  // the last one is the output
    o.emplace_back(dtype, std::vector<int64_t>(shape, shape + 3), random.pick({0, 3}));
    lse.emplace_back(DType::kFloat32, std::vector<int64_t>(shape, shape + 2));
    if (s == count) break;
    fill_random(random, o.back(), shape[0]);
    for (int64_t token = 0; token < shape[0]; ++token) {
      for (int64_t head = 0; head < shape[1]; ++head) lse.back().set({token, head}, random.unit());
    }
  }
  std::vector<AttentionState> states;
  for (int32_t s = 0; s < count; ++s) {
    const auto i = static_cast<size_t>(s);
    states.push_back({o[i].view(), lse[i].view()});
  }
  const AttentionState out{o.back().view(), lse.back().view()};
  HostTensor right_o = o.back();
  HostTensor right_lse = lse.back();
  if (!merge_states(states.data(), count, {right_o.view(), right_lse.view()}).ok()) {
    found("a valid merge was refused");
  }
  const std::vector<std::byte> before_o = o.back().bytes();
  const std::vector<std::byte> before_lse = lse.back().bytes();
  AttentionState to = out;
  Verdict verdict = Verdict::kRefuse;
  int32_t given = count;
  const AttentionState* from = states.data();
  const int32_t which = random.between(0, count + 1);
  if (which == count + 1) {
    about += ": count or pointer";
    if (random.one_in(2)) from = nullptr;
    given = from == nullptr ? count : random.pick({0, -1, INT_MIN});
  } else {
    AttentionState& state = which == count ? to : states[static_cast<size_t>(which)];
    const bool is_o = random.one_in(2);
    about += which == count ? ": the output's" : ": state " + std::to_string(which) + "'s";
    about += is_o ? " o" : " lse";
    verdict = spoil(random, is_o ? state.o : state.lse, which == count);
  }
  const Status status = merge_states(from, given, to);
  if (!status.ok()) {
    check_refusal(status, " o lse out ");
    if (o.back().bytes() != before_o || lse.back().bytes() != before_lse)
      found("a refused merge wrote");
    return;
  }
  if (verdict == Verdict::kRefuse) found("accepted");
  if (o.back().bytes() != right_o.bytes() || lse.back().bytes() != right_lse.bytes()) {
    found("an accepted merge gives another result");
  }
}

void misuse_append(Random& random) {
  about = "append";
  Problem p = random_problem(random);
  if (p.options.page_size == 0) p.options.page_size = 4;
  std::vector<int32_t> indptr = {0};
  const int32_t size = random.between(1, 4);
  for (int32_t r = 0; r < size; ++r) {
    const int32_t kv_len = random.between(0, 40);
    p.batch.add(1, kv_len);
    indptr.push_back(indptr.back() + random.between(0, kv_len));
  }
  fill_problem(random, p);
  const AttentionOptions& options = p.options;
  HostTensor k(options.q_dtype, {indptr.back() + 1, options.num_kv_heads, options.head_dim_qk});
  HostTensor v(options.q_dtype, {indptr.back() + 1, options.num_kv_heads, options.head_dim_vo});
  fill_random(random, k, indptr.back());
  fill_random(random, v, indptr.back());
  const HostTensor indptr_tensor = int_tensor(indptr);
  const HostTensor kv_lens = int_tensor(p.batch.kv_lens);
  AppendTensors t;
  t.k = k.view();
  t.v = v.view();
  t.indptr = indptr_tensor.view();
  t.kv_lens = kv_lens.view();
  t.block_table = p.block_table.view();
  t.page_indptr = p.page_indptr.view();
  t.page_indices = p.page_indices.view();
  t.layout = options.kv_layout;
  HostTensor right_k = p.k;
  HostTensor right_v = p.v;
  t.k_cache = right_k.view();
  t.v_cache = right_v.view();
  if (!append_paged_kv(t).ok()) found("a valid append was refused");
  const std::vector<std::byte> before_k = p.k.bytes();
  const std::vector<std::byte> before_v = p.v.bytes();
  t.k_cache = p.k.view();
  t.v_cache = p.v.view();

  std::vector<Named> arguments = {{"k", &t.k, false},
                                  {"v", &t.v, false},
                                  {"k_cache", &t.k_cache, true},
                                  {"v_cache", &t.v_cache, true},
                                  {"indptr", &t.indptr, false},
                                  {"kv_lens", &t.kv_lens, false}};
  for (const Named& table :
       {Named{"block_table", &t.block_table, false}, Named{"page_indptr", &t.page_indptr, false},
        Named{"page_indices", &t.page_indices, false}}) {
    if (!table.view->empty()) arguments.push_back(table);
  }
  std::string names = names_of(arguments) + "k_scale v_scale layout kv_layout block_table device ";
  Verdict verdict = Verdict::kRefuse;
  if (random.one_in(8)) {
    if (random.one_in(2)) {
      about += ": layout";
      t.layout = static_cast<KvLayout>(random.pick({2, 7, -1, INT_MAX}));
    } else {
      about += ": scale";
      (random.one_in(2) ? t.k_scale : t.v_scale) = random.pick({0.0F, -1.0F, NAN, INFINITY});
    }
  } else if (!(random.one_in(4) && overlap(random, arguments, &names))) {
    const Named& argument = arguments[static_cast<size_t>(
        random.between(0, static_cast<int32_t>(arguments.size()) - 1))];
    about += std::string(": ") + argument.name;
    verdict = spoil(random, *argument.view, argument.written, false);
  }
  const Status status = append_paged_kv(t);
  if (!status.ok()) {
    check_refusal(status, names);
    if (p.k.bytes() != before_k || p.v.bytes() != before_v) found("a refused append wrote");
    return;
  }
  if (verdict == Verdict::kRefuse) found("accepted");
  if (p.k.bytes() != right_k.bytes() || p.v.bytes() != right_v.bytes()) {
    found("an accepted append gives another result");
  }
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
