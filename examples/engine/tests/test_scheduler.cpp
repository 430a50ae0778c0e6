// SPDX-License-Identifier: Apache-2.0
// Order, budgets and fairness, with a backend that computes nothing.
#include "scheduler.h"

#include <algorithm>
#include <deque>
#include <set>

#include "check.h"
#include "drive.h"

using namespace engine;

namespace {

/// Checks what a step may ask for, and draws tokens that depend on the position alone.
class CheckingBackend final : public Backend {
 public:
  explicit CheckingBackend(const Options& options) : options_(options) {}

  void start(const Step& step) override {
    CHECK(step.batch_size() >= 1 && step.batch_size() <= options_.max_batch_size);
    CHECK(step.num_tokens() <= options_.max_step_tokens);
    CHECK_EQ(step.last_rows.size(), step.draws.size());
    std::set<int32_t> written;
    for (int32_t i = 0; i < step.batch_size(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      const int32_t num_tokens = step.qo_indptr[at + 1] - step.qo_indptr[at];
      const int32_t kv_len = step.kv_lens[at];
      const int32_t num_pages = step.page_indptr[at + 1] - step.page_indptr[at];
      CHECK(num_tokens >= 1 && num_tokens <= kv_len);
      CHECK_EQ(num_pages, (kv_len + options_.page_size - 1) / options_.page_size);
      for (int32_t page = (kv_len - num_tokens) / options_.page_size; page < num_pages; ++page) {
        const int32_t id = step.page_indices[static_cast<std::size_t>(step.page_indptr[at] + page)];
        CHECK(written.insert(id).second);  // no page is written by two sequences
      }
    }
    std::vector<int32_t>& tokens = under_way_.emplace_back();
    for (const int64_t offset : step.draws.offsets) {
      tokens.push_back(static_cast<int32_t>(offset % 97));
    }
    CHECK(under_way_.size() <= 2);
  }

  void finish(Drawn* drawn) override {
    std::ranges::copy(under_way_.front(), drawn->tokens.begin());
    under_way_.pop_front();
  }

 private:
  Options options_;
  std::deque<std::vector<int32_t>> under_way_;
};

std::unique_ptr<Core> checked_core(const Options& options) {
  return std::make_unique<Core>(tiny_config("qwen3"), std::make_unique<CheckingBackend>(options),
                                options);
}

Request simple_request(std::vector<int32_t> prompt, int32_t max_new_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_new_tokens = max_new_tokens;
  request.ignore_model_stops = true;
  return request;
}

}  // namespace

TEST(no_request_starves) {
  Random random(1);
  int64_t num_preemptions = 0;
  for (int round = 0; round < 40; ++round) {
    Options options;
    options.page_size = pick(random, 1, 8);
    options.num_pages = 80 / options.page_size + pick(random, 1, 20);
    options.max_batch_size = pick(random, 1, 12);
    options.max_step_tokens = options.max_batch_size + pick(random, 0, 20);
    const auto core = checked_core(options);
    // New requests never stop coming. The oldest one has at most 80 tokens, and each step must
    // compute at least one of them.
    std::set<RequestId> live;
    std::vector<Output> outputs;
    RequestId next = 0, oldest = 0;
    int32_t oldest_since = 0;
    for (int32_t step = 0; step < 600; ++step) {
      while (live.size() < 20) {
        core->add(next, simple_request(random_prompt(random, 40), pick(random, 1, 40)));
        live.insert(next++);
      }
      if (oldest != *live.begin()) {
        oldest = *live.begin();
        oldest_since = step;
      }
      CHECK(step - oldest_since < 80);
      outputs.clear();
      core->step(&outputs);
      for (const Output& output : outputs) {
        if (output.finish != Finish::kNot) live.erase(output.request);
      }
    }
    CHECK(next > 20);
    num_preemptions += core->statistics().preemptions;
    for (const RequestId id : live) core->abort(id, kAllSamples, &outputs);
    CHECK(core->is_idle());
    CHECK_EQ(core->statistics().used_pages, 0);
  }
  CHECK(num_preemptions > 100);
}

TEST(requests_end_in_the_order_of_their_arrival) {
  // Equal requests: none may overtake another one, preempted or not.
  Random random(2);
  for (int round = 0; round < 20; ++round) {
    Options options;
    options.page_size = 2;
    options.num_pages = pick(random, 20, 60);
    options.max_batch_size = pick(random, 1, 12);
    options.max_step_tokens = pick(random, 12, 30);
    const auto core = checked_core(options);
    for (RequestId id = 0; id < 30; ++id) {
      std::vector<int32_t> prompt(10);
      for (int32_t& token : prompt) token = pick(random, 0, 96);
      core->add(id, simple_request(prompt, 20));
    }
    std::vector<Output> outputs;
    while (!core->is_idle()) core->step(&outputs);
    RequestId last = -1;
    for (const Output& output : outputs) {
      if (output.finish == Finish::kNot) continue;
      CHECK_EQ(output.request, last + 1);
      last = output.request;
    }
    CHECK_EQ(last, 29);
  }
}

TEST(prompts_do_not_hold_up_decodes) {
  Options options;
  options.num_pages = 64;
  options.max_batch_size = 4;
  options.max_step_tokens = 8;
  options.look_ahead = false;  // so that each call gives the tokens of its own step
  const auto core = checked_core(options);
  std::vector<Output> outputs;
  core->add(0, simple_request({1}, 100));
  core->step(&outputs);
  core->add(1, simple_request(std::vector<int32_t>(200, 7), 1));
  for (int step = 0; step < 28; ++step) {  // 7 tokens of the prompt in each
    outputs.clear();
    core->step(&outputs);
    CHECK_EQ(outputs.size(), 1U);
    CHECK_EQ(outputs[0].request, 0);
  }
  outputs.clear();
  core->step(&outputs);
  CHECK_EQ(outputs.size(), 2U);
  CHECK(outputs[1].finish == Finish::kLength);
  CHECK_EQ(core->statistics().mixed_steps, 29);
}

TEST(a_sequence_waits_if_it_would_soon_be_preempted) {
  Options options;
  options.page_size = 2;
  options.num_pages = 8;
  options.max_batch_size = 2;
  options.max_step_tokens = 20;
  const auto core = checked_core(options);
  std::vector<Output> outputs;
  core->add(0, simple_request({1, 2, 3, 4}, 10));
  core->step(&outputs);
  core->add(1, simple_request({1, 3, 5, 7, 9, 11, 13, 15, 17}, 4));
  core->step(&outputs);
  // The first one has 3 pages and will want another one; the second one wants the 5 that are left.
  CHECK_EQ(core->scheduler().num_running(), 1);
  while (!core->is_idle()) core->step(&outputs);
  CHECK_EQ(core->statistics().preemptions, 0);
}

TEST(samples_share_the_pages_of_their_prompt) {
  Options options;
  options.page_size = 4;
  options.num_pages = 8 + 4 * 3;
  options.max_batch_size = 4;
  options.max_step_tokens = 10;
  const auto core = checked_core(options);
  Request request = simple_request(std::vector<int32_t>(33, 7), 4);
  request.num_samples = 4;
  core->add(0, request);
  std::vector<Output> outputs;
  while (!core->is_idle()) core->step(&outputs);
  CHECK_EQ(outputs.size(), 16U);
  // Four steps for the prompt, the last of which draws a token; then all samples run together.
  CHECK_EQ(core->statistics().steps, 4 + 4);
  CHECK_EQ(core->statistics().reused_tokens, 3 * 32);
  CHECK_EQ(core->statistics().computed_tokens, 33 + 3 * 1 + 4 * 3);
  CHECK_EQ(core->statistics().preemptions, 0);
}

TEST(abort_at_every_step) {
  Options options;
  options.page_size = 2;
  options.num_pages = 40;
  options.max_batch_size = 4;
  options.max_step_tokens = 8;
  int32_t num_steps = 1;
  for (int32_t when = 0; when < num_steps; ++when) {
    for (int32_t kind = 0; kind < 12; ++kind) {
      const RequestId victim = kind % 4;
      const int32_t sample = kind / 4 - 1;  // -1 is kAllSamples
      const auto core = checked_core(options);
      Random random(3);
      for (RequestId id = 0; id < 4; ++id) {
        Request request = simple_request(random_prompt(random, 20), 12);
        request.num_samples = static_cast<int32_t>(id % 2) + 1;
        core->add(id, request);
      }
      std::vector<Output> outputs;
      for (int32_t step = 0; !core->is_idle(); ++step) {
        num_steps = std::max(num_steps, step + 1);
        if (step == when) core->abort(victim, sample, &outputs);
        core->step(&outputs);
      }
      std::map<RequestId, int32_t> num_ends;
      for (const Output& output : outputs) {
        CHECK_EQ(output.token == -1, output.finish == Finish::kAborted);
        if (output.finish == Finish::kAborted) {
          CHECK_EQ(output.request, victim);
          CHECK(sample == kAllSamples || sample == output.sample);
        }
        num_ends[output.request] += output.finish != Finish::kNot;
      }
      for (RequestId id = 0; id < 4; ++id) CHECK_EQ(num_ends[id], id % 2 + 1);
      CHECK_EQ(core->cache().num_available(), options.num_pages);
    }
  }
  CHECK(num_steps > 15);
}
