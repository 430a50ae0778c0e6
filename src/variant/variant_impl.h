// SPDX-License-Identifier: Apache-2.0
// The description of a variant, after Variant::create() has checked it.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "flashplan/variant.h"

namespace flashplan {

struct Variant::Impl {
  struct Tensor {
    std::string name;
    DType dtype;
  };
  struct Scalar {
    std::string name;
    float value;
  };

  std::string name;
  std::optional<std::string> query, key, value, output, logits, mask;
  bool softmax = true;
  std::vector<Tensor> tensors;
  std::vector<Scalar> scalars;

  bool changes_keys_or_values() const { return key || value; }

  mutable std::mutex log_mutex;
  mutable std::string log;  // what Variant::compile_log() returns
};

}  // namespace flashplan
