// SPDX-License-Identifier: Apache-2.0
// Makes random weights quickly, in the memory of a device.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model.h"

namespace engine {

/// Fills matrices with copies of one block of random numbers for each number of inputs, so that a
/// model of billions of weights takes a second. A product with a matrix has about the size of the
/// vector that it multiplies. Elements of vectors are near 1.
class RepeatedRandomWeights final : public WeightLoader {
 public:
  RepeatedRandomWeights(uint64_t seed, Device& device);

  DeviceWeights vector(const std::string& name, int64_t size) override;
  Matrix matrix(const std::vector<std::string>& names, const std::vector<int64_t>& rows,
                int64_t inputs) override;

 private:
  /// The block of random numbers for matrices with this number of inputs.
  const DeviceWeights& block_of(int64_t inputs);

  Device& device_;
  std::unique_ptr<WeightSource> source_;
  std::map<int64_t, DeviceWeights> blocks_;
};

}  // namespace engine
