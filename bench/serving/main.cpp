// SPDX-License-Identifier: Apache-2.0
// Measures the engine under load; prints one JSON object.
//
//   serving FOLDER [--workload sharegpt] [--rate 16] [--requests 320] [--samples 1] [--seed 1]
//   serving FOLDER --decode BATCH [--context 2048] [--tokens 200]
//
// FOLDER has config.json; weights are random. Other switches: --variation CV, --drop N, --device
// cpu|cuda, --page-size N, --pages N, --max-batch N, --max-tokens N (of a step), --longest N (of a
// request), --read-rate BYTES_PER_SECOND, --step-log FILE, --no-graphs, --no-look-ahead,
// --no-pdl, --no-sharing, --no-attention, --8bit-cache, --batch-invariant, --rope-in-attention.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include "engine/engine.h"
#include "report.h"
#include "run.h"
#include "workload.h"

namespace {

const std::set<std::string> kSwitches = {"--no-graphs",       "--no-look-ahead",    "--no-sharing",
                                         "--no-pdl",          "--no-attention",     "--8bit-cache",
                                         "--batch-invariant", "--rope-in-attention"};
const std::set<std::string> kValues = {
    "--workload", "--rate",    "--requests",  "--samples",    "--seed",      "--decode",
    "--context",  "--tokens",  "--drop",      "--variation",  "--device",    "--page-size",
    "--pages",    "--longest", "--max-batch", "--max-tokens", "--read-rate", "--step-log"};

/// What stands behind FOLDER: switches, and names with values.
class Arguments {
 public:
  Arguments(int argc, char** argv) {
    for (int i = 2; i < argc; ++i) {
      const std::string name = argv[i];
      if (kSwitches.contains(name)) {
        values_[name] = "";
      } else if (kValues.contains(name) && i + 1 < argc) {
        values_[name] = argv[++i];
      } else {
        throw std::invalid_argument("expected a switch or a name and its value, got " + name);
      }
    }
  }

  bool has(const std::string& name) const { return values_.contains(name); }
  std::string text(const std::string& name, const std::string& otherwise) const {
    return has(name) ? values_.at(name) : otherwise;
  }
  /// Throws std::invalid_argument if the value is not a number above 0.
  double number(const std::string& name, double otherwise) const {
    if (!has(name)) return otherwise;
    char* end = nullptr;
    const double value = std::strtod(values_.at(name).c_str(), &end);
    if (*end != '\0' || !(value > 0)) refuse(name, "a number above 0");
    return value;
  }
  /// Throws std::invalid_argument if the value is not an integer, or is below `least`.
  int32_t integer(const std::string& name, int32_t otherwise, int32_t least = 1) const {
    if (!has(name)) return otherwise;
    char* end = nullptr;
    const long long value = std::strtoll(values_.at(name).c_str(), &end, 10);
    const bool is_integer = end != values_.at(name).c_str() && *end == '\0';
    if (!is_integer || value < least || value > INT32_MAX) {
      refuse(name, "an integer from " + std::to_string(least) + " on");
    }
    return static_cast<int32_t>(value);
  }
  const std::map<std::string, std::string>& all() const { return values_; }

 private:
  [[noreturn]] void refuse(const std::string& name, const std::string& expected) const {
    throw std::invalid_argument(name + ": expected " + expected + ", got " + values_.at(name));
  }

  std::map<std::string, std::string> values_;
};

engine::Options options_of(const Arguments& a) {
  engine::Options options;
  const std::string device = a.text("--device", "cuda");
  if (device != "cpu" && device != "cuda") {
    throw std::invalid_argument("--device: expected cpu or cuda, got " + device);
  }
  options.device = device == "cpu" ? engine::DeviceType::kCpu : engine::DeviceType::kCuda;
  options.page_size = a.integer("--page-size", 16);
  options.num_pages = a.integer("--pages", 16384);
  options.max_batch_size = a.integer("--max-batch", 128);
  options.max_step_tokens = a.integer("--max-tokens", 2048);
  options.batch_invariant = a.has("--batch-invariant");
  options.has_8bit_cache = a.has("--8bit-cache");
  options.has_graphs = !a.has("--no-graphs");
  options.look_ahead = !a.has("--no-look-ahead");
  options.has_pdl = !a.has("--no-pdl");
  options.shares_prefixes = !a.has("--no-sharing");
  options.has_attention = !a.has("--no-attention");
  options.rotates_in_attention = a.has("--rope-in-attention");
  options.step_log = a.text("--step-log", "");
  return options;
}

std::string measure(const std::string& folder, const Arguments& a) {
  const engine::Options options = options_of(a);
  const engine::ModelConfig config = engine::read_model_config(folder);
  const auto engine = engine::Engine::random(folder, 1, options);
  serving::Report report;
  report.add("model", folder);
  for (const auto& [name, value] : a.all()) {
    value.empty() ? report.add(name.substr(2), true) : report.add(name.substr(2), value);
  }
  if (a.has("--decode")) {
    const int32_t batch_size = a.integer("--decode", 1), context = a.integer("--context", 2048);
    const int32_t num_tokens = a.integer("--tokens", 200);
    const serving::Measured measured =
        serving::run_decodes(*engine, config.vocab, batch_size, context, num_tokens);
    report.add(measured);
    const int32_t item_bytes = options.device == engine::DeviceType::kCpu ? 4 : 2;
    const double mean_context = context + 16 + batch_size + num_tokens / 2.0;
    const double cache = serving::cache_bytes(config, options.has_8bit_cache ? 1 : item_bytes);
    const double bytes =
        serving::weight_bytes(config, item_bytes) + cache * batch_size * mean_context;
    const double floor_ms = 1e3 * bytes / a.number("--read-rate", 4.55e12);
    report.add("floor_ms", floor_ms);
    report.add("itl_over_floor", serving::quantile(measured.token_gap_ms, 0.5) / floor_ms);
    return report.json();
  }
  serving::Workload workload;
  workload.lengths = a.text("--workload", workload.lengths);
  workload.rate = a.number("--rate", workload.rate);
  workload.variation = a.number("--variation", workload.variation);
  workload.num_requests = a.integer("--requests", workload.num_requests);
  workload.max_tokens = a.integer("--longest", workload.max_tokens);
  workload.seed = static_cast<uint64_t>(a.integer("--seed", 1, 0));
  report.add(serving::run_load(*engine, serving::make_arrivals(workload), config.vocab,
                               a.integer("--samples", 1), a.integer("--drop", 20, 0)));
  return report.json();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: serving FOLDER [--workload NAME] [--rate R] ...\n");
    return 2;
  }
  try {
    std::printf("%s\n", measure(argv[1], Arguments(argc, argv)).c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
