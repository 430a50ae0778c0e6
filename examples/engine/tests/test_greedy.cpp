// SPDX-License-Identifier: Apache-2.0
// With temperature 0, tokens are the most likely ones of a dense model in float64, however requests
// are cut into chunks, mixed, ordered and preempted.
#include <algorithm>
#include <map>

#include "check.h"
#include "dense_model.h"
#include "drive.h"

using namespace engine;

namespace {

/// Where the two best logits are this close, float32 may choose either.
constexpr double kTie = 1e-3;

class Judge {
 public:
  explicit Judge(const std::string& type) : dense_(tiny_model(type)) {}

  /// Each token from num_prompt_tokens on must be the most likely one after those before it.
  void check_text(const std::vector<int32_t>& text, std::size_t num_prompt_tokens) {
    const auto [place, is_new] = num_ties_of_.try_emplace(text, 0);
    if (is_new) {
      const auto logits = dense_.logits(text);
      for (std::size_t i = num_prompt_tokens; i < text.size(); ++i) {
        const double chosen = logits[i - 1][static_cast<std::size_t>(text[i])];
        const double best = *std::ranges::max_element(logits[i - 1]);
        place->second += chosen != best;
        CHECK(chosen >= best - kTie);
      }
    }
    num_tokens_ += static_cast<int64_t>(text.size() - num_prompt_tokens);
    num_ties_ += place->second;
  }

  void check_texts(const Texts& texts, const std::vector<Arrival>& arrivals) {
    CHECK(!texts.empty());
    for (const auto& [key, text] : texts) {
      const Request& request = arrivals[static_cast<std::size_t>(key.first)].request;
      const std::size_t num_prompt_tokens = request.prompt.size();
      CHECK_EQ(text.size(), num_prompt_tokens + static_cast<std::size_t>(request.max_new_tokens));
      check_text(text, num_prompt_tokens);
    }
  }

  ~Judge() {
    CHECK(num_tokens_ > 3000);
    CHECK(num_ties_ * 200 < num_tokens_);
  }

 private:
  DenseModel dense_;
  std::map<std::vector<int32_t>, int64_t> num_ties_of_;  // ties in each text that was checked
  int64_t num_tokens_ = 0, num_ties_ = 0;
};

/// `arrive`: the most steps between the arrivals of two requests.
std::vector<Arrival> random_arrivals(Random& random, int32_t count, int32_t arrive) {
  std::vector<Arrival> arrivals;
  for (int32_t i = 0; i < count; ++i) {
    Arrival arrival;
    arrival.request.prompt = random_prompt(random, 24);
    arrival.request.max_new_tokens = pick(random, 1, 30);
    arrival.request.num_samples = pick(random, 0, 3) == 0 ? 3 : 1;
    arrival.request.ignore_model_stops = true;
    arrival.step = (i == 0 ? 0 : arrivals.back().step) + pick(random, 0, arrive);
    arrivals.push_back(arrival);
  }
  return arrivals;
}

}  // namespace

TEST(chunks_of_every_size) {
  for (const char* type : {"llama", "qwen3"}) {
    Judge judge(type);
    Random random(1);
    const auto arrivals = random_arrivals(random, 10, 3);
    int64_t num_mixed = 0;
    for (int32_t budget = 1; budget <= 40; ++budget) {
      Options options;
      options.page_size = 4;
      options.num_pages = 64;
      options.max_batch_size = std::min(budget, 8);
      options.max_step_tokens = budget;
      const auto core = tiny_core(type, options);
      judge.check_texts(serve(*core, arrivals), arrivals);
      num_mixed += core->statistics().mixed_steps;
    }
    CHECK(num_mixed > 100);
  }
}

TEST(pages_of_every_size) {
  Judge judge("qwen3");
  Random random(2);
  const auto arrivals = random_arrivals(random, 10, 2);
  for (int32_t page_size = 1; page_size <= 40; ++page_size) {
    Options options;
    options.page_size = page_size;
    options.num_pages = 200 / page_size + 10;
    options.max_batch_size = 6;
    options.max_step_tokens = 20;
    judge.check_texts(serve(*tiny_core("qwen3", options), arrivals), arrivals);
  }
}

TEST(keys_rotated_when_attention_reads_them) {
  for (const char* type : {"llama", "qwen3"}) {
    Judge judge(type);
    Random random(6);
    const auto arrivals = random_arrivals(random, 10, 2);
    for (int32_t budget = 1; budget <= 40; ++budget) {
      Options options;
      options.page_size = 1 + budget % 5;
      options.num_pages = 200;
      options.max_batch_size = std::min(budget, 6);
      options.max_step_tokens = budget;
      options.rotates_in_attention = true;
      judge.check_texts(serve(*tiny_core(type, options), arrivals), arrivals);
    }
  }
}

