// SPDX-License-Identifier: Apache-2.0
// Pages of the cache of keys and values, and how many users each one has.
#pragma once

#include <cstdint>
#include <vector>

namespace engine {

/// Counts the users of pages. A page has the same id in the caches of all layers. Wrong calls are
/// errors of the engine itself, and throw std::logic_error.
class PagePool {
 public:
  explicit PagePool(int32_t num_pages);

  /// Takes a free page, which then has one user. There must be a free page.
  int32_t take();
  void add_user(int32_t page);
  /// Returns how many users are left. A page without users is free.
  int32_t remove_user(int32_t page);

  int32_t num_users(int32_t page) const;
  int32_t num_pages() const { return static_cast<int32_t>(num_users_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }

 private:
  std::vector<int32_t> num_users_;
  std::vector<int32_t> free_;
};

}  // namespace engine
