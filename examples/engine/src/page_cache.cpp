// SPDX-License-Identifier: Apache-2.0
#include "page_cache.h"

#include <algorithm>
#include <utility>

namespace engine {

struct PageCache::Node {
  Node* parent = nullptr;
  int32_t page = -1;
  uint64_t last_use = 0;  // when the last sequence released it
  Children children;
  Children::iterator place;  // this node among the children of its parent
};

bool PageCache::Less::operator()(std::span<const int32_t> a, std::span<const int32_t> b) const {
  return std::ranges::lexicographical_compare(a, b);
}

PageCache::PageCache(int32_t num_pages, int32_t page_size)
    : pool_(num_pages),
      page_size_(page_size),
      root_(std::make_unique<Node>()),
      node_of_page_(static_cast<std::size_t>(num_pages)) {}

PageCache::~PageCache() {
  // Nodes are destroyed one by one. The destructor of a tree would call itself as deep as the tree
  // is, and overflow the stack.
  std::vector<std::unique_ptr<Node>> nodes;
  nodes.push_back(std::move(root_));
  while (!nodes.empty()) {
    const std::unique_ptr<Node> node = std::move(nodes.back());
    nodes.pop_back();
    for (auto& [tokens, child] : node->children) nodes.push_back(std::move(child));
  }
}

int32_t PageCache::acquire(std::span<const int32_t> tokens, int32_t reserve,
                           std::vector<int32_t>* pages) {
  const std::size_t most = (tokens.size() - 1) / static_cast<std::size_t>(page_size_);
  Node* node = root_.get();
  while (pages->size() < most) {
    node = find_child(*node, tokens_of(tokens, pages->size()));
    if (node == nullptr) break;
    use(node);
    pages->push_back(node->page);
  }
  const auto num_known = static_cast<int32_t>(pages->size());
  const int32_t num_new = pages_for(static_cast<int32_t>(tokens.size())) - num_known;
  if (num_new + reserve > num_available()) {
    release(pages);
    return -1;
  }
  for (int32_t i = 0; i < num_new; ++i) pages->push_back(take());
  return num_known * page_size_;
}

bool PageCache::grow(std::vector<int32_t>* pages) {
  if (num_available() == 0) return false;
  pages->push_back(take());
  return true;
}

void PageCache::publish(std::span<const int32_t> tokens, int32_t begin,
                        std::vector<int32_t>* pages) {
  const auto first = static_cast<std::size_t>(begin / page_size_);
  const std::size_t last = tokens.size() / static_cast<std::size_t>(page_size_);
  if (first >= last) return;
  Node* node =
      first == 0 ? root_.get() : node_of_page_[static_cast<std::size_t>((*pages)[first - 1])];
  for (std::size_t i = first; i < last; ++i) {
    const std::span<const int32_t> key = tokens_of(tokens, i);
    int32_t& page = (*pages)[i];
    Node* child = find_child(*node, key);
    if (child == nullptr) {
      auto added = std::make_unique<Node>();
      child = added.get();
      child->parent = node;
      child->page = page;
      child->place =
          node->children.emplace(std::vector(key.begin(), key.end()), std::move(added)).first;
      pool_.add_user(page);
      node_of_page_[static_cast<std::size_t>(page)] = child;
    } else if (child->page != page) {
      use(child);
      pool_.remove_user(page);
      page = child->page;
    }
    node = child;
  }
}

void PageCache::release(std::vector<int32_t>* pages) {
  while (!pages->empty()) {  // the last page first: it is below the others in the tree
    const int32_t page = pages->back();
    pages->pop_back();
    Node* node = node_of_page_[static_cast<std::size_t>(page)];
    if (pool_.remove_user(page) != 1 || node == nullptr) continue;
    ++num_unused_;
    node->last_use = ++clock_;
    if (node->children.empty()) unused_leaves_.emplace(node->last_use, node);
  }
}

std::span<const int32_t> PageCache::tokens_of(std::span<const int32_t> tokens,
                                              std::size_t index) const {
  const auto size = static_cast<std::size_t>(page_size_);
  return tokens.subspan(index * size, size);
}

PageCache::Node* PageCache::find_child(const Node& node, std::span<const int32_t> tokens) const {
  const auto place = node.children.find(tokens);
  return place == node.children.end() ? nullptr : place->second.get();
}

void PageCache::use(Node* node) {
  if (pool_.num_users(node->page) == 1) {
    --num_unused_;
    unused_leaves_.erase(node->last_use);
  }
  pool_.add_user(node->page);
}

int32_t PageCache::take() {
  if (pool_.num_free() == 0) remove_oldest_leaf();
  return pool_.take();
}

void PageCache::remove_oldest_leaf() {
  Node* node = unused_leaves_.begin()->second;
  unused_leaves_.erase(unused_leaves_.begin());
  Node* parent = node->parent;
  pool_.remove_user(node->page);
  node_of_page_[static_cast<std::size_t>(node->page)] = nullptr;
  parent->children.erase(node->place);
  --num_unused_;
  const bool is_unused = parent != root_.get() && pool_.num_users(parent->page) == 1;
  if (is_unused && parent->children.empty()) unused_leaves_.emplace(parent->last_use, parent);
}

}  // namespace engine
