// SPDX-License-Identifier: Apache-2.0
// Compares the page pool and the radix tree with slow ones, by random operations.
#include "page_cache.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "drive.h"

using namespace engine;

namespace {

template <class Call>
bool is_logic_error(const Call& call) {
  try {
    call();
  } catch (const std::logic_error&) {
    return true;
  }
  return false;
}

struct User {
  std::vector<int32_t> tokens;  // known tokens, some of which are not written yet
  int32_t num_written = 0;
  std::vector<int32_t> pages;
};

/// Users that write tokens to their pages as sequences do, and what each page then holds.
class World {
 public:
  World(uint32_t seed, int32_t num_pages, int32_t page_size)
      : random_(seed),
        page_size_(page_size),
        cache_(num_pages, page_size),
        contents_(static_cast<std::size_t>(num_pages)) {}

  void act() {
    switch (pick(random_, 0, 9)) {
      case 0:
      case 1:
      case 2: begin(); break;
      case 3:
        if (!users_.empty()) end(static_cast<std::size_t>(pick(random_, 0, num_users() - 1)));
        break;
      default:
        if (!users_.empty()) write(static_cast<std::size_t>(pick(random_, 0, num_users() - 1)));
    }
    check_all();
  }

  void end_all() {
    while (!users_.empty()) end(users_.size() - 1);
    check_all();
    CHECK_EQ(cache_.num_available(), cache_.num_pages());
    // All that the tree has kept can be taken, each page once.
    std::vector<int32_t> pages;
    while (cache_.grow(&pages)) continue;
    CHECK_EQ(static_cast<int32_t>(pages.size()), cache_.num_pages());
    std::ranges::sort(pages);
    CHECK(std::ranges::adjacent_find(pages) == pages.end());
    cache_.release(&pages);
    CHECK_EQ(cache_.pool().num_free(), cache_.num_pages());
  }

  int64_t num_known() const { return num_known_; }
  int64_t num_refused() const { return num_refused_; }
  int64_t num_replaced() const { return num_replaced_; }

 private:
  int32_t num_users() const { return static_cast<int32_t>(users_.size()); }

  void begin() {
    User user;
    const int32_t size = pick(random_, 1, 6 * page_size_);
    for (int32_t i = 0; i < size; ++i)
      user.tokens.push_back(pick(random_, 0, i < size - 2 ? 1 : 9));
    const int32_t reserve = pick(random_, 0, 2);
    const int32_t num_available = cache_.num_available();
    const int32_t num_known = cache_.acquire(user.tokens, reserve, &user.pages);
    if (num_known < 0) {
      CHECK(user.pages.empty());
      CHECK_EQ(cache_.num_available(), num_available);
      CHECK(cache_.pages_for(size) + reserve > num_available);
      ++num_refused_;
      return;
    }
    CHECK(num_known < size && num_known % page_size_ == 0);
    CHECK(cache_.num_available() >= reserve);
    CHECK_EQ(static_cast<int32_t>(user.pages.size()), cache_.pages_for(size));
    user.num_written = num_known;
    for (int32_t i = 0; i < num_known; ++i) CHECK_EQ(content(user, i), user.tokens[at(i)]);
    num_known_ += num_known;
    users_.push_back(std::move(user));
  }

  /// Writes some of a user's next tokens to its pages, as a step does, and publishes full pages.
  void write(std::size_t index) {
    User& user = users_[index];
    const auto size = static_cast<int32_t>(user.tokens.size());
    if (user.num_written == size) {  // a token was drawn
      user.tokens.push_back(pick(random_, 0, 1));
      const bool is_full = user.pages.size() < at(cache_.pages_for(size + 1));
      if (is_full && !cache_.grow(&user.pages)) {
        CHECK_EQ(cache_.num_available(), 0);
        end(index);
        return;
      }
    }
    const int32_t begin = user.num_written;
    const int32_t end = pick(random_, begin + 1, static_cast<int32_t>(user.tokens.size()));
    for (int32_t i = begin; i < end; ++i) {
      const int32_t page = user.pages[at(i / page_size_)];
      // Only the user that writes to a page uses it: neither another user nor the tree does.
      CHECK_EQ(cache_.pool().num_users(page), 1);
      contents_[at(page)].resize(at(page_size_));
      contents_[at(page)][at(i % page_size_)] = user.tokens[at(i)];
    }
    user.num_written = end;
    const std::vector<int32_t> before = user.pages;
    cache_.publish(std::span(user.tokens).first(at(end)), begin, &user.pages);
    num_replaced_ += before != user.pages;
  }

