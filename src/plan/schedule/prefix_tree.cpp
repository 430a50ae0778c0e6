// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule/prefix_tree.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "abi/work_queue.h"
#include "common/error.h"

namespace flashplan {
namespace {

int32_t end_of(const PrefixGroup& group) { return group.first_request + group.num_requests; }

/// Orders outer groups before those inside them.
bool is_before(const PrefixGroup& a, const PrefixGroup& b) {
  if (a.first_request != b.first_request) return a.first_request < b.first_request;
  if (a.num_requests != b.num_requests) return a.num_requests > b.num_requests;
  if (a.num_tokens != b.num_tokens) return a.num_tokens < b.num_tokens;
  return a.row < b.row;
}

Status check_group(const PrefixGroup& group, int32_t batch_size) {
  if (group.first_request < 0 || group.first_request >= batch_size) {
    return error(StatusCode::kInvalidArgument,
                 "shared_prefixes[%d]: expected a first request of 0 to %d, got %d", group.row,
                 batch_size - 1, group.first_request);
  }
  if (group.num_requests < 1 || group.num_requests > batch_size - group.first_request) {
    return error(StatusCode::kInvalidArgument,
                 "shared_prefixes[%d]: expected 1 to %d requests from request %d on, got %d",
                 group.row, batch_size - group.first_request, group.first_request,
                 group.num_requests);
  }
  if (group.num_tokens < 0) {
    return error(StatusCode::kInvalidArgument, "shared_prefixes[%d]: expected >= 0 tokens, got %d",
                 group.row, group.num_tokens);
  }
  return {};
}

}  // namespace

void PrefixGroups::reserve(int32_t max_batch_size) {
  const std::size_t most = 2 * static_cast<std::size_t>(max_batch_size);
  groups_.resize(most);
  read_.resize(most);
  open_.resize(most);
}

Status PrefixGroups::read(const Batch& batch) noexcept {
  const int32_t count = batch.num_shared_prefixes;
  if (count < 0 || static_cast<std::size_t>(count) > read_.size()) {
    return error(StatusCode::kInvalidArgument,
                 "shared_prefixes: expected 0 to %zu rows (2 * max_batch_size), got %d",
                 read_.size(), count);
  }
  if (batch.shared_prefixes == nullptr && count > 0) {
    return error(StatusCode::kInvalidArgument, "shared_prefixes: expected a pointer, got null");
  }
  const auto size = static_cast<std::size_t>(count);
  bool sorted = true;
  for (std::size_t i = 0; i < size; ++i) {
    const int32_t* row = batch.shared_prefixes + 3 * i;
    read_[i] = {row[0], row[1], row[2], static_cast<int32_t>(i)};
    FLASHPLAN_RETURN_IF_ERROR(check_group(read_[i], batch.batch_size));
    sorted = sorted && (i == 0 || is_before(read_[i - 1], read_[i]));
  }
  if (!sorted) std::sort(read_.begin(), read_.begin() + count, is_before);

  int64_t num_shared_keys = 0;
  FLASHPLAN_RETURN_IF_ERROR(check_nesting(batch, size, &num_shared_keys));
  num_shared_keys_ = num_shared_keys;
  std::swap(groups_, read_);
  size_ = size;
  return {};
}

/// Checks that groups lie inside one another or apart, and counts the keys that sharing saves. Goes
/// through the requests with a stack of the groups that contain the current one.
Status PrefixGroups::check_nesting(const Batch& batch, std::size_t size,
                                   int64_t* num_shared_keys) noexcept {
  std::size_t next = 0;
  std::size_t depth = 0;
  const int32_t num_requests = size > 0 ? batch.batch_size : 0;
  for (int32_t r = 0; r < num_requests;) {
    while (depth > 0 && open_[depth - 1].end <= r) --depth;
    for (; next < size && read_[next].first_request == r; ++next) {
      const PrefixGroup& group = read_[next];
      Open open = {end_of(group), group.num_tokens, group.row};
      int32_t outer_tokens = 0;
      if (depth > 0) {
        const Open& around = open_[depth - 1];
        if (open.end > around.end) {
          return error(StatusCode::kInvalidArgument,
                       "shared_prefixes[%d]: expected to end at request %d at the latest, inside "
                       "the group around it, got requests %d to %d",
                       group.row, around.end - 1, group.first_request, open.end - 1);
        }
        if (around.most_tokens > open.most_tokens) {
          open.most_tokens = around.most_tokens;
          open.row = around.row;
        }
        outer_tokens = around.most_tokens;
      }
      *num_shared_keys += int64_t{group.num_requests - 1} * (open.most_tokens - outer_tokens);
      open_[depth++] = open;
    }
    // All requests from r up to where the next group begins or ends are in the same groups.
    int32_t end = next < size ? read_[next].first_request : num_requests;
    if (depth > 0) {
      const Open& longest = open_[depth - 1];
      end = std::min(end, longest.end);
      FLASHPLAN_RETURN_IF_ERROR(check_tokens(batch, r, end, longest));
    }
    r = end;
  }
  return {};
}

/// Checks that requests [first, end) are long enough for `longest`, the longest of their prefixes.
Status PrefixGroups::check_tokens(const Batch& batch, int32_t first, int32_t end,
                                  const Open& longest) noexcept {
  for (int32_t r = first; r < end; ++r) {
    const int32_t qo_len = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
    const int32_t most = std::max(batch.kv_lens[r] - qo_len, 0);
    if (longest.most_tokens <= most) continue;
    return error(StatusCode::kInvalidArgument,
                 "shared_prefixes[%d]: expected <= %d tokens (kv_len - qo_len of request %d), "
                 "got %d",
                 longest.row, most, r, longest.most_tokens);
  }
  return {};
}

void PrefixTree::reserve(const ScheduleShape& shape, int32_t max_batch_size) {
  shape_ = shape;
  most_sharers_ = shape.shares_prefixes ? most_sharing(max_batch_size, shape.num_kv_heads) : 0;
  prefixes_.resize(static_cast<std::size_t>(most_sharers_));
  const std::size_t requests = shape.shares_prefixes ? static_cast<std::size_t>(max_batch_size) : 0;
  prefix_of_.resize(requests);
  readers_before_.resize(requests + 1);
  sharer_of_.resize(requests);
}

void PrefixTree::clear() {
  num_prefixes_ = 0;
  num_requests_ = 0;
  num_rows_ = 0;
  saved_cost_ = 0;
  cached_cost_ = 0;
}

/// Neighbouring requests whose rows fit into one row tile and that have the same innermost prefix.
struct PrefixTree::Run {
  int32_t first_request;
  int32_t end;
  int32_t num_rows;
  int32_t num_readers;
  int32_t parent;
};

void PrefixTree::build(const Batch& batch, std::span<const PrefixGroup> groups) {
  clear();
  if (most_sharers_ == 0 || groups.empty()) return;
  std::fill_n(prefix_of_.begin(), batch.batch_size, -1);
  count_readers(batch);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const PrefixGroup& group = groups[i];
    const bool next_is_longer = i + 1 < groups.size() &&
                                groups[i + 1].first_request == group.first_request &&
                                groups[i + 1].num_requests == group.num_requests;
    if (next_is_longer || group.num_requests < 2) continue;
    const int32_t end =
        std::min(group.num_tokens, kPrefixPosition) / shape_.tile_kv * shape_.tile_kv;
    if (end > 0) share_group(batch, group, end);
  }
  number_readers(batch);
}

