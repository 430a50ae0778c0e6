// SPDX-License-Identifier: Apache-2.0
#include "api/check_lengths.h"

#include "common/error.h"

namespace flashplan {

Status check_lengths(const Batch& batch) noexcept {
  if (batch.batch_size < 0) {
    return error(StatusCode::kInvalidArgument, "kv_lens: expected >= 0 requests, got %d",
                 batch.batch_size);
  }
  if (batch.qo_indptr == nullptr || (batch.kv_lens == nullptr && batch.batch_size > 0)) {
    return error(StatusCode::kInvalidArgument, "%s: expected a pointer, got null",
                 batch.qo_indptr == nullptr ? "qo_indptr" : "kv_lens");
  }
  const int32_t* qo = batch.qo_indptr;
  if (qo[0] != 0) {
    return error(StatusCode::kInvalidArgument, "qo_indptr[0]: expected 0, got %d", qo[0]);
  }
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    if (qo[r + 1] < qo[r]) {
      return error(StatusCode::kInvalidArgument,
                   "qo_indptr[%d]: expected >= qo_indptr[%d] (%d), got %d", r + 1, r, qo[r],
                   qo[r + 1]);
    }
    if (batch.kv_lens[r] < 0) {
      return error(StatusCode::kInvalidArgument, "kv_lens[%d]: expected >= 0, got %d", r,
                   batch.kv_lens[r]);
    }
  }
  return {};
}

}  // namespace flashplan
