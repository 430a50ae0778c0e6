// SPDX-License-Identifier: Apache-2.0
// Which shared prefixes are computed once for several requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "abi/mask.h"
#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "plan/schedule_shape.h"

namespace flashplan {

/// A row of Batch::shared_prefixes.
struct PrefixGroup {
  int32_t first_request;
  int32_t num_requests;
  int32_t num_tokens;
  int32_t row;
};

/// The shared prefixes of a batch, checked and put in order.
class PrefixGroups {
 public:
  /// For batches of up to `max_batch_size`. May throw std::bad_alloc.
  void reserve(int32_t max_batch_size);

  /// Reads those of `batch`, whose lengths have been checked.
  ///   kInvalidArgument  names the row; the groups read before stay
  Status read(const Batch& batch) noexcept;

  /// By first request; of those with the same one outer groups come first.
  std::span<const PrefixGroup> in_order() const { return {groups_.data(), size_}; }

 private:
  /// A group around a request, and which of it and the groups around it has the longest prefix.
  struct Open {
    int32_t end;  // its last request + 1
    int32_t most_tokens;
    int32_t row;
  };

  Status check_nesting(const Batch& batch, std::size_t size) noexcept;

  std::vector<PrefixGroup> groups_;
  std::vector<PrefixGroup> read_;
  std::vector<Open> open_;
  std::size_t size_ = 0;
};

/// A prefix that is computed once, as one row tile: the rows of neighbouring requests, and the keys
/// that all of them begin with, less those of the prefix around it.
struct SharedPrefix {
  int32_t first_request;
  int32_t num_requests;
  int32_t num_rows;      // packed, for one kv head
  int32_t num_readers;   // requests with rows
  int32_t first_reader;  // sharer
  int32_t parent;        // the prefix around it, or -1
  int32_t depth;         // prefixes around it
  KeySpan keys;          // whole steps
};

/// Chooses among the groups of a batch: a prefix is computed once where the cost model says that
/// this is less work. Requests of more rows than a row tile has are left alone, since their tiles
/// are full without others.
///
/// Sharers are the requests that read shared prefixes, numbered from 0 in their order, and after
/// them these prefixes.
class PrefixTree {
 public:
  /// May throw std::bad_alloc.
  void reserve(const ScheduleShape& shape, int32_t max_batch_size);

  /// Chooses among `groups`, which are in the order of PrefixGroups.
  void build(const Batch& batch, std::span<const PrefixGroup> groups);
  /// Chooses none.
  void clear();

  bool empty() const { return num_prefixes_ == 0; }
  /// Outer ones before those inside.
  std::span<const SharedPrefix> prefixes() const { return {prefixes_.data(), num_prefixes_}; }

  // Of a request of the last build(), if there are prefixes:
  /// The innermost prefix that it reads, or -1.
  int32_t prefix_of(int32_t request) const { return prefix_of_[static_cast<std::size_t>(request)]; }
  /// Its number as a sharer, or -1.
  int32_t sharer_of(int32_t request) const { return sharer_of_[static_cast<std::size_t>(request)]; }
  /// The first of its keys that is in no prefix that it reads.
  int32_t first_own_key(int32_t request) const { return keys_before(prefix_of(request)); }

  int32_t num_requests() const { return num_requests_; }  // that read prefixes
  int32_t num_sharers() const { return num_requests_ + static_cast<int32_t>(num_prefixes_); }
  /// Partial rows of all sharers that are not cut.
  int32_t num_partial_rows() const { return num_rows_ * shape_.num_kv_heads; }
  /// By which sharing lowers the cost of all heads.
  int64_t saved_cost() const { return saved_cost_ * shape_.num_kv_heads; }

 private:
  struct Run;

  int32_t rows_of(const Batch& batch, int32_t request) const {
    return (batch.qo_indptr[request + 1] - batch.qo_indptr[request]) * shape_.group_size;
  }
  /// Keys of the prefix and of those around it.
  int32_t keys_before(int32_t prefix) const {
    return prefix < 0 ? 0 : prefixes_[static_cast<std::size_t>(prefix)].keys.end;
  }
  void share(const Run& run, int32_t end);
  void number_readers(const Batch& batch);

  ScheduleShape shape_;
  int32_t most_sharers_ = 0;
  std::vector<SharedPrefix> prefixes_;
  std::vector<int32_t> prefix_of_;
  std::vector<int32_t> sharer_of_;
  std::size_t num_prefixes_ = 0;
  int32_t num_requests_ = 0;
  int32_t num_rows_ = 0;  // of all sharers, for one kv head
  int64_t saved_cost_ = 0;
};

}  // namespace flashplan