/// Shares the first `end` keys of a group among its requests, divided into runs: neighbours whose
/// rows fit into one row tile.
void PrefixTree::share_group(const Batch& batch, const PrefixGroup& group, int32_t end) {
  const int32_t* const qo = batch.qo_indptr;
  const int32_t most_tokens = shape_.tile_q / shape_.group_size;
  for (int32_t r = group.first_request; r < end_of(group);) {
    const int32_t num_tokens = qo[r + 1] - qo[r];
    const int32_t parent = prefix_of(r);
    int32_t run_end = r + 1;
    if (num_tokens == 0 || num_tokens > most_tokens) {
      // The request shares nothing: it has no rows, or it fills row tiles by itself.
    } else if (parent >= 0) {
      // The requests of the prefix `parent` fit into one row tile, so those of them that are in
      // this group are one run. All of them have the innermost prefix `parent`, as groups nest.
      const SharedPrefix& around = prefixes_[static_cast<std::size_t>(parent)];
      run_end = std::min(end_of(group), around.first_request + around.num_requests);
      if (around.keys.end < end) share(run_of(batch, r, run_end, parent), end);
    } else {
      run_end = end_of_run(batch, r, end_of(group));
      share(run_of(batch, r, run_end, -1), end);
    }
    r = run_end;
  }
}

/// The end of the longest run that begins with request `first`, at most `end`.
int32_t PrefixTree::end_of_run(const Batch& batch, int32_t first, int32_t end) const {
  const int32_t* const qo = batch.qo_indptr;
  const int32_t* const prefix_of = prefix_of_.data();
  const int32_t most_tokens = shape_.tile_q / shape_.group_size;
  int32_t r = first + 1;
  while (r < end && qo[r + 1] - qo[first] <= most_tokens && prefix_of[r] < 0) ++r;
  while (qo[r] == qo[r - 1]) --r;  // the last request of a run is a reader
  return r;
}

