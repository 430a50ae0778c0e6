// SPDX-License-Identifier: Apache-2.0
// What an engine wants of a device: the tokens that follow those of a batch.
#pragma once

#include <cstdint>
#include <vector>

#include "draws.h"

namespace engine {

// --8<-- [start:step]
/// What the model computes in one step, in host memory. `tokens` has the tokens of all sequences,
/// those of a sequence side by side.
struct Step {
  std::vector<int32_t> tokens;
  std::vector<int32_t> qo_indptr;    // [batch + 1] where the tokens of each sequence begin
  std::vector<int32_t> kv_lens;      // [batch] with the tokens of this step
  std::vector<int32_t> page_indptr;  // [batch + 1]
  std::vector<int32_t> page_indices;
  std::vector<int32_t> last_rows;  // [draws.size()] tokens whose successors are drawn
  Draws draws;

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t batch_size() const { return static_cast<int32_t>(kv_lens.size()); }
};
// --8<-- [end:step]

/// A model on a device, with its weights, its cache of keys and values, and its buffers. It keeps
/// nothing of a sequence but keys and values. One thread at a time calls it.
class Backend {
 public:
  virtual ~Backend() = default;

  /// Computes one step and draws the token after each of Step::last_rows. The caller gives `drawn`
  /// with room for Options::max_batch_size tokens.
  ///   std::runtime_error  the device has failed
  virtual void run(const Step& step, Drawn* drawn) = 0;
};

}  // namespace engine
