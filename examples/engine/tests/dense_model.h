// SPDX-License-Identifier: Apache-2.0
// A slow model in float64, without pages, batches or flashplan.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"

namespace engine {

class DenseModel {
 public:
  explicit DenseModel(Model model) : model_(std::move(model)) {}

  /// The logits [vocab] after each of `tokens`, in float64.
  std::vector<std::vector<double>> logits(const std::vector<int32_t>& tokens) const;

 private:
  Model model_;
};

}  // namespace engine
