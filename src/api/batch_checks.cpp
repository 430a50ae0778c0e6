// SPDX-License-Identifier: Apache-2.0
#include "api/batch_checks.h"

#include "common/error.h"

namespace flashplan {
namespace {

/// Checks the lengths, and that the batch fits into the plan.
Status check_bounds(const AttentionOptions& options, const Batch& batch) {
  if (batch.batch_size < 0 || batch.batch_size > options.max_batch_size) {
    return error(StatusCode::kInvalidArgument,
                 "kv_lens: expected 0 to %d requests (max_batch_size), got %d",
                 options.max_batch_size, batch.batch_size);
  }
  FLASHPLAN_RETURN_IF_ERROR(check_lengths(batch));
  const int32_t* qo = batch.qo_indptr;
  int64_t num_keys = 0;
  int64_t num_pairs = 0;  // pairs of a query and a key; below 2^55
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    num_keys += batch.kv_lens[r];
    num_pairs += int64_t{qo[r + 1] - qo[r]} * batch.kv_lens[r];
  }
  if (qo[batch.batch_size] > options.max_qo_tokens) {
    return error(StatusCode::kInvalidArgument,
                 "qo_indptr[%d]: expected <= %d (max_qo_tokens), got %d", batch.batch_size,
                 options.max_qo_tokens, qo[batch.batch_size]);
  }
  // The scheduler adds up costs in 64 bits. A pair costs less than 2^3 for each head, so with this
  // limit the sum is below 2^62.
  const int64_t max_pairs = (int64_t{1} << 59) / options.num_qo_heads;
  if (num_pairs > max_pairs) {
    return error(StatusCode::kInvalidArgument,
                 "kv_lens: expected <= %lld pairs of a query and a key, got %lld",
                 static_cast<long long>(max_pairs), static_cast<long long>(num_pairs));
  }
  if (options.page_size == 0 && batch.kv_indptr == nullptr && num_keys > INT32_MAX) {
    return error(StatusCode::kInvalidArgument, "kv_lens: expected a sum <= %d, got %lld", INT32_MAX,
                 static_cast<long long>(num_keys));
  }
  return {};
}

Status check_kv_indptr(const AttentionOptions& options, const Batch& batch) {
  const int32_t* kv = batch.kv_indptr;
  if (kv == nullptr) return {};
  if (options.page_size > 0) {
    return error(StatusCode::kInvalidArgument,
                 "kv_indptr: expected none with a paged cache, got %d entries",
                 batch.batch_size + 1);
  }
  if (kv[0] < 0) {
    return error(StatusCode::kInvalidArgument, "kv_indptr[0]: expected >= 0, got %d", kv[0]);
  }
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    if (int64_t{kv[r + 1]} - kv[r] < batch.kv_lens[r]) {
      return error(StatusCode::kInvalidArgument,
                   "kv_indptr[%d]: expected >= kv_indptr[%d] + kv_lens[%d] (%lld), got %d", r + 1,
                   r, r, static_cast<long long>(kv[r]) + batch.kv_lens[r], kv[r + 1]);
    }
  }
  return {};
}

Status check_mask_begin(const AttentionOptions& options, const Batch& batch) {
  if (batch.mask_begin == nullptr) return {};
  if (!options.custom_mask) {
    return error(StatusCode::kInvalidArgument,
                 "mask_begin: expected none without custom_mask, got %d entries", batch.batch_size);
  }
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    if (batch.mask_begin[r] >= 0) continue;
    return error(StatusCode::kInvalidArgument, "mask_begin[%d]: expected >= 0, got %d", r,
                 batch.mask_begin[r]);
  }
  return {};
}

Status check_key_ranges(const AttentionOptions& options, const Batch& batch) {
  if (batch.key_ranges == nullptr || !options.variant.empty()) return {};
  return error(StatusCode::kInvalidArgument,
               "key_ranges: expected none without a variant, got %d ranges",
               batch.qo_indptr[batch.batch_size]);
}

}  // namespace

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

Status check_batch(const AttentionOptions& options, const Batch& batch) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_bounds(options, batch));
  FLASHPLAN_RETURN_IF_ERROR(check_kv_indptr(options, batch));
  FLASHPLAN_RETURN_IF_ERROR(check_mask_begin(options, batch));
  return check_key_ranges(options, batch);
}

}  // namespace flashplan
