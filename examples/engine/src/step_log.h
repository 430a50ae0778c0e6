// SPDX-License-Identifier: Apache-2.0
// Writes the lengths and page tables of all steps to a file, so that other implementations of
// attention can be timed on the same steps.
#pragma once

#include <filesystem>
#include <fstream>
#include <memory>

#include "backend.h"

namespace engine {

/// Passes all calls on to another backend. For each step the file gets, in int32: batch_size,
/// num_tokens, the number of page ids, then qo_indptr [batch_size + 1], kv_lens [batch_size],
/// page_indptr [batch_size + 1] and page_indices.
class StepLog final : public Backend {
 public:
  /// Throws std::system_error if the file can not be written.
  StepLog(std::unique_ptr<Backend> backend, const std::filesystem::path& path);

  void start(const Step& step) override;
  void finish(Drawn* drawn) override { backend_->finish(drawn); }
  DeviceTimes times() const override { return backend_->times(); }

 private:
  std::unique_ptr<Backend> backend_;
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace engine
