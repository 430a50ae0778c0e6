// SPDX-License-Identifier: Apache-2.0
// The pages of the cache, and a radix tree of their tokens, in which a prompt finds the pages of
// its prefix.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "page_pool.h"

namespace engine {

/// Pages of sequences, and of prefixes that sequences have left behind.
///
/// A sequence fills its pages one after another. A full page is published: a node of the tree,
/// whose key is the page_size tokens in it, below the node of the page before it. The tree is one
/// more user of the page. Nothing is written to a published page, and only published pages have
/// several users, so nothing is written while it is shared.
///
/// Pages that the tree alone uses are kept until there is no free page. Then the leaf that was
/// released longest ago is removed. *Invariant:* a sequence that uses a page of the tree uses the
/// pages above it, so all pages that the tree alone uses can be freed, leaf after leaf.
class PageCache {
 public:
  PageCache(int32_t num_pages, int32_t page_size);
  ~PageCache();

  /// Gives a sequence that has no pages the pages for all of `tokens`. Returns how many tokens
  /// these hold already: the longest known prefix in whole pages. The last token is never among
  /// them, because it must be computed to get its logits. Returns -1, and takes nothing, if fewer
  /// than `reserve` pages would remain.
  int32_t acquire(std::span<const int32_t> tokens, int32_t reserve, std::vector<int32_t>* pages);
  /// Adds one page; false if there is none.
  bool grow(std::vector<int32_t>* pages);
  /// Publishes the full pages of tokens[begin:]. If the tree has the same tokens in another page,
  /// the sequence takes that page instead of its own.
  void publish(std::span<const int32_t> tokens, int32_t begin, std::vector<int32_t>* pages);
  /// Gives back the pages of a sequence.
  void release(std::vector<int32_t>* pages);

  int32_t pages_for(int32_t num_tokens) const { return (num_tokens + page_size_ - 1) / page_size_; }
  /// Pages that no sequence uses.
  int32_t num_available() const { return pool_.num_free() + num_unused_; }
  int32_t num_pages() const { return pool_.num_pages(); }
  int32_t page_size() const { return page_size_; }
  const PagePool& pool() const { return pool_; }

 private:
  struct Node;
  struct Less {  // compares the tokens of pages, without a copy of them
    using is_transparent = void;
    bool operator()(std::span<const int32_t> a, std::span<const int32_t> b) const;
  };
  using Children = std::map<std::vector<int32_t>, std::unique_ptr<Node>, Less>;

  /// The tokens of page number `index` of a sequence.
  std::span<const int32_t> tokens_of(std::span<const int32_t> tokens, std::size_t index) const;
  Node* find_child(const Node& node, std::span<const int32_t> tokens) const;
  /// Adds a sequence as a user of a published page.
  void use(Node* node);
  /// Takes a free page. If there is none, removes a leaf first. A page must be available.
  int32_t take();
  void remove_oldest_leaf();

  PagePool pool_;
  int32_t page_size_;
  std::unique_ptr<Node> root_;               // the empty prefix, without a page
  std::vector<Node*> node_of_page_;          // null: the page is not published
  std::map<uint64_t, Node*> unused_leaves_;  // leaves that the tree alone uses, by Node::last_use
  int32_t num_unused_ = 0;                   // nodes whose page the tree alone uses
  uint64_t clock_ = 0;
};

}  // namespace engine