TEST(arrivals_in_any_order) {
  Judge judge("llama");
  Random random(3);
  auto arrivals = random_arrivals(random, 10, 0);
  int64_t num_reused = 0;
  for (int round = 0; round < 40; ++round) {
    std::ranges::shuffle(arrivals, random);
    for (std::size_t i = 1; i < arrivals.size(); ++i) {
      arrivals[i].step = arrivals[i - 1].step + pick(random, 0, round % 10);
    }
    arrivals[0].step = 0;
    for (std::size_t i = 1; i < arrivals.size(); ++i) {
      arrivals[i].step = std::max(arrivals[i].step, arrivals[i - 1].step);
    }
    Options options;
    options.page_size = 2;
    options.num_pages = 100;
    options.max_batch_size = 5;
    options.max_step_tokens = 16;
    const auto core = tiny_core("llama", options);
    judge.check_texts(serve(*core, arrivals), arrivals);
    num_reused += core->statistics().reused_tokens;
  }
  CHECK(num_reused > 1000);
}

TEST(preemptions_at_every_step) {
  Judge judge("qwen3");
  Random random(4);
  const auto arrivals = random_arrivals(random, 6, 2);
  Options options;
  options.page_size = 4;
  options.num_pages = 64;
  options.max_batch_size = 6;
  options.max_step_tokens = 12;
  int32_t num_steps = 1;
  for (int32_t when = 0; when < num_steps; ++when) {
    for (int32_t count = 1; count <= 6; ++count) {
      const auto core = tiny_core("qwen3", options);
      const auto preempt = [&](int32_t step) {
        num_steps = std::max(num_steps, step + 1);
        if (step != when) return;
        for (int32_t i = 0; i < count && core->scheduler().num_running() > 0; ++i) {
          core->scheduler().preempt_youngest();
        }
      };
      judge.check_texts(serve(*core, arrivals, preempt), arrivals);
    }
  }
  CHECK(num_steps > 20);
}

TEST(caches_of_every_size) {
  Judge judge("llama");
  Random random(5);
  const auto arrivals = random_arrivals(random, 12, 1);
  int64_t num_preemptions = 0;
  for (int32_t num_pages = 27; num_pages <= 80; ++num_pages) {  // the longest request needs 27
    Options options;
    options.page_size = 2;
    options.num_pages = num_pages;
    options.max_batch_size = 8;
    options.max_step_tokens = 16;
    const auto core = tiny_core("llama", options);
    judge.check_texts(serve(*core, arrivals), arrivals);
    num_preemptions += core->statistics().preemptions;
  }
  CHECK(num_preemptions > 50);
}

TEST(stop_tokens_end_a_sample) {
  Options options;
  Request request;
  request.prompt = {1, 20, 33};
  request.max_new_tokens = 40;
  request.ignore_model_stops = true;
  const auto tokens_of = [&] {
    std::vector<int32_t> tokens;
    std::vector<Output> outputs;
    const auto core = tiny_core("qwen3", options);
    core->add(7, request);
    while (!core->is_idle()) core->step(&outputs);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      CHECK_EQ(outputs[i].request, 7);
      CHECK_EQ(outputs[i].finish != Finish::kNot, i + 1 == outputs.size());
      CHECK(outputs[i].logprob == 0.0F);  // the request asks for no log-probabilities
      tokens.push_back(outputs[i].token);
    }
    const bool is_long = tokens.size() == 40;
    CHECK(outputs.back().finish == (is_long ? Finish::kLength : Finish::kStop));
    return tokens;
  };
  const std::vector<int32_t> whole = tokens_of();
  CHECK_EQ(whole.size(), 40U);
  const auto until = [&](int32_t token) {
    return std::vector(whole.begin(), std::ranges::find(whole, token) + 1);
  };
  request.stop_tokens = {whole[9]};
  CHECK(tokens_of() == until(whole[9]));
  request.stop_tokens.clear();
  request.ignore_model_stops = false;  // the model's stop tokens are 3 and 5
  const auto stop = std::ranges::find_if(whole, [](int32_t t) { return t == 3 || t == 5; });
  CHECK(stop != whole.end());
  if (stop != whole.end()) CHECK(tokens_of() == until(*stop));
}
