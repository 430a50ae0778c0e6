// SPDX-License-Identifier: Apache-2.0
#include "plan/batch_kind.h"

#include <algorithm>

namespace flashplan {
namespace {

// Packed query rows of a request and a kv head. With more, the kernels for many rows are faster.
constexpr int32_t kFewRows = 16;

int32_t group_size(const AttentionOptions& options) {
  return options.num_qo_heads / options.num_kv_heads;
}

/// Whether the tiles of prefixes that requests share may be worth the kernel for many rows. Where
/// that copies keys row by row, in pages of another size, it is slow for the keys of few rows.
bool gains_by_prefixes(const AttentionOptions& options) {
  constexpr int32_t kBoxRows = 8;
  return options.page_size > 0 && options.page_size % kBoxRows == 0 && options.window_left < 0 &&
         !options.batch_invariant;
}

}  // namespace

BatchKind kind_of_bounds(const AttentionOptions& options) noexcept {
  const bool decodes = options.max_qo_tokens <= options.max_batch_size;
  return decodes && group_size(options) <= kFewRows ? BatchKind::kFewRows : BatchKind::kManyRows;
}

bool allows_both_kinds(const AttentionOptions& options) noexcept {
  if (!options.variant.empty() || options.rope) return false;
  if (kind_of_bounds(options) == BatchKind::kFewRows) return gains_by_prefixes(options);
  return group_size(options) <= kFewRows;
}

BatchKind kind_of(const Batch& batch, const AttentionOptions& options, int64_t num_shared_keys,
                  int32_t num_processors) noexcept {
  const int32_t most_tokens = kFewRows / group_size(options);
  int32_t longest = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    longest = std::max(longest, batch.qo_indptr[r + 1] - batch.qo_indptr[r]);
  }
  if (longest > most_tokens) return BatchKind::kManyRows;
  if (!gains_by_prefixes(options)) return BatchKind::kFewRows;
  // Measured on an H200: kernels for many rows need more time to begin, and for each request, than
  // kernels for few rows. As many keys must be saved to make up for it: so many for each processor,
  // and so many for each kv head of a request.
  constexpr int64_t kKeysToBegin = 800;
  constexpr int64_t kKeysOfHead = 660;
  const int64_t lost = kKeysToBegin * num_processors +
                       kKeysOfHead * batch.batch_size * int64_t{options.num_kv_heads};
  return num_shared_keys * options.num_kv_heads > lost ? BatchKind::kManyRows : BatchKind::kFewRows;
}

}  // namespace flashplan
