// SPDX-License-Identifier: Apache-2.0
#include "page_pool.h"

#include <stdexcept>

namespace engine {

PagePool::PagePool(int32_t num_pages) : num_users_(static_cast<std::size_t>(num_pages)) {
  free_.reserve(num_users_.size());
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

int32_t PagePool::take() {
  if (free_.empty()) throw std::logic_error("take: expected a free page, got none");
  const int32_t page = free_.back();
  free_.pop_back();
  num_users_[static_cast<std::size_t>(page)] = 1;
  return page;
}

void PagePool::add_user(int32_t page) {
  int32_t& users = num_users_.at(static_cast<std::size_t>(page));
  if (users == 0) throw std::logic_error("add_user: expected a page in use, got a free one");
  ++users;
}

int32_t PagePool::remove_user(int32_t page) {
  int32_t& users = num_users_.at(static_cast<std::size_t>(page));
  if (users == 0) throw std::logic_error("remove_user: expected a page in use, got a free one");
  if (--users == 0) free_.push_back(page);
  return users;
}

int32_t PagePool::num_users(int32_t page) const {
  return num_users_.at(static_cast<std::size_t>(page));
}

}  // namespace engine
