// SPDX-License-Identifier: Apache-2.0
// Where the weights of a model come from: files of safetensors, or random numbers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace engine {

/// A matrix [outputs, inputs], row after row, or a vector. Keeps the memory behind it.
using Weights = std::shared_ptr<const float>;

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// The weights of this name; std::invalid_argument if there are none of this shape.
  virtual Weights load(const std::string& name, const std::vector<int64_t>& shape) = 0;
};

/// Maps all *.safetensors files of a folder into memory. float32 weights are used where they lie,
/// bfloat16 weights are widened when they are loaded.
///   std::invalid_argument  there is no such file, or one is malformed
///   std::system_error      a file can not be read
std::unique_ptr<WeightSource> open_checkpoint(const std::filesystem::path& folder);

/// Random numbers, which depend on the seed and the name of the weights alone. Vectors are near 1,
/// and matrices keep the size of what they multiply.
std::unique_ptr<WeightSource> random_weights(uint64_t seed);

}  // namespace engine
