// SPDX-License-Identifier: Apache-2.0
#include "random_weights.h"

#include <algorithm>
#include <cstddef>

namespace engine {

namespace {

/// Rows of a block. The number is odd. Heads have a power of two of rows, so they do not get equal
/// weights.
constexpr int64_t kBlockRows = 1021;

}  // namespace

RepeatedRandomWeights::RepeatedRandomWeights(uint64_t seed, Device& device)
    : device_(device), source_(random_weights(seed)) {}

DeviceWeights RepeatedRandomWeights::vector(const std::string& name, int64_t size) {
  return device_.place_weights(source_->load(name, {size}), size);
}

Matrix RepeatedRandomWeights::matrix(const std::vector<std::string>& /*names*/,
                                     const std::vector<int64_t>& rows, int64_t inputs) {
  int64_t num_rows = 0;
  for (const int64_t count : rows) num_rows += count;
  const auto row_bytes = static_cast<std::size_t>(inputs * flashplan::item_size(device_.dtype()));
  const DeviceWeights& block = block_of(inputs);
  const auto memory = device_.allocate(static_cast<std::size_t>(num_rows) * row_bytes);
  auto* to = static_cast<std::byte*>(memory.get());
  for (int64_t row = 0; row < num_rows; row += kBlockRows) {
    const auto bytes = static_cast<std::size_t>(std::min(kBlockRows, num_rows - row)) * row_bytes;
    device_.copy_on_device(to, block.get(), bytes);
    to += bytes;
  }
  Matrix result;
  result.inputs = inputs;
  result.parts.push_back({memory, num_rows});
  return result;
}

const DeviceWeights& RepeatedRandomWeights::block_of(int64_t inputs) {
  DeviceWeights& block = blocks_[inputs];
  if (block == nullptr) {
    const std::string name = "block of " + std::to_string(inputs);
    block = device_.place_weights(source_->load(name, {kBlockRows, inputs}), kBlockRows * inputs);
  }
  return block;
}

}  // namespace engine
