// SPDX-License-Identifier: Apache-2.0
// Random misuse of merge_states() and append_paged_kv(); see adversary.cpp.
#pragma once

#include <climits>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "flashplan/flashplan.h"
#include "misuse.h"
#include "problem.h"

namespace flashplan::test {

inline void misuse_merge(Random& random) {
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

inline void misuse_append(Random& random) {
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

}  // namespace flashplan::test