  void end(std::size_t index) {
    cache_.release(&users_[index].pages);
    CHECK(users_[index].pages.empty());
    users_.erase(users_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  /// Every token that a user has written is still in its pages, and users are counted.
  void check_all() {
    std::map<int32_t, int32_t> num_users;
    for (const User& user : users_) {
      for (int32_t i = 0; i < user.num_written; ++i) {
        CHECK_EQ(content(user, i), user.tokens[at(i)]);
      }
      for (const int32_t page : user.pages) ++num_users[page];
    }
    int32_t num_available = 0;
    for (int32_t page = 0; page < cache_.num_pages(); ++page) {
      const int32_t expected = num_users[page];
      const int32_t got = cache_.pool().num_users(page);
      CHECK(got == expected || got == expected + 1);  // the tree may be one more user
      CHECK(expected < 2 || got == expected + 1);     // pages of several users are published
      num_available += expected == 0;
    }
    CHECK_EQ(cache_.num_available(), num_available);
  }

  int32_t content(const User& user, int32_t i) const {
    return contents_[at(user.pages[at(i / page_size_)])][at(i % page_size_)];
  }

  static std::size_t at(int32_t index) { return static_cast<std::size_t>(index); }

  Random random_;
  int32_t page_size_;
  PageCache cache_;
  std::vector<User> users_;
  std::vector<std::vector<int32_t>> contents_;  // the tokens that were written to each page
  int64_t num_known_ = 0, num_refused_ = 0, num_replaced_ = 0;
};

}  // namespace

TEST(pool_counts_users) {
  PagePool pool(2);
  const int32_t page = pool.take();
  CHECK(page != pool.take());
  CHECK_EQ(pool.num_free(), 0);
  CHECK(is_logic_error([&] { pool.take(); }));
  pool.add_user(page);
  CHECK_EQ(pool.remove_user(page), 1);
  CHECK_EQ(pool.remove_user(page), 0);
  CHECK_EQ(pool.num_free(), 1);
  CHECK(is_logic_error([&] { pool.remove_user(page); }));
  CHECK(is_logic_error([&] { pool.add_user(page); }));
}

TEST(random_operations) {
  int64_t num_known = 0, num_refused = 0, num_replaced = 0;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    World world(seed, pick(random, 1, 40), pick(random, 1, 4));
    for (int i = 0; i < 500; ++i) world.act();
    world.end_all();
    num_known += world.num_known();
    num_refused += world.num_refused();
    num_replaced += world.num_replaced();
  }
  CHECK(num_known > 1000);
  CHECK(num_refused > 1000);
  CHECK(num_replaced > 100);
}

TEST(the_leaf_that_was_used_longest_ago_goes_first) {
  PageCache cache(4, 1);
  const auto compute = [&](const std::vector<int32_t>& tokens) {
    std::vector<int32_t> pages;
    const int32_t num_known = cache.acquire(tokens, 0, &pages);
    cache.publish(tokens, num_known, &pages);
    cache.release(&pages);
    return num_known;
  };
  compute({1, 2});
  compute({1, 3});
  CHECK_EQ(cache.pool().num_free(), 1);
  CHECK_EQ(compute({1, 2, 9}), 2);     // uses 1 and 2 once more
  CHECK_EQ(compute({7}), 0);           // takes the page of 3
  CHECK_EQ(compute({1, 2, 9, 0}), 3);  // takes the page of 7
  CHECK_EQ(compute({7, 0}), 0);        // takes the pages of 0 and 9
  CHECK_EQ(compute({1, 2, 0}), 2);
}

TEST(deep_trees_are_destroyed) {
  PageCache cache(200000, 1);
  std::vector<int32_t> pages;
  const std::vector<int32_t> tokens(200000, 1);
  cache.acquire(tokens, 0, &pages);
  cache.publish(tokens, 0, &pages);
}
