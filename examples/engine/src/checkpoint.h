// SPDX-License-Identifier: Apache-2.0
// Where the weights of a model come from: files of safetensors, or random numbers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace engine {

/// A matrix [outputs, inputs], stored by rows, or a vector. The pointer owns the memory, or the
/// file that is mapped there.
using Weights = std::shared_ptr<const float>;

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// Returns the weights called `name`. Throws std::invalid_argument if there are none, or if their
  /// shape is not `shape`.
  virtual Weights load(const std::string& name, const std::vector<int64_t>& shape) = 0;
};

/// Maps all *.safetensors files of a folder into memory. float32 weights are used where they lie,
/// bfloat16 weights are widened when they are loaded.
///   std::invalid_argument  there is no such file, or one is malformed
///   std::system_error      a file can not be read
std::unique_ptr<WeightSource> open_checkpoint(const std::filesystem::path& folder);

/// Makes random weights, which depend on the seed and on their name alone. Elements of vectors are
/// near 1. A product with a matrix has about the size of the vector that it multiplies.
std::unique_ptr<WeightSource> random_weights(uint64_t seed);

}  // namespace engine
