// SPDX-License-Identifier: Apache-2.0
// Chooses the shared prefixes that are computed once for several requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "abi/mask.h"
#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "plan/schedule/schedule_shape.h"

namespace flashplan {

/// A row of Batch::shared_prefixes, with its number `row`.
struct PrefixGroup {
  int32_t first_request;
  int32_t num_requests;
  int32_t num_tokens;
  int32_t row;
};

/// The shared prefixes of a batch, checked and sorted.
class PrefixGroups {
 public:
  /// Allocates memory for batches of up to `max_batch_size` requests. May throw std::bad_alloc.
  void reserve(int32_t max_batch_size);

  /// Reads the prefixes of `batch`, whose lengths have been checked.
  ///   kInvalidArgument  a row is wrong; the message names it, and the groups stay as they were
  Status read(const Batch& batch) noexcept;

  /// The groups, sorted by first request. Outer groups come before groups inside them.
  std::span<const PrefixGroup> in_order() const { return {groups_.data(), size_}; }
  /// How many fewer keys all requests together would read if each prefix was read once.
  int64_t num_shared_keys() const { return num_shared_keys_; }

 private:
  /// A group that contains the current request.
  struct Open {
    int32_t end;          // its last request + 1
    int32_t most_tokens;  // the most tokens of this group and the groups around it
    int32_t row;          // PrefixGroup::row of the group that has most_tokens
  };

  Status check_nesting(const Batch& batch, std::size_t size, int64_t* num_shared_keys) noexcept;
  static Status check_tokens(const Batch& batch, int32_t first, int32_t end,
                             const Open& longest) noexcept;

  std::vector<PrefixGroup> groups_;
  std::vector<PrefixGroup> read_;
  std::vector<Open> open_;
  std::size_t size_ = 0;
  int64_t num_shared_keys_ = 0;
};

/// A prefix that is computed once, as one row tile. The tile has the rows of neighbouring requests,
/// and the keys that all of them begin with, except the keys of the prefix around this one.
struct SharedPrefix {
  int32_t first_request;
  int32_t num_requests;
  int32_t num_rows;      // packed query rows for one kv head
  int32_t num_readers;   // requests of the prefix that have rows
  int32_t first_reader;  // the first of these readers, by its number as a sharer (see PrefixTree)
  int32_t parent;        // index of the innermost prefix around this one, or -1
  int32_t depth;         // the number of prefixes around this one
  KeySpan keys;          // keys of this prefix alone; begin and end are multiples of tile_kv
};

/// Chooses among the groups of a batch: a prefix is computed once where the cost model predicts
/// less work than computing it for each request. A request with more rows than a row tile never
/// shares, because it fills tiles by itself.
///
/// Sharers have numbers: first the requests that read shared prefixes, from 0 in their order in the
/// batch, then the shared prefixes.
class PrefixTree {
 public:
  /// Allocates memory for batches of up to `max_batch_size` requests. May throw std::bad_alloc.
  void reserve(const ScheduleShape& shape, int32_t max_batch_size);

  /// Chooses among `groups`, which are in the order of PrefixGroups.
  void build(const Batch& batch, std::span<const PrefixGroup> groups);
  /// Chooses no prefix.
  void clear();

  bool empty() const { return num_prefixes_ == 0; }
  /// The chosen prefixes; outer ones come before those inside them.
  std::span<const SharedPrefix> prefixes() const { return {prefixes_.data(), num_prefixes_}; }

  // The next three functions may be called if there are prefixes, for requests of the last build().

  /// The innermost prefix that the request reads, or -1.
  int32_t prefix_of(int32_t request) const { return prefix_of_[static_cast<std::size_t>(request)]; }
  /// The number of the request as a sharer, or -1.
  int32_t sharer_of(int32_t request) const { return sharer_of_[static_cast<std::size_t>(request)]; }
  /// The first key of the request that is in none of the prefixes that it reads.
  int32_t first_own_key(int32_t request) const { return keys_before(prefix_of(request)); }

  /// How many requests read prefixes.
  int32_t num_requests() const { return num_requests_; }
  int32_t num_sharers() const { return num_requests_ + static_cast<int32_t>(num_prefixes_); }
  /// The number of partial rows that all sharers write together if none of them is cut.
  int32_t num_partial_rows() const { return num_rows_ * shape_.num_kv_heads; }
  /// The predicted cost that sharing saves, for all heads.
  int64_t saved_cost() const { return saved_cost_ * shape_.num_kv_heads; }
  /// By how much a schedule without sharing is cheaper than its work tiles' costs added up, because
  /// requests that read the same prefix at the same time get its keys from a cache.
  int64_t cached_cost() const { return cached_cost_ * shape_.num_kv_heads; }

 private:
  struct Run;

  /// The number of keys in a prefix and in the prefixes around it.
  int32_t keys_before(int32_t prefix) const {
    return prefix < 0 ? 0 : prefixes_[static_cast<std::size_t>(prefix)].keys.end;
  }
  void count_readers(const Batch& batch);
  void share_group(const Batch& batch, const PrefixGroup& group, int32_t end);
  int32_t end_of_run(const Batch& batch, int32_t first, int32_t end) const;
  Run run_of(const Batch& batch, int32_t first, int32_t end, int32_t parent) const;
  void share(const Run& run, int32_t end);
  void number_readers(const Batch& batch);

  ScheduleShape shape_;
  int32_t most_sharers_ = 0;
  std::vector<SharedPrefix> prefixes_;
  std::vector<int32_t> prefix_of_;
  std::vector<int32_t> sharer_of_;
  std::vector<int32_t> readers_before_;  // [r]: how many requests before r have rows
  std::size_t num_prefixes_ = 0;
  int32_t num_requests_ = 0;
  int32_t num_rows_ = 0;  // packed query rows of all sharers, for one kv head
  int64_t saved_cost_ = 0;
  int64_t cached_cost_ = 0;
};

}  // namespace flashplan
