// SPDX-License-Identifier: Apache-2.0
#include "plan/kernel/batch_kind.h"

#include <algorithm>

#include "plan/schedule/schedule_shape.h"

namespace flashplan {
namespace {

// Packed query rows of a request and a kv head. With more, the kernels for many rows are faster.
constexpr int32_t kFewRows = 16;

int32_t group_size(const AttentionOptions& options) {
  return options.num_qo_heads / options.num_kv_heads;
}

/// Whether the kernel for many rows may be the faster one for decodes below shared prefixes. In
/// pages without boxes it copies keys row by row, which is slow for decodes.
bool can_gain_by_prefixes(const AttentionOptions& options) {
  return options.page_size > 0 && has_boxes(options) && may_share_prefixes(options);
}

}  // namespace

BatchKind kind_of_bounds(const AttentionOptions& options) noexcept {
  const bool decodes = options.max_qo_tokens <= options.max_batch_size;
  return decodes && group_size(options) <= kFewRows ? BatchKind::kFewRows : BatchKind::kManyRows;
}

bool allows_both_kinds(const AttentionOptions& options) noexcept {
  if (kind_of_bounds(options) == BatchKind::kFewRows) return can_gain_by_prefixes(options);
  return group_size(options) <= kFewRows;
}

BatchKind kind_of(const Batch& batch, const AttentionOptions& options) noexcept {
  int32_t longest = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    longest = std::max(longest, batch.qo_indptr[r + 1] - batch.qo_indptr[r]);
  }
  const bool has_few = longest <= kFewRows / group_size(options);
  return has_few ? BatchKind::kFewRows : BatchKind::kManyRows;
}

bool may_gain_by_prefixes(const Batch& batch, const AttentionOptions& options,
                          int64_t num_shared_keys, int32_t num_processors) noexcept {
  // By the kernel for many rows, with sharing, a tree of prefixes that saves 900 keys for each
  // processor takes 7 % longer, and one that saves 1,700 takes 17 % less time (H100). Of 64 trees
  // on an H200, none became faster that saves less than 1 / kLeastPart of all keys.
  constexpr int64_t kLeastKeys = 1500;
  constexpr int64_t kLeastPart = 8;
  if (num_shared_keys * options.num_kv_heads < kLeastKeys * num_processors) return false;
  int64_t num_keys = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) num_keys += batch.kv_lens[r];
  return num_shared_keys * kLeastPart >= num_keys && can_gain_by_prefixes(options);
}

}  // namespace flashplan