/// The run of requests [first, end), where `first` is a reader.
PrefixTree::Run PrefixTree::run_of(const Batch& batch, int32_t first, int32_t end,
                                   int32_t parent) const {
  const int32_t num_tokens = batch.qo_indptr[end] - batch.qo_indptr[first];
  const int32_t* readers_before = readers_before_.data();
  return {first, end, num_tokens * shape_.group_size, readers_before[end] - readers_before[first],
          parent};
}

/// Adds a prefix: the keys of `run` up to `end` are computed once, if that saves time.
void PrefixTree::share(const Run& run, int32_t end) {
  if (run.num_readers < 2) return;
  const CostModel& cost = shape_.cost;
  const int32_t begin = keys_before(run.parent);
  const int64_t steps = (end - begin) / shape_.tile_kv;
  const int64_t cached = steps * (run.num_readers - 1) * cost.of_cached_step();
  // Costs are linear in rows, and the rows cost the same in one row tile as in several. So only the
  // costs of a tile without rows are compared.
  const int64_t others = run.num_readers - 1;
  int64_t saved = steps * others * cost.of_step(0) - cached;
  SharedPrefix* const around =
      run.parent >= 0 ? &prefixes_[static_cast<std::size_t>(run.parent)] : nullptr;
  if (around != nullptr && around->num_readers == run.num_readers) {
    // All readers of the prefix around the run are in the run, so that prefix gets longer, and no
    // new one is added.
    if (saved <= 0) return;
    around->keys.end = end;
    saved_cost_ += saved;
    cached_cost_ += cached;
    return;
  }
  const int64_t write_cost = others * cost.of_write(0) + cost.of_write(run.num_rows);
  saved -= cost.of_tile(run.num_rows) + cost.of_write(run.num_rows);
  if (around == nullptr) {
    saved -= write_cost + others * cost.of_merge(0) + cost.of_merge(run.num_rows);
  }
  // If prefixes do not come first, one CTA may have to merge the rows of all readers, one after
  // the other, while the other CTAs are idle. Sharing pays only if this takes less time than
  // sharing saves in each CTA.
  const int64_t wait = shape_.prefixes_first() ? 0 : write_cost * shape_.num_ctas;
  if (saved * shape_.num_kv_heads <= wait) return;
  const int32_t new_requests = around == nullptr ? run.num_readers : 0;
  const int64_t rows = int64_t{num_rows_} + (around == nullptr ? 2 : 1) * run.num_rows;
  const int64_t most_rows = int64_t{shape_.max_partial_slots} * shape_.tile_q;
  const int32_t sharers = num_sharers() + new_requests + 1;
  if (sharers > most_sharers_ || rows * shape_.num_kv_heads > most_rows) return;

  const auto number = static_cast<int32_t>(num_prefixes_);
  prefixes_[num_prefixes_++] = {.first_request = run.first_request,
                                .num_requests = run.end - run.first_request,
                                .num_rows = run.num_rows,
                                .num_readers = run.num_readers,
                                .first_reader = -1,
                                .parent = run.parent,
                                .depth = around != nullptr ? around->depth + 1 : 0,
                                .keys = {begin, end}};
  for (int32_t r = run.first_request; r < run.end; ++r) {
    // This includes requests without rows, which are no readers.
    prefix_of_[static_cast<std::size_t>(r)] = number;
  }
  num_requests_ += new_requests;
  num_rows_ = static_cast<int32_t>(rows);
  saved_cost_ += saved;
  cached_cost_ += cached;
}

/// Counts for each request the earlier requests that have rows.
void PrefixTree::count_readers(const Batch& batch) {
  int32_t* const readers_before = readers_before_.data();
  int32_t count = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    readers_before[r] = count;
    count += batch.qo_indptr[r + 1] > batch.qo_indptr[r] ? 1 : 0;
  }
  readers_before[batch.batch_size] = count;
}

void PrefixTree::number_readers(const Batch& batch) {
  const int32_t* const prefix_of = prefix_of_.data();
  int32_t* const sharer_of = sharer_of_.data();
  int32_t next = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    const bool reads = prefix_of[r] >= 0 && batch.qo_indptr[r + 1] > batch.qo_indptr[r];
    sharer_of[r] = reads ? next : -1;
    next += reads ? 1 : 0;
  }
  for (std::size_t i = 0; i < num_prefixes_; ++i) {
    prefixes_[i].first_reader = sharer_of[prefixes_[i].first_request];
  }
}

}  // namespace flashplan
