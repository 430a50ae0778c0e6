// SPDX-License-Identifier: Apache-2.0
// The engine's thread: many callers, aborts at any time, errors.
#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.h"
#include "drive.h"
#include "engine_thread.h"

using namespace engine;
using namespace std::chrono_literals;

namespace {

std::unique_ptr<Engine> tiny_engine(const Options& options) {
  LivelyWeights source;
  check_options(options);
  return start_model(cpu_model(tiny_config("qwen3"), source), std::make_unique<CpuDevice>(options),
                     options);
}

/// A backend whose third step fails.
class FailingBackend final : public Backend {
 public:
  void start(const Step& /*step*/) override {
    if (++num_steps_ == 3) throw std::runtime_error("the device is gone");
  }
  void finish(Drawn* drawn) override { std::ranges::fill(drawn->tokens, 1); }

 private:
  int num_steps_ = 0;
};

/// A backend with slow steps, which counts them.
class SlowBackend final : public Backend {
 public:
  explicit SlowBackend(int* num_steps) : num_steps_(num_steps) {}

  void start(const Step& /*step*/) override {
    std::this_thread::sleep_for(1ms);
    ++*num_steps_;
  }
  void finish(Drawn* drawn) override { drawn->tokens[0] = 1; }

 private:
  int* num_steps_;
};

/// A backend whose steps take 40 ms each, while the host goes on.
class SimulatedGpu final : public Backend {
 public:
  void start(const Step& /*step*/) override {
    end_ = std::max(end_, std::chrono::steady_clock::now()) + kStep;
    ends_.push_back(end_);
  }
  void finish(Drawn* drawn) override {
    std::this_thread::sleep_until(ends_.front());
    ends_.pop_front();
    busy_ += std::chrono::duration<double>(kStep).count();
    std::ranges::fill(drawn->tokens, 1);
  }
  DeviceTimes times() const override { return {busy_, 0}; }

 private:
  static constexpr auto kStep = 40ms;
  std::chrono::steady_clock::time_point end_{};
  std::deque<std::chrono::steady_clock::time_point> ends_;
  double busy_ = 0;
};

template <class Error, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

Request some_request() {
  Request request;
  request.prompt = {1, 20, 33};
  return request;
}

}  // namespace

TEST(ten_thousand_requests_with_aborts) {
  Options options;
  options.page_size = 4;
  options.num_pages = 24;
  options.max_batch_size = 16;
  options.max_step_tokens = 48;
  const auto engine = tiny_engine(options);
  constexpr int kThreads = 2, kRequests = 10000 / kThreads;
  std::atomic<int64_t> num_samples{0}, num_finished{0}, num_aborted{0};
  std::atomic<int> num_submitting{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<uint32_t>(t));
      std::vector<RequestId> mine;
      for (int i = 0; i < kRequests; ++i) {
        Request request;
        request.prompt = random_prompt(random, 20);
        request.max_new_tokens = pick(random, 1, 12);
        request.num_samples = pick(random, 0, 9) == 0 ? pick(random, 2, 4) : 1;
        request.sampling.temperature = static_cast<float>(pick(random, 0, 1));
        request.sampling.seed = i;
        num_samples += request.num_samples;
        mine.push_back(engine->submit(std::move(request)));
        // Requests of any age: some wait, some run, some are finished.
        if (pick(random, 0, 3) == 0) {
          const auto age = static_cast<std::size_t>(pick(random, 0, 40));
          const RequestId victim = mine[mine.size() - 1 - std::min(age, mine.size() - 1)];
          pick(random, 0, 1) == 0 ? engine->abort(victim)
                                  : engine->abort_sample(victim, pick(random, 0, 3));
        }
        while (num_samples - num_finished > 200) std::this_thread::sleep_for(1ms);
      }
      --num_submitting;
    });
  }
  std::map<std::pair<RequestId, int32_t>, Finish> ends;
  while (num_submitting > 0 || num_finished < num_samples) {
    const std::vector<Output> outputs = engine->poll(10000ms);
    CHECK(!outputs.empty());
    if (outputs.empty()) break;
    for (const Output& output : outputs) {
      const std::pair key(output.request, output.sample);
      CHECK(!ends.contains(key));  // nothing comes after the end
      if (output.finish == Finish::kNot) continue;
      ends.emplace(key, output.finish);
      num_aborted += output.finish == Finish::kAborted;
      ++num_finished;
    }
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(num_finished.load(), num_samples.load());
  CHECK(num_aborted > 500);
  CHECK(engine->poll(0ms).empty());
  const Statistics statistics = engine->statistics();
  CHECK_EQ(statistics.used_pages, 0);
  CHECK_EQ(statistics.running, 0);
  CHECK_EQ(statistics.waiting, 0);
  CHECK(statistics.mixed_steps > 1000);
  CHECK(statistics.reused_tokens > 1000);
  CHECK(statistics.preemptions > 10);
  for (RequestId id = 0; id < 10000; ++id) CHECK(!engine->abort(id));
}

TEST(a_failed_step_is_reported) {
  Options options;
  const auto engine =
      start_engine(tiny_config("qwen3"), std::make_unique<FailingBackend>(), options);
  const std::string message = message_of<std::runtime_error>([&] {
    while (true) engine->submit(some_request());
  });
  CHECK_EQ(message, "the device is gone");
  // What was drawn before is not lost.
  CHECK(engine->poll(10000ms).size() >= 2);
  CHECK_EQ(message_of<std::runtime_error>([&] { engine->poll(10000ms); }), message);
}

