// SPDX-License-Identifier: Apache-2.0
#include "run.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <map>
#include <random>
#include <thread>
#include <utility>

namespace serving {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using engine::Finish;
using engine::Output;
using engine::Request;
using engine::RequestId;
using engine::Statistics;

constexpr std::future_status kReady = std::future_status::ready;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// A prompt of random tokens, unlike all others.
Request make_request(std::mt19937_64& random, int32_t vocab, int32_t prompt_tokens,
                     int32_t output_tokens, int32_t num_samples) {
  Request request;
  std::uniform_int_distribution<int32_t> token(0, vocab - 1);
  for (int32_t i = 0; i < prompt_tokens; ++i) request.prompt.push_back(token(random));
  request.max_new_tokens = output_tokens;
  request.num_samples = num_samples;
  request.ignore_model_stops = true;
  request.sampling.temperature = 1.0F;
  request.sampling.seed = static_cast<int64_t>(random() >> 32);
  return request;
}

Statistics difference(const Statistics& end, const Statistics& begin) {
  Statistics result = end;
  result.steps -= begin.steps;
  result.mixed_steps -= begin.mixed_steps;
  result.computed_tokens -= begin.computed_tokens;
  result.reused_tokens -= begin.reused_tokens;
  result.preemptions -= begin.preemptions;
  result.host_seconds -= begin.host_seconds;
  result.device_busy_seconds -= begin.device_busy_seconds;
  result.device_idle_seconds -= begin.device_idle_seconds;
  return result;
}

/// Serves one request before time is measured, so that kernels are loaded and graphs recorded.
/// Returns its id.
RequestId warm_up(engine::Engine& engine, std::mt19937_64& random, int32_t vocab) {
  const RequestId id = engine.submit(make_request(random, vocab, 600, 8, 2));
  for (int32_t num_running = 2; num_running > 0;) {
    for (const Output& output : engine.poll(std::chrono::seconds(60))) {
      num_running -= output.finish != Finish::kNot;
    }
  }
  return id;
}

/// When the tokens of samples come.
class Recorder {
 public:
  explicit Recorder(Measured* measured) : measured_(measured) {}

  /// `arrived`: when the request came; `counts`: whether it is measured.
  void add(const Output& output, double now, double arrived, bool counts) {
    ++measured_->output_tokens;
    const auto [place, is_first] = last_.try_emplace({output.request, output.sample}, now);
    if (is_first) {
      if (counts && output.sample == 0) {
        measured_->first_token_ms.push_back(1e3 * (now - arrived));
      }
      return;
    }
    if (counts) measured_->token_gap_ms.push_back(1e3 * (now - place->second));
    place->second = now;
  }

 private:
  Measured* measured_;
  std::map<std::pair<RequestId, int32_t>, double> last_;
};

void show_progress(int64_t done, std::size_t total, double seconds) {
  std::fprintf(stderr, "\r%lld of %zu samples, %.0f s ", static_cast<long long>(done), total,
               seconds);
}

}  // namespace

Measured run_load(engine::Engine& engine, const std::vector<Arrival>& arrivals, int32_t vocab,
                  int32_t num_samples, int32_t num_dropped) {
  std::mt19937_64 random(arrivals.size());
  const RequestId first = warm_up(engine, random, vocab) + 1;
  std::vector<Request> requests;
  for (const Arrival& arrival : arrivals) {
    requests.push_back(
        make_request(random, vocab, arrival.prompt_tokens, arrival.output_tokens, num_samples));
  }
  Measured measured;
  Recorder recorder(&measured);
  const Statistics before = engine.statistics();
  const Clock::time_point begin = Clock::now();
  std::future<void> submitter = std::async(std::launch::async, [&] {
    for (std::size_t i = 0; i < arrivals.size(); ++i) {
      std::this_thread::sleep_until(begin +
                                    std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(arrivals[i].seconds)));
      engine.submit(std::move(requests[i]));
    }
  });
  const std::size_t num_total = arrivals.size() * static_cast<std::size_t>(num_samples);
  int64_t num_done = 0;
  double shown = 0;
  while (num_done < static_cast<int64_t>(num_total)) {
    const bool has_submitted = submitter.valid() && submitter.wait_for(0s) == kReady;
    if (has_submitted) submitter.get();  // throws what submit() has thrown
    const std::vector<Output> outputs = engine.poll(std::chrono::milliseconds(100));
    const double now = seconds_since(begin);
    for (const Output& output : outputs) {
      const auto index = static_cast<std::size_t>(output.request - first);
      recorder.add(output, now, arrivals[index].seconds,
                   index >= static_cast<std::size_t>(num_dropped));
      num_done += output.finish != Finish::kNot;
    }
    if (now - shown < 1) continue;
    shown = now;
    show_progress(num_done, num_total, now);
  }
  if (submitter.valid()) submitter.get();
  std::fprintf(stderr, "\n");
  measured.seconds = seconds_since(begin);
  measured.statistics = difference(engine.statistics(), before);
  return measured;
}

Measured run_decodes(engine::Engine& engine, int32_t vocab, int32_t batch_size, int32_t context,
                     int32_t num_tokens) {
  std::mt19937_64 random(static_cast<uint64_t>(batch_size));
  warm_up(engine, random, vocab);
  // The first requests decode while the last prompts are computed, and may not end before them.
  const int32_t num_output = num_tokens + 2 * batch_size + 16;
  for (int32_t i = 0; i < batch_size; ++i) {
    engine.submit(make_request(random, vocab, context, num_output, 1));
  }
  Measured measured;
  Recorder recorder(&measured);
  std::map<RequestId, int32_t> num_new;
  Statistics before;
  Clock::time_point begin;
  bool is_measuring = false;
  for (bool is_done = false; !is_done;) {
    const std::vector<Output> outputs = engine.poll(std::chrono::milliseconds(100));
    const double now = is_measuring ? seconds_since(begin) : 0;
    for (const Output& output : outputs) {
      ++num_new[output.request];
      if (is_measuring) recorder.add(output, now, 0, true);
      is_done |= output.finish != Finish::kNot;
    }
    const bool all_decode =
        static_cast<int32_t>(num_new.size()) == batch_size &&
        std::ranges::all_of(num_new, [](const auto& p) { return p.second > 8; });
    if (is_measuring || !all_decode) continue;
    is_measuring = true;
    before = engine.statistics();
    begin = Clock::now();
  }
  measured.seconds = seconds_since(begin);
  measured.statistics = difference(engine.statistics(), before);
  measured.first_token_ms.clear();  // the prompts were not measured
  // What is left of the others does not matter.
  for (const auto& [id, count] : num_new) engine.abort(id);
  return measured;
}

}  // namespace serving
