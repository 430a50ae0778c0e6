// SPDX-License-Identifier: Apache-2.0
// The thread of an engine, and the queues between it and its callers.
#include "engine/engine.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "core.h"
#include "engine_thread.h"
#include "model.h"
#include "model_backend.h"
#include "open_device.h"
#include "step_log.h"

namespace engine {

namespace {

class EngineThread final : public Engine {
 public:
  EngineThread(const ModelConfig& config, std::unique_ptr<Backend> backend, const Options& options)
      : config_(config),
        options_(options),
        core_(config, std::move(backend), options),
        thread_([this] { serve(); }) {}

  ~EngineThread() override {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    has_work_.notify_one();
    thread_.join();
  }

  RequestId submit(Request request) override {
    check_request(request, config_, options_);
    const std::lock_guard lock(mutex_);
    throw_if_failed();
    const RequestId id = next_id_++;
    live_.emplace(id, request.num_samples);
    submitted_.emplace_back(id, std::move(request));
    has_work_.notify_one();
    return id;
  }

  bool abort(RequestId request) override { return abort_sample(request, kAllSamples); }

  bool abort_sample(RequestId request, int32_t sample) override {
    const std::lock_guard lock(mutex_);
    if (!live_.contains(request)) return false;
    aborted_.emplace(request, sample);
    has_work_.notify_one();
    return true;
  }

  std::vector<Output> poll(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    has_outputs_.wait_for(lock, timeout, [this] { return !outputs_.empty() || !error_.empty(); });
    if (outputs_.empty()) throw_if_failed();
    return std::exchange(outputs_, {});
  }

  Statistics statistics() const override {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }

 private:
  void serve() {
    try {
      while (receive()) {
        core_.step(&drawn_);
        send();
      }
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex_);
      error_ = error.what();
      has_outputs_.notify_all();
    }
  }

  /// Takes the requests and aborts that callers have queued since the last step, and waits if there
  /// is nothing to do. Returns false if the engine stops.
  bool receive() {
    std::vector<std::pair<RequestId, Request>> submitted;
    std::set<std::pair<RequestId, int32_t>> aborted;
    {
      std::unique_lock lock(mutex_);
      has_work_.wait(lock, [this] {
        return stops_ || !submitted_.empty() || !aborted_.empty() || !core_.is_idle();
      });
      // The device does not need the next step yet. Requests that come meanwhile can join it.
      has_work_.wait_until(lock, core_.next_begin(), [this] { return stops_; });
      if (stops_) return false;
      submitted.swap(submitted_);
      aborted.swap(aborted_);
    }
    for (auto& [id, request] : submitted) core_.add(id, std::move(request));
    for (const auto& [id, sample] : aborted) core_.abort(id, sample, &drawn_);
    return true;
  }

  /// Gives callers the outputs of a step.
  void send() {
    const std::lock_guard lock(mutex_);
    statistics_ = core_.statistics();
    for (const Output& output : drawn_) {
      if (output.finish == Finish::kNot) continue;
      const auto place = live_.find(output.request);
      if (--place->second == 0) live_.erase(place);
    }
    outputs_.insert(outputs_.end(), drawn_.begin(), drawn_.end());
    drawn_.clear();
    if (!outputs_.empty()) has_outputs_.notify_all();
  }

  void throw_if_failed() const {
    if (!error_.empty()) throw std::runtime_error(error_);
  }

  const ModelConfig config_;
  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable has_work_, has_outputs_;
  // Guarded by the mutex.
  RequestId next_id_ = 0;
  std::map<RequestId, int32_t> live_;  // samples that are not finished
  std::vector<std::pair<RequestId, Request>> submitted_;
  std::set<std::pair<RequestId, int32_t>> aborted_;  // request, and sample or kAllSamples
  std::vector<Output> outputs_;
  Statistics statistics_;
  std::string error_;  // the error of the step that failed
  bool stops_ = false;
  // Only the engine's thread uses the next members.
  Core core_;
  std::vector<Output> drawn_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Engine> start_engine(const ModelConfig& config, std::unique_ptr<Backend> backend,
                                     const Options& options) {
  return std::make_unique<EngineThread>(config, std::move(backend), options);
}

std::unique_ptr<Engine> start_model(Model model, std::unique_ptr<Device> device,
                                    const Options& options) {
  const ModelConfig config = model.config;
  std::unique_ptr<Backend> backend =
      std::make_unique<ModelBackend>(std::move(model), std::move(device), options);
  if (!options.step_log.empty()) {
    backend = std::make_unique<StepLog>(std::move(backend), options.step_log);
  }
  return start_engine(config, std::move(backend), options);
}

std::unique_ptr<Engine> Engine::load(const std::filesystem::path& folder, const Options& options) {
  check_options(options);
  const ModelConfig config = read_model_config(folder);
  const std::unique_ptr<WeightSource> source = open_checkpoint(folder);
  std::unique_ptr<Device> device = open_device(options);
  Model model = load_model(config, *source, *device);
  return start_model(std::move(model), std::move(device), options);
}

std::unique_ptr<Engine> Engine::random(const std::filesystem::path& folder, uint64_t seed,
                                       const Options& options) {
  check_options(options);
  const ModelConfig config = read_model_config(folder);
  std::unique_ptr<Device> device = open_device(options);
  Model model = random_model(config, seed, *device);
  return start_model(std::move(model), std::move(device), options);
}

}  // namespace engine
