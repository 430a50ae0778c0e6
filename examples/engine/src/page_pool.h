// SPDX-License-Identifier: Apache-2.0
// Pages of the cache of keys and values, and how many users each one has.
#pragma once

#include <cstdint>
#include <vector>

namespace engine {

/// A page has one id in the caches of all layers. Using it wrongly is an error of the engine
/// itself: std::logic_error.
class PagePool {
 public:
  explicit PagePool(int32_t num_pages);

  /// A page that nobody uses, with one user; there must be one.
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
