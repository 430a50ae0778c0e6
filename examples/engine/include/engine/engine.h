// SPDX-License-Identifier: Apache-2.0
// Engine: serves a language model to many requests at once, on a thread of its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

namespace engine {

/// How the engine draws the tokens of a request. flashplan::SampleOptions and PenaltyOptions
/// explain the members.
struct Sampling {
  float temperature = 0.0F;  // 0: the most likely token
  int32_t top_k = INT32_MAX;
  float top_p = 1.0F;
  float min_p = 0.0F;
  int64_t seed = 0;         // seed of sample 0; sample i has seed + i
  float repetition = 1.0F;  // penalty for tokens of the prompt and for new tokens
  float presence = 0.0F;    // penalties for new tokens
  float frequency = 0.0F;
};

struct Request {
  std::vector<int32_t> prompt;  // token ids, at least one
  int32_t max_new_tokens = 16;
  int32_t num_samples = 1;           // continuations; they share the pages of the prompt
  std::vector<int32_t> stop_tokens;  // tokens that end a sample, besides the model's stop tokens
  bool ignore_model_stops = false;   // for benchmarks, in which lengths are given
  /// >= 0: each token comes with its own log-probability, and with this number of likeliest tokens
  /// and their log-probabilities. They are computed after penalties, but before temperature and
  /// filters. -1: no log-probabilities.
  int32_t num_logprobs = -1;
  Sampling sampling;
};

using RequestId = int64_t;

enum class Finish : int32_t {
  kNot = 0,
  kStop,     // the last token is a stop token
  kLength,   // max_new_tokens were drawn
  kAborted,  // the request was aborted; the output has no token
};

inline constexpr int32_t kMaxLogprobs = 20;  // the largest Request::num_logprobs

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0.0F;
};

/// A token of one sample of a request.
struct Output {
  RequestId request = 0;
  int32_t sample = 0;
  int32_t token = -1;
  float logprob = 0.0F;  // if Request::num_logprobs asks for it
  Finish finish = Finish::kNot;
  std::vector<TokenLogprob> likeliest;  // Request::num_logprobs tokens, the likeliest first
};

/// The device that computes the model.
enum class DeviceType : int32_t {
  kCpu = 0,  // in float32
  kCuda,     // on the first GPU, in bfloat16
};

/// How the matrices are multiplied on a CPU.
enum class Products : int32_t {
  kFastest = 0,  // by a BLAS if the engine was built with one
  kRowByRow,     // by a loop in which the bits of a row do not depend on the other rows
};

/// Limits and options of an engine. The limits determine how much memory it takes.
struct Options {
  int32_t page_size = 16;         // tokens of a page
  int32_t num_pages = 1024;       // pages of the cache of keys and values
  int32_t max_batch_size = 64;    // sequences in one step
  int32_t max_step_tokens = 512;  // tokens in one step; at least max_batch_size
  /// Whether the bits of a request's results do not depend on the other requests. Implies
  /// kRowByRow. On a GPU this holds for attention alone: products may depend on how many tokens a
  /// step has.
  bool batch_invariant = false;
  Products products = Products::kFastest;
  DeviceType device = DeviceType::kCpu;
  bool has_8bit_cache = false;  // keys and values in float8_e4m3fn, else in the device's dtype

  // Each of the next options may be switched off to measure what it gains.
  /// The next step is planned and begun while one runs: tokens stay on the device, and a stop token
  /// is noticed one step late.
  bool look_ahead = true;
  bool has_graphs = true;       // on a GPU: steps of decodes are graphs
  bool has_pdl = true;          // on a GPU: kernels are launched while those before them end
  bool shares_prefixes = true;  // keys of a prefix are read once for all sequences that have it
  bool has_attention = true;    // off: attention is left out, and tokens are arbitrary
  /// Whether the cache holds keys before rotation, and attention rotates them whenever it reads
  /// them. A cache whose pages move to other positions needs this. On a GPU NVRTC compiles that
  /// kernel when the engine starts. Not with has_8bit_cache on a GPU. Overrides shares_prefixes.
  bool rotates_in_attention = false;

  /// If not empty: a file to which the lengths and page tables of each step are written. StepLog in
  /// step_log.h describes it.
  std::filesystem::path step_log;
};

/// What an engine has done since it was made.
struct Statistics {
  int64_t steps = 0;
  int64_t mixed_steps = 0;      // steps with chunks of prompts and decodes
  int64_t computed_tokens = 0;  // tokens of all steps
  int64_t reused_tokens = 0;    // tokens whose keys and values were in the cache already
  int64_t preemptions = 0;
  // Sums over all steps.
  double host_seconds = 0;         // time in which the host planned and began steps
  double device_busy_seconds = 0;  // on a GPU: time in steps
  double device_idle_seconds = 0;  // on a GPU: time between steps, while there was work
  // The current state.
  int32_t used_pages = 0;  // pages that sequences use
  int32_t running = 0;     // sequences that are computed in each step
  int32_t waiting = 0;     // sequences that wait for pages, or for room in a step
};

/// Any thread may call any function. Errors of the caller are std::invalid_argument.
class Engine {
 public:
  /// Loads config.json and all *.safetensors files of a folder, with float32 or bfloat16 weights.
  ///   std::invalid_argument  a file is malformed, or describes a model of another kind
  ///   std::system_error      a file can not be read
  static std::unique_ptr<Engine> load(const std::filesystem::path& folder, const Options& options);
  /// Makes an engine with random weights, which differ from device to device. Of the folder it
  /// reads config.json alone. Otherwise it does what load() does.
  static std::unique_ptr<Engine> random(const std::filesystem::path& folder, uint64_t seed,
                                        const Options& options);

  virtual ~Engine() = default;

  /// Queues a request. Its outputs come from poll().
  ///   std::invalid_argument  a value is out of range, or the request can never fit the cache
  ///   std::runtime_error     the engine has failed, see poll()
  virtual RequestId submit(Request request) = 0;

  /// Ends a request before the next step. Each of its samples that is not finished gets an output
  /// kAborted. Returns false if no such request is running or waiting.
  virtual bool abort(RequestId request) = 0;
  /// Ends one sample of a request, as abort() ends all. Also returns true if the sample has
  /// finished, but others of the request have not.
  virtual bool abort_sample(RequestId request, int32_t sample) = 0;

  /// All outputs since the last call, in the order of the steps. Waits until there is one, at most
  /// for `timeout`.
  ///   std::runtime_error  a step has failed, and the engine does no more steps
  virtual std::vector<Output> poll(std::chrono::milliseconds timeout) = 0;

  virtual Statistics statistics() const = 0;
};

}  // namespace engine
