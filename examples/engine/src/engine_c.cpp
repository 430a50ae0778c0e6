// SPDX-License-Identifier: Apache-2.0
#include "engine/engine_c.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <stdexcept>

#include "engine/engine.h"

static_assert(ENGINE_MAX_LOGPROBS == engine::kMaxLogprobs);

struct engine_handle {
  std::unique_ptr<engine::Engine> engine;
  std::deque<engine::Output> outputs;  // outputs for which the last poll had no room
};

namespace {

template <class Call>
int32_t guarded(char* message, const Call& call) {
  const auto report = [&](engine_status status, const std::exception& error) {
    std::snprintf(message, ENGINE_MESSAGE_SIZE, "%s", error.what());
    return status;
  };
  try {
    call();
    return ENGINE_OK;
  } catch (const std::invalid_argument& error) {
    return report(ENGINE_INVALID, error);
  } catch (const std::exception& error) {
    return report(ENGINE_FAILED, error);
  }
}

engine_output to_c(const engine::Output& output) {
  engine_output result = {};
  result.request = output.request;
  result.sample = output.sample;
  result.token = output.token;
  result.finish = static_cast<int32_t>(output.finish);
  result.logprob = output.logprob;
  for (const auto& [token, logprob] : output.likeliest) {
    if (token < 0) break;  // no other token has a probability above 0
    result.likeliest_tokens[result.num_likeliest] = token;
    result.likeliest_logprobs[result.num_likeliest++] = logprob;
  }
  return result;
}

}  // namespace

int32_t engine_open(const char* folder, const engine_options* options, engine_handle** engine,
                    char* message) {
  return guarded(message, [&] {
    engine::Options limits;
    limits.page_size = options->page_size;
    limits.num_pages = options->num_pages;
    limits.max_batch_size = options->max_batch_size;
    limits.max_step_tokens = options->max_step_tokens;
    limits.batch_invariant = options->batch_invariant != 0;
    limits.device = static_cast<engine::DeviceType>(options->device);
    limits.has_8bit_cache = options->has_8bit_cache != 0;
    auto handle = std::make_unique<engine_handle>();
    handle->engine = engine::Engine::load(folder, limits);
    *engine = handle.release();
  });
}

void engine_close(engine_handle* engine) { delete engine; }

int32_t engine_submit(engine_handle* engine, const engine_request* request, int64_t* id,
                      char* message) {
  return guarded(message, [&] {
    engine::Request wanted;
    wanted.prompt.assign(request->prompt, request->prompt + request->prompt_len);
    wanted.max_new_tokens = request->max_new_tokens;
    wanted.num_samples = request->num_samples;
    wanted.num_logprobs = request->num_logprobs;
    wanted.ignore_model_stops = request->ignore_model_stops != 0;
    wanted.sampling = {request->temperature, request->top_k,    request->top_p,
                       request->min_p,       request->seed,     request->repetition,
                       request->presence,    request->frequency};
    *id = engine->engine->submit(std::move(wanted));
  });
}

int32_t engine_abort(engine_handle* engine, int64_t request, int32_t sample) {
  return sample < 0 ? engine->engine->abort(request)
                    : engine->engine->abort_sample(request, sample);
}

int32_t engine_poll(engine_handle* engine, int32_t timeout_ms, engine_output* outputs,
                    int32_t capacity, int32_t* count, char* message) {
  *count = 0;
  return guarded(message, [&] {
    std::deque<engine::Output>& pending = engine->outputs;
    if (pending.empty())
      std::ranges::move(engine->engine->poll(std::chrono::milliseconds(timeout_ms)),
                        std::back_inserter(pending));
    const auto room = static_cast<std::size_t>(std::max(capacity, 0));
    const auto end = pending.begin() + static_cast<std::ptrdiff_t>(std::min(room, pending.size()));
    std::transform(pending.begin(), end, outputs, to_c);
    *count = static_cast<int32_t>(end - pending.begin());
    pending.erase(pending.begin(), end);
  });
}

void engine_get_statistics(engine_handle* engine, engine_statistics* statistics) {
  const engine::Statistics now = engine->engine->statistics();
  *statistics = {now.steps,       now.mixed_steps, now.computed_tokens, now.reused_tokens,
                 now.preemptions, now.used_pages,  now.running,         now.waiting};
}
