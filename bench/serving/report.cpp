// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>

namespace serving {

double quantile(std::vector<double> values, double part) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::ranges::sort(values);
  const double place = part * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
}

double weight_bytes(const engine::ModelConfig& c, int32_t item_bytes) {
  const double q_size = static_cast<double>(c.num_qo_heads) * c.head_dim;
  const double kv_size = static_cast<double>(c.num_kv_heads) * c.head_dim;
  const double attention = c.hidden * (2 * q_size + 2 * kv_size);
  const double feed_forward = 3.0 * c.hidden * c.ffn;
  return item_bytes *
         (c.num_layers * (attention + feed_forward) + static_cast<double>(c.vocab) * c.hidden);
}

double cache_bytes(const engine::ModelConfig& c, int32_t item_bytes) {
  return 2.0 * item_bytes * c.num_layers * c.num_kv_heads * c.head_dim;
}

void Report::add(const std::string& key, const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  entries_.emplace_back(key, quoted + "\"");
}

void Report::add(const std::string& key, double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", number);
  entries_.emplace_back(key, std::isfinite(number) ? text : "null");
}

void Report::add(const std::string& key, bool is_true) {
  entries_.emplace_back(key, is_true ? "true" : "false");
}

void Report::add(const Measured& m) {
  const engine::Statistics& s = m.statistics;
  const auto steps = static_cast<double>(std::max<int64_t>(s.steps, 1));
  const auto add_quantiles = [&](const std::string& name, const std::vector<double>& values) {
    if (values.empty()) return;
    add(name + "_p50", quantile(values, 0.5));
    add(name + "_p90", quantile(values, 0.9));
    add(name + "_p99", quantile(values, 0.99));
    const double sum = std::accumulate(values.begin(), values.end(), 0.0);
    add(name + "_mean", sum / static_cast<double>(values.size()));
  };
  add_quantiles("ttft_ms", m.first_token_ms);
  add_quantiles("itl_ms", m.token_gap_ms);
  add("output_tokens_per_s", static_cast<double>(m.output_tokens) / m.seconds);
  add("seconds", m.seconds);
  add("steps", static_cast<double>(s.steps));
  add("mixed_steps", static_cast<double>(s.mixed_steps));
  add("computed_tokens", static_cast<double>(s.computed_tokens));
  add("reused_tokens", static_cast<double>(s.reused_tokens));
  add("preemptions", static_cast<double>(s.preemptions));
  add("host_us_per_step", 1e6 * s.host_seconds / steps);
  add("device_ms_per_step", 1e3 * s.device_busy_seconds / steps);
  const double device_seconds = s.device_busy_seconds + s.device_idle_seconds;
  add("device_idle_part", s.device_idle_seconds / device_seconds);
}

std::string Report::json() const {
  std::string text = "{";
  for (const auto& [key, value] : entries_) {
    text += (text.size() > 1 ? ", \"" : "\"") + key + "\": " + value;
  }
  return text + "}";
}

}  // namespace serving