TEST(engines_end_in_the_middle_of_requests) {
  int num_steps = 0;
  auto engine =
      start_engine(tiny_config("qwen3"), std::make_unique<SlowBackend>(&num_steps), Options());
  Request request = some_request();
  request.max_new_tokens = 2000;
  engine->submit(request);
  CHECK(!engine->poll(10000ms).empty());
  engine.reset();
  CHECK(num_steps >= 1 && num_steps < 2000);
  for (int i = 0; i < 20; ++i) tiny_engine({})->submit(request);
}

TEST(polls_wait_for_outputs_and_no_longer) {
  const auto engine = tiny_engine({});
  CHECK(engine->poll(1ms).empty());
  CHECK(!engine->abort(0));
  const RequestId id = engine->submit(some_request());
  CHECK(!engine->poll(10000ms).empty());
  engine->abort(id);
}

TEST(requests_that_come_during_a_step_are_in_the_next_one) {
  const auto engine = start_engine(tiny_config("qwen3"), std::make_unique<SimulatedGpu>(), {});
  Request request;
  request.prompt = {1, 2, 3};
  request.max_new_tokens = 60;
  request.ignore_model_stops = true;
  engine->submit(request);
  request.max_new_tokens = 1;
  int num_tries = 0;
  // Other programs may delay the threads, so this is tried several times.
  for (bool is_next = false; !is_next && num_tries < 8; ++num_tries) {
    while (engine->poll(1s).empty()) continue;
    std::this_thread::sleep_for(10ms);
    const RequestId late = engine->submit(request);
    int num_polls = 0;
    for (bool has_come = false; !has_come; ++num_polls) {
      for (const Output& output : engine->poll(1s)) has_come |= output.request == late;
    }
    is_next = num_polls <= 2;  // the step under way, and the next one
  }
  CHECK(num_tries < 8);
}

TEST(wrong_requests_are_refused) {
  Options options;
  options.num_pages = 4;
  const auto engine = tiny_engine(options);
  const auto refusal = [&](const std::function<void(Request*)>& change) {
    Request request = some_request();
    change(&request);
    return message_of<std::invalid_argument>([&] { engine->submit(request); });
  };
  CHECK_EQ(refusal([](Request* r) { r->prompt = {}; }),
           "prompt: expected at least one token, got 0");
  CHECK_EQ(refusal([](Request* r) { r->prompt = {1, 97}; }),
           "prompt: expected ids in [0, 97), got 97");
  CHECK_EQ(refusal([](Request* r) { r->stop_tokens = {-1}; }),
           "stop_tokens: expected ids in [0, 97), got -1");
  CHECK_EQ(refusal([](Request* r) { r->max_new_tokens = 0; }),
           "max_new_tokens: expected at least 1, got 0");
  CHECK_EQ(refusal([](Request* r) { r->max_new_tokens = 4094; }),
           "max_new_tokens: expected at most 4096 tokens with the prompt, got 4097");
  CHECK_EQ(refusal([](Request* r) { r->max_new_tokens = 63; }),
           "max_new_tokens: expected tokens that fit the cache of 64, got 66");
  CHECK_EQ(refusal([](Request* r) { r->max_new_tokens = 62; }), "no error");
  CHECK_EQ(refusal([](Request* r) { r->num_samples = 0; }),
           "num_samples: expected 1 to 1024, got 0");
  CHECK_EQ(refusal([](Request* r) { r->num_logprobs = 21; }),
           "num_logprobs: expected -1 to 20, got 21");
  CHECK_EQ(refusal([](Request* r) { r->sampling.temperature = -1; }),
           "temperature: expected a finite number >= 0, got -1.000000");
  CHECK_EQ(refusal([](Request* r) { r->sampling.top_k = 0; }), "top_k: expected at least 1, got 0");
  CHECK_EQ(refusal([](Request* r) { r->sampling.top_p = 0; }),
           "top_p: expected a number in (0, 1], got 0.000000");
  CHECK_EQ(refusal([](Request* r) { r->sampling.min_p = 2; }),
           "min_p: expected a number in [0, 1], got 2.000000");
  CHECK_EQ(refusal([](Request* r) { r->sampling.repetition = 0; }),
           "repetition: expected a finite number > 0, got 0.000000");
  CHECK_EQ(refusal([](Request* r) { r->sampling.presence = INFINITY; }),
           "presence: expected a finite number, got inf");
  CHECK_EQ(refusal([](Request* r) { r->sampling.frequency = INFINITY; }),
           "frequency: expected a finite number, got inf");
  CHECK_EQ(refusal([](Request* r) { r->sampling.seed = INT64_MAX; }),
           "seed: expected a number that can grow by num_samples, got 9223372036854775807");
}

TEST(wrong_options_are_refused) {
  const auto refusal = [&](const std::function<void(Options*)>& change) {
    Options options;
    change(&options);
    return message_of<std::invalid_argument>([&] { tiny_engine(options); });
  };
  CHECK_EQ(refusal([](Options* o) { o->page_size = 0; }), "page_size: expected at least 1, got 0");
  CHECK_EQ(refusal([](Options* o) { o->num_pages = 0; }), "num_pages: expected at least 1, got 0");
  CHECK_EQ(refusal([](Options* o) { o->num_pages = INT32_MAX / 15; }),
           "num_pages: expected at most 2147483647 tokens in all pages, got 2290649216");
  CHECK_EQ(refusal([](Options* o) { o->max_batch_size = 0; }),
           "max_batch_size: expected at least 1, got 0");
  CHECK_EQ(refusal([](Options* o) { o->max_step_tokens = 63; }),
           "max_step_tokens: expected at least max_batch_size, got 63");
}
