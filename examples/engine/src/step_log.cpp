// SPDX-License-Identifier: Apache-2.0
#include "step_log.h"

#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

namespace engine {

StepLog::StepLog(std::unique_ptr<Backend> backend, const std::filesystem::path& path)
    : backend_(std::move(backend)), path_(path), file_(path, std::ios::binary) {
  if (!file_) throw std::system_error(errno, std::generic_category(), path.string());
}

void StepLog::start(const Step& step) {
  backend_->start(step);
  const auto put = [&](const std::vector<int32_t>& values) {
    file_.write(reinterpret_cast<const char*>(values.data()),
                static_cast<std::streamsize>(values.size() * sizeof(int32_t)));
  };
  put({step.batch_size(), step.num_tokens(), static_cast<int32_t>(step.page_indices.size())});
  for (const auto* values :
       {&step.qo_indptr, &step.kv_lens, &step.page_indptr, &step.page_indices}) {
    put(*values);
  }
  if (!file_.flush()) throw std::system_error(errno, std::generic_category(), path_.string());
}

}  // namespace engine
