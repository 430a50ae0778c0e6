// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "api/batch_checks.h"
#include "checks/tensor_checks.h"
#include "common/error.h"
#include "flashplan/prefixes.h"

namespace flashplan {
namespace {

/// The number of equal ids before the first difference, at most `count`.
int64_t num_common(const int32_t* a, const int32_t* b, int64_t count) {
  constexpr int64_t kBlock = 64;
  int64_t i = 0;
  while (i + kBlock <= count && std::memcmp(a + i, b + i, kBlock * sizeof(int32_t)) == 0) {
    i += kBlock;
  }
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

/// The number of keys that a request had before this batch, in which each query adds one key.
int32_t num_old_keys(const Batch& batch, int32_t request) {
  const int32_t qo_len = batch.qo_indptr[request + 1] - batch.qo_indptr[request];
  return std::max(batch.kv_lens[request] - qo_len, 0);
}

/// Writes the rows of groups to the caller's memory. Requests are added from the last to the first.
/// A group whose first request is not known yet waits at the front of the memory, as a row {last
/// request, unused, tokens}; inner groups wait behind outer ones. Complete groups are written from
/// the end of the memory towards the front. Waiting and complete groups are never more than
/// batch_size - 1 rows.
class GroupWriter {
 public:
  GroupWriter(int32_t* groups, int32_t capacity)
      : waiting_(groups), groups_(groups), end_(capacity), first_(capacity) {}

  /// Adds that requests `request` and `request` + 1 have `num_tokens` keys in common.
  void add(int32_t request, int32_t num_tokens) {
    const int32_t last = finish(request + 1, num_tokens);
    if (num_tokens == 0 || (num_waiting_ > 0 && waiting(num_waiting_ - 1)[2] == num_tokens)) return;
    int32_t* row = waiting(num_waiting_++);
    row[0] = last;
    row[2] = num_tokens;
  }

  /// Completes the waiting groups with more than `num_tokens` keys: their first request is
  /// `request`. Returns the last request of the outermost of these groups, or `request` if there
  /// are none.
  int32_t finish(int32_t request, int32_t num_tokens) {
    int32_t last = request;
    while (num_waiting_ > 0 && waiting(num_waiting_ - 1)[2] > num_tokens) {
      const int32_t* row = waiting(--num_waiting_);
      last = row[0];
      const int32_t group[] = {request, last - request + 1, row[2]};
      std::copy_n(group, 3, groups_ + 3 * int64_t{--first_});
    }
    return last;
  }

  /// Moves the groups to the start of the memory, and returns their number.
  int32_t close() {
    finish(0, 0);
    std::copy(groups_ + 3 * int64_t{first_}, groups_ + 3 * int64_t{end_}, groups_);
    return end_ - first_;
  }

 private:
  int32_t* waiting(int32_t i) { return waiting_ + 3 * int64_t{i}; }

  int32_t* const waiting_;
  int32_t* const groups_;
  const int32_t end_;
  int32_t first_;
  int32_t num_waiting_ = 0;
};

}  // namespace

Status find_shared_prefixes(const Batch& batch, int32_t page_size, const HostPageTable& table,
                            int32_t* groups, int32_t* num_groups) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_lengths(batch));
  if (page_size < 1) {
    return error(StatusCode::kInvalidArgument, "page_size: expected >= 1, got %d", page_size);
  }
  if (num_groups == nullptr || (groups == nullptr && batch.batch_size > 1)) {
    return error(StatusCode::kInvalidArgument, "%s: expected a pointer, got null",
                 num_groups == nullptr ? "num_groups" : "groups");
  }
  const PageTableTensors tables{table.block_table, table.page_indptr, table.page_indices};
  FLASHPLAN_RETURN_IF_ERROR(check_page_table(tables, batch.batch_size, Device{}));
  PageIds ids;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    FLASHPLAN_RETURN_IF_ERROR(find_page_ids(tables, r, batch.kv_lens[r], page_size, &ids));
  }
  *num_groups = 0;
  if (batch.batch_size < 2) return {};
  GroupWriter writer(groups, batch.batch_size - 1);
  PageIds next = ids;
  for (int32_t r = batch.batch_size - 2; r >= 0; --r) {
    static_cast<void>(find_page_ids(tables, r, batch.kv_lens[r], page_size, &ids));
    const int32_t most = std::min(num_old_keys(batch, r), num_old_keys(batch, r + 1));
    const int64_t pages = (int64_t{most} + page_size - 1) / page_size;
    const int64_t common = num_common(ids.ids, next.ids, pages) * page_size;
    writer.add(r, static_cast<int32_t>(std::min<int64_t>(common, most)));
    next = ids;
  }
  *num_groups = writer.close();
  return {};
}

}  // namespace flashplan
