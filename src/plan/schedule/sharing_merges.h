// SPDX-License-Identifier: Apache-2.0
// Writes the merges of requests that read shared prefixes, and of these prefixes.
#pragma once

#include <cstdint>

#include "abi/work_queue.h"
#include "plan/schedule/prefix_tree.h"

namespace flashplan {

/// The merges of sharers, which PrefixTree numbers: requests that read shared prefixes, then these
/// prefixes. The merge of kv head h of sharer s is merges[first + s * num_kv_heads + h].
struct SharingMerges {
  Merge* merges = nullptr;
  int32_t first = 0;
  int32_t num_partial_rows = 0;  // partial rows of all sharers if none is cut
};

/// Writes the merges of sharers, one sharer after the other, as they are before any is cut: each
/// merge has one state. It is meant to be a local object, which the compiler keeps in registers.
class SharingMergesWriter {
 public:
  SharingMergesWriter(const SharingMerges& sharing, const PrefixTree& prefixes,
                      int32_t num_kv_heads)
      : prefixes_(prefixes.prefixes().data()),
        num_heads_(num_kv_heads),
        first_(sharing.first),
        first_prefix_(sharing.first + prefixes.num_requests() * num_kv_heads),
        next_(sharing.merges + sharing.first) {}

  /// Writes the merges of the next request that reads prefixes, of which `prefix` is the innermost.
  void add_request(int32_t request, int32_t qo_begin, int32_t num_rows, int32_t prefix) {
    if (prefix != prefix_) {
      prefix_ = prefix;
      // A merge of the request waits for the request's own work tile and for each prefix.
      num_pieces_ = prefixes_[prefix].depth + 2;
      parent_ = first_prefix_ + prefix * num_heads_;
    }
    const Words rows = {request, qo_begin, 0, num_rows};
    const Words states = {0, next_row_, 1, num_pieces_};
    const Words links = {parent_, -1, 0, num_heads_};
    const Words next_links = {1, 0, 0, 0};
    write(num_rows, rows, states, links, next_links);
  }

  /// Writes the merges of the next prefix, after those of all requests.
  void add_prefix(int32_t segment, int32_t qo_begin, const SharedPrefix& prefix) {
    const bool has_parent = prefix.parent >= 0;
    const int32_t parent = has_parent ? first_prefix_ + prefix.parent * num_heads_ : -1;
    const int32_t first_reader = first_ + prefix.first_reader * num_heads_;
    const Words rows = {segment, qo_begin, 0, prefix.num_rows};
    const Words states = {0, next_row_, 1, 1};
    const Words links = {parent, first_reader, prefix.num_readers, num_heads_};
    const Words next_links = {has_parent ? 1 : 0, 1, 0, 0};
    write(prefix.num_rows, rows, states, links, next_links);
  }

 private:
  // A merge is written by three instructions, each of which writes 16 bytes.
  using Words = int32_t __attribute__((vector_size(16)));
  using WordsInMemory = int32_t __attribute__((vector_size(16), aligned(4), may_alias));
  static_assert(sizeof(Merge) == 3 * sizeof(Words));

  /// Writes a merge for each kv head. The merge of the first head consists of `rows`, of `states`
  /// (the four fields from kv_head on) and of `links` (the four fields from `parent` on).
  /// `next_links` is added to `links` from one head to the next.
  void write(int32_t num_rows, Words rows, Words states, Words links, Words next_links) {
    const Words next_states = {1, num_rows, 0, 0};
    auto* words = reinterpret_cast<WordsInMemory*>(next_);
    for (int32_t head = 0; head < num_heads_; ++head, words += 3) {
      words[0] = rows;
      words[1] = states;
      words[2] = links;
      states += next_states;
      links += next_links;
    }
    next_ += num_heads_;
    next_row_ += num_heads_ * num_rows;
  }

  const SharedPrefix* const prefixes_;
  const int32_t num_heads_;
  const int32_t first_;
  const int32_t first_prefix_;
  Merge* next_;
  int32_t next_row_ = 0;
  int32_t prefix_ = -1;
  int32_t num_pieces_ = 0;
  int32_t parent_ = -1;
};

}  // namespace flashplan
