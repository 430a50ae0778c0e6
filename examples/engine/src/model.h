// SPDX-License-Identifier: Apache-2.0
// The weights of a model, on the device that computes it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "device.h"
#include "model_config.h"

namespace engine {

/// Weights in the device's memory and dtype.
using DeviceWeights = std::shared_ptr<const void>;

/// A matrix [rows, inputs]. Its rows are those of all parts, which may lie apart in memory.
struct Matrix {
  struct Part {
    DeviceWeights values;
    int64_t rows = 0;
  };
  std::vector<Part> parts;
  int64_t inputs = 0;
};

struct Layer {
  DeviceWeights attention_norm, ffn_norm;  // [hidden]
  Matrix qkv;                              // [(qo_heads + 2 * kv_heads) * head_dim, hidden]
  DeviceWeights q_norm, k_norm;            // [head_dim]; null in models without them
  Matrix o;                                // [hidden, qo_heads * head_dim]
  Matrix gate_up;                          // [2 * ffn, hidden]
  Matrix down;                             // [hidden, ffn]
};

struct Model {
  ModelConfig config;
  Matrix embedding;  // [vocab, hidden], has one part
  std::vector<Layer> layers;
  DeviceWeights norm;  // [hidden]
  Matrix output;       // [vocab, hidden]; may be the embedding
};

/// Loads weights to a device.
class WeightLoader {
 public:
  virtual ~WeightLoader() = default;
  virtual DeviceWeights vector(const std::string& name, int64_t size) = 0;
  /// One matrix that has the rows of several: the weights names[i] are [rows[i], inputs].
  virtual Matrix matrix(const std::vector<std::string>& names, const std::vector<int64_t>& rows,
                        int64_t inputs) = 0;
};

/// Throws std::invalid_argument if weights are missing or have another shape.
Model load_model(const ModelConfig& config, WeightLoader& loader);
/// Loads the model from weights in host memory, which are copied to `device`.
Model load_model(const ModelConfig& config, WeightSource& source, Device& device);

}  // namespace engine
