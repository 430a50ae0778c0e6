// SPDX-License-Identifier: Apache-2.0
#include "plan/kernel/batch_kind.h"

#include <algorithm>

#include "common/dtypes.h"
#include "plan/kernel/tuning.h"
#include "plan/schedule/schedule_shape.h"

namespace flashplan {
namespace {

int32_t group_size(const AttentionOptions& options) {
  return options.num_qo_heads / options.num_kv_heads;
}

/// Whether the kernel for many rows may be the faster one for decodes that read shared prefixes. It
/// is slower if pages do not consist of whole TMA boxes, because it then copies keys row by row.
bool can_gain_by_prefixes(const AttentionOptions& options) {
  return options.page_size > 0 && has_boxes(options) && may_share_prefixes(options);
}

}  // namespace

int32_t most_few_rows(const AttentionOptions& options) noexcept {
  if (!options.batch_invariant) return kBatchTuning.few_rows;
  return std::max(kBatchTuning.few_rows_of_invariant, group_size(options));
}

int32_t most_few_queries(const AttentionOptions& options) noexcept {
  return most_few_rows(options) / group_size(options);
}

BatchKind kind_of_bounds(const AttentionOptions& options) noexcept {
  const bool decodes = options.max_qo_tokens <= options.max_batch_size;
  return decodes && group_size(options) <= most_few_rows(options) ? BatchKind::kFewRows
                                                                  : BatchKind::kManyRows;
}

bool allows_both_kinds(const AttentionOptions& options) noexcept {
  if (kind_of_bounds(options) == BatchKind::kFewRows) return can_gain_by_prefixes(options);
  return group_size(options) <= most_few_rows(options);
}

RequestKinds kinds_of_requests(const Batch& batch, const AttentionOptions& options) noexcept {
  const int32_t most_few = most_few_queries(options);
  RequestKinds kinds = {};
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    const int32_t qo_len = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
    kinds.few_rows |= qo_len > 0 && qo_len <= most_few;
    kinds.many_rows |= qo_len > most_few;
  }
  return kinds;
}

BatchKind kind_of(const Batch& batch, const AttentionOptions& options) noexcept {
  const bool has_many = kinds_of_requests(batch, options).many_rows;
  return has_many ? BatchKind::kManyRows : BatchKind::kFewRows;
}

bool divides_batches(const AttentionOptions& options) noexcept {
  if (options.batch_invariant) return true;
  return is_narrow_float(options.kv_dtype) && kind_of_bounds(options) == BatchKind::kManyRows;
}

bool may_gain_by_prefixes(const Batch& batch, const AttentionOptions& options,
                          int64_t num_shared_keys, int32_t num_processors) noexcept {
  constexpr BatchTuning kTuning = kBatchTuning;
  if (num_shared_keys * options.num_kv_heads < kTuning.least_shared_keys * num_processors) {
    return false;
  }
  int64_t num_keys = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) num_keys += batch.kv_lens[r];
  return num_shared_keys * kTuning.least_shared_part >= num_keys && can_gain_by_prefixes(options);
}

}  // namespace flashplan
