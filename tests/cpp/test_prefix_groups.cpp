// SPDX-License-Identifier: Apache-2.0
// Groups of requests that share a prefix: how they are found and checked, and how many keys they
// save.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "allocations.h"
#include "check.h"
#include "flashplan/prefixes.h"
#include "plan/schedule/prefix_tree.h"
#include "random_batch.h"

namespace flashplan::test {
namespace {

TEST(keys_that_prefixes_save) {
  HostBatch batch;
  for (int r = 0; r < 6; ++r) batch.add(1, 1000);
  batch.shared_prefixes = {0, 5, 100, 0, 2, 300, 2, 3, 50, 2, 2, 400};
  PrefixGroups groups;
  groups.reserve(6);
  CHECK(groups.read(batch.view()).ok());
  CHECK_EQ(groups.num_shared_keys(), 4 * 100 + 1 * 200 + 1 * 300);
  batch.shared_prefixes.clear();
  CHECK(groups.read(batch.view()).ok());
  CHECK_EQ(groups.num_shared_keys(), 0);
}

TEST(prefixes_are_found_without_allocating) {
  const HostBatch batch = decodes(4, 63, 1);
  const std::vector<int32_t> table = {1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 5, 7, 8, 2, 3, 4};
  const HostPageTable pages = {contiguous(table.data(), DType::kInt32, {}, {4, 4}), {}, {}};
  std::vector<int32_t> groups(9, -1);
  int32_t count = -1;
  const int64_t before = num_allocations;
  CHECK(find_shared_prefixes(batch.view(), 16, pages, groups.data(), &count).ok());
  CHECK_EQ(before, num_allocations);
  CHECK_EQ(count, 2);
  CHECK((groups == std::vector<int32_t>{0, 3, 32, 1, 2, 48, groups[6], groups[7], groups[8]}));

  // Refusals leave what is written to as it is.
  for (const int32_t page_size : {0, 8}) {
    std::fill(groups.begin(), groups.end(), -1);
    count = -1;
    CHECK(!find_shared_prefixes(batch.view(), page_size, pages, groups.data(), &count).ok());
    CHECK_EQ(count, -1);
    CHECK_EQ(*std::max_element(groups.begin(), groups.end()), -1);
  }
  CHECK(!find_shared_prefixes(batch.view(), 16, pages, nullptr, &count).ok());
  CHECK(!find_shared_prefixes(batch.view(), 16, pages, groups.data(), nullptr).ok());
  CHECK(!find_shared_prefixes({}, 16, pages, groups.data(), &count).ok());
  CHECK(!find_shared_prefixes({batch.qo_indptr.data(), batch.kv_lens.data(), nullptr, -1}, 16,
                              pages, groups.data(), &count)
             .ok());
}

/// The refusal of `rows` for three decodes of 100, 200 and 300 keys and a prompt of 50 of 50.
std::string refusal(const std::vector<int32_t>& rows) {
  HostBatch batch;
  for (const int32_t kv_len : {100, 200, 300}) batch.add(1, kv_len);
  batch.add(50, 50);
  batch.shared_prefixes = rows;
  PrefixGroups groups;
  groups.reserve(4);
  const Status status = groups.read(batch.view());
  return status.ok() ? "" : status.message;
}

TEST(groups_are_checked) {
  CHECK_EMPTY(refusal({}));
  CHECK_EMPTY(refusal({0, 3, 99, 1, 2, 199}));
  CHECK_EMPTY(refusal({1, 2, 199, 0, 3, 99, 0, 3, 0, 3, 1, 0, 0, 4, 0}));
  CHECK_EQ(refusal({-1, 2, 3}), "shared_prefixes[0]: expected a first request of 0 to 3, got -1");
  CHECK_EQ(refusal({0, 1, 3, 4, 1, 3}),
           "shared_prefixes[1]: expected a first request of 0 to 3, got 4");
  CHECK_EQ(refusal({0, 0, 3}),
           "shared_prefixes[0]: expected 1 to 4 requests from request 0 on, got 0");
  CHECK_EQ(refusal({2, 3, 3}),
           "shared_prefixes[0]: expected 1 to 2 requests from request 2 on, got 3");
  CHECK_EQ(refusal({2, 2147483647, 3}),
           "shared_prefixes[0]: expected 1 to 2 requests from request 2 on, got 2147483647");
  CHECK_EQ(refusal({0, 2, -3}), "shared_prefixes[0]: expected >= 0 tokens, got -3");
  CHECK_EQ(refusal({1, 2, 9, 0, 2, 9}),
           "shared_prefixes[0]: expected to end at request 1 at the latest, inside the group "
           "around it, got requests 1 to 2");
  CHECK_EQ(refusal({0, 2, 100}),
           "shared_prefixes[0]: expected <= 99 tokens (kv_len - qo_len of request 0), got 100");
  CHECK_EQ(refusal({0, 2, 9, 2, 2, 1}),
           "shared_prefixes[1]: expected <= 0 tokens (kv_len - qo_len of request 3), got 1");
  CHECK_EQ(refusal(std::vector<int32_t>(27, 0)),
           "shared_prefixes: expected 0 to 8 rows (2 * max_batch_size), got 9");
}

}  // namespace
}  // namespace flashplan::test
