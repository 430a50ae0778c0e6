// SPDX-License-Identifier: Apache-2.0
// What a run gave, as one JSON object.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "model_config.h"
#include "run.h"

namespace serving {

/// The element at `part` of the sorted values, between two of them by linear interpolation; NaN if
/// there is none.
double quantile(std::vector<double> values, double part);

/// Bytes of the weights that each step reads: all but the embedding.
double weight_bytes(const engine::ModelConfig& config, int32_t item_bytes);
/// Bytes of keys and values of a token.
double cache_bytes(const engine::ModelConfig& config, int32_t item_bytes);

/// The keys and values of an object.
class Report {
 public:
  void add(const std::string& key, const std::string& text);
  void add(const std::string& key, double number);
  void add(const std::string& key, bool is_true);
  /// Quantiles, means and times of a run.
  void add(const Measured& measured);
  std::string json() const;

 private:
  std::vector<std::pair<std::string, std::string>> entries_;
};

}  // namespace serving
