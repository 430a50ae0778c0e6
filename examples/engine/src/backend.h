// SPDX-License-Identifier: Apache-2.0
// The interface between an engine and a model, which computes the next tokens of a batch.
#pragma once

#include <cstdint>
#include <vector>

#include "device.h"
#include "draws.h"

namespace engine {

// --8<-- [start:step]
/// What the model computes in one step, in host memory. `tokens` has the tokens of all sequences,
/// one sequence after the other. A token -1 - i stands for draw number i of the step before.
struct Step {
  std::vector<int32_t> tokens;
  std::vector<int32_t> qo_indptr;    // [batch + 1] where the tokens of each sequence begin
  std::vector<int32_t> kv_lens;      // [batch] keys, with those of this step
  std::vector<int32_t> page_indptr;  // [batch + 1]
  std::vector<int32_t> page_indices;
  std::vector<int32_t> last_rows;  // [draws.size()] tokens whose successors are drawn
  Draws draws;
  bool has_paused = false;  // whether there was no work before this step

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t batch_size() const { return static_cast<int32_t>(kv_lens.size()); }
};
// --8<-- [end:step]

/// A model on a device, with its weights, its cache of keys and values, and its buffers. Keys and
/// values are all that it keeps of a sequence. One thread at a time calls it.
class Backend {
 public:
  virtual ~Backend() = default;

  /// Begins a step, which draws the token after each of Step::last_rows, and may return before it
  /// has ended. Steps are computed in the order of these calls. At most two are under way.
  ///   std::runtime_error  the device has failed
  virtual void start(const Step& step) = 0;
  /// Waits for the oldest step under way, and writes what it drew to `drawn`, which has room for
  /// Options::max_batch_size tokens.
  ///   std::runtime_error  the device has failed, or a row of logits has a NaN
  virtual void finish(Drawn* drawn) = 0;
  virtual DeviceTimes times() const { return {}; }
};

}  // namespace engine
