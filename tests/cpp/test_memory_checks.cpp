// SPDX-License-Identifier: Apache-2.0
// check_memory() and check_apart() against the set of all addresses, and workspace claims.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "api/workspace_claim.h"
#include "check.h"
#include "checks/memory_checks.h"
#include "random_batch.h"

#if defined(__unix__)
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace flashplan::test {
namespace {

alignas(256) std::byte memory[4096];

TensorView view_of(DType dtype, int64_t offset, const std::vector<int64_t>& shape,
                   const std::vector<int64_t>& stride) {
  TensorView view;
  view.data = memory + offset;
  view.dtype = dtype;
  view.rank = static_cast<int32_t>(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    view.shape[d] = shape[d];
    view.stride[d] = stride[d];
  }
  return view;
}

TensorView random_view(Random& random) {
  const DType dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kFloat8E4M3});
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;
  const int32_t rank = random.between(1, 4);
  for (int32_t d = 0; d < rank; ++d) {
    shape.push_back(random.one_in(9) ? 0 : random.between(1, 4));
    stride.push_back(random.one_in(3) ? random.between(0, 3) : random.between(4, 40));
  }
  if (random.one_in(2)) stride.back() = 1;
  return view_of(dtype, 256 + item_size(dtype) * random.between(0, 40), shape, stride);
}

/// First bytes of all elements, with repetitions.
std::vector<uintptr_t> addresses(const TensorView& view) {
  std::vector<uintptr_t> all = {reinterpret_cast<uintptr_t>(view.data)};
  for (int32_t d = 0; d < view.rank; ++d) {
    std::vector<uintptr_t> next;
    for (const uintptr_t address : all) {
      for (int64_t i = 0; i < view.shape[d]; ++i) {
        next.push_back(address +
                       static_cast<uintptr_t>(i * view.stride[d] * item_size(view.dtype)));
      }
    }
    all = next;
  }
  return all;
}

std::set<uintptr_t> bytes_of(const TensorView& view) {
  std::set<uintptr_t> bytes;
  for (const uintptr_t address : addresses(view)) {
    for (int64_t i = 0; i < item_size(view.dtype); ++i) {
      bytes.insert(address + static_cast<uintptr_t>(i));
    }
  }
  return bytes;
}

TEST(strides_of_views_without_elements_may_be_anything) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  const TensorView empty = view_of(DType::kFloat32, 256, {0, 3}, {kLeast, kLeast});
  const TensorView some = view_of(DType::kFloat32, 256, {4}, {1});
  CHECK(check_memory({"empty", empty, true}).ok());
  CHECK(check_apart({"some", some, true}, {"empty", empty}).ok());
  CHECK(check_apart({"empty", empty, true}, {"some", some}).ok());
}

TEST(random_views_that_share_memory_are_refused) {
  Random random(1);
  int accepted = 0;
  int refused = 0;
  int self_refused = 0;
  int plain = 0;
  for (int i = 0; i < 20000; ++i) {
    const TensorView a = random_view(random);
    const TensorView b = random_view(random);
    const std::set<uintptr_t> bytes_a = bytes_of(a);
    const std::set<uintptr_t> bytes_b = bytes_of(b);
    const bool self_overlaps =
        bytes_a.size() != addresses(a).size() * static_cast<size_t>(item_size(a.dtype));
    if (check_memory({"a", a, true}).ok()) {
      CHECK(!self_overlaps);
    } else {
      ++self_refused;
    }
    if (is_plain({"a", a, true})) {
      CHECK(check_memory({"a", a, true}).ok());
      CHECK(!bytes_a.empty());
      CHECK(a.stride[a.rank - 1] == 1 || a.shape[a.rank - 1] == 1);
      ++plain;
    }
    std::set<uintptr_t> all = bytes_a;
    all.insert(bytes_b.begin(), bytes_b.end());
    const bool overlap = all.size() != bytes_a.size() + bytes_b.size();
    const bool apart = check_apart({"a", a, true}, {"b", b}).ok();
    if (overlap) CHECK(!apart);
    // Never refused without a common range.
    if (bytes_a.empty() || bytes_b.empty() || *bytes_a.rbegin() < *bytes_b.begin() ||
        *bytes_b.rbegin() < *bytes_a.begin()) {
      CHECK(apart);
    }
    const TensorArgument arguments[] = {{"b", b}, {"a", a, true}};
    CHECK_EQ(check_apart(arguments).ok(), apart);
    ++(apart ? accepted : refused);
  }
  CHECK(accepted > 1000);
  CHECK(refused > 1000);
  CHECK(self_refused > 1000);
  CHECK(plain > 1000);
}

TEST(neighbours_are_apart_and_one_common_byte_is_not) {
  const TensorView a = view_of(DType::kFloat32, 256, {3, 8}, {8, 1});
  const int64_t size = 3 * 8 * 4;
  for (const DType dtype : {DType::kFloat32, DType::kFloat8E5M2}) {
    const int64_t item = item_size(dtype);
    for (const auto& [offset, is_apart] : {std::pair{256 - item, true},
                                           {256, false},
                                           {256 + size - item, false},
                                           {256 + size, true}}) {
      const TensorView b = view_of(dtype, offset, {1}, {1});
      CHECK_EQ(check_apart({"a", a, true}, {"b", b}).ok(), is_apart);
      CHECK_EQ(check_apart({"b", b, true}, {"a", a}).ok(), is_apart);
    }
  }
  const Status status = check_apart({"a", a, true}, {"b", a});
  CHECK_EQ(std::string(status.message), "a: expected memory apart from b, got an overlap");
  CHECK(status.code == StatusCode::kInvalidArgument);
}

// k and v of 3 pages of 4 tokens of 2 heads of 5, with the axis {k, v} at any place.
TEST(halves_of_a_combined_cache_are_apart) {
  const std::vector<int64_t> shape = {3, 4, 2, 5};
  for (size_t axis = 0; axis <= shape.size(); ++axis) {
    std::vector<int64_t> whole = shape;
    whole.insert(whole.begin() + static_cast<int64_t>(axis), 2);
    std::vector<int64_t> stride(whole.size(), 1);
    for (size_t d = whole.size() - 1; d > 0; --d) stride[d - 1] = stride[d] * whole[d];
    const int64_t step = stride[axis];
    stride.erase(stride.begin() + static_cast<int64_t>(axis));
    const TensorView k = view_of(DType::kFloat16, 256, shape, stride);
    const TensorView v = view_of(DType::kFloat16, 256 + 2 * step, shape, stride);
    CHECK(check_apart({"k", k, true}, {"v", v, true}).ok());
    CHECK(check_apart({"v", v, true}, {"k", k, true}).ok());
    CHECK(check_memory({"k", k, true}).ok());
    TensorView wide = k;  // one element too many
    wide.shape[3] += 1;
    if (axis < 4) CHECK(!check_apart({"k", wide, true}, {"v", v, true}).ok());
  }
}

TEST(memory_that_cannot_be) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const auto message = [](const TensorView& view, bool written = false) {
    const bool is_ok = check_memory({"x", view, written}).ok();
    CHECK(is_ok || !is_plain({"x", view, written}));
    return std::string(check_memory({"x", view, written}).message);
  };
  const TensorView good = view_of(DType::kFloat32, 0, {2, 4}, {4, 1});
  CHECK_EQ(message(good, true), "");
  TensorView bad = good;
  bad.shape[1] = -1;
  CHECK_EQ(message(bad), "x: expected sizes >= 0, got -1");
  bad = good;
  bad.data = nullptr;
  CHECK(message(bad).rfind("x: expected a tensor with storage, got a null pointer", 0) == 0);
  bad.shape[0] = 0;
  CHECK_EQ(message(bad), "");
  bad = good;
  bad.data = memory + 2;
  CHECK(message(bad).rfind("x: expected a pointer aligned to 4 bytes, got ", 0) == 0);
  bad = good;
  bad.read_only = true;
  CHECK_EQ(message(bad), "");
  CHECK_EQ(message(bad, true), "x: expected a writable tensor, got a read-only one");
  for (const auto& [size, stride] : {std::pair{kHuge, kHuge},
                                     {kHuge, int64_t{1}},
                                     {2L, kHuge},
                                     {2L, -kHuge},
                                     {kHuge / 4, int64_t{4}}}) {
    bad = good;
    bad.shape[0] = size;
    bad.stride[0] = stride;
    CHECK_EQ(message(bad),
             "x: expected elements within the address space, got strides that leave it");
  }
  for (const int64_t stride : {0, 3, -3}) {
    bad = good;
    bad.stride[0] = stride;
    CHECK_EQ(message(bad), "");
    CHECK_EQ(message(bad, true), "x: expected memory of its own for each element, got stride " +
                                     std::to_string(stride) + " in dim 0");
  }
}

TEST(a_workspace_is_claimed_once) {
  for (int round = 0; round < 2; ++round) {
    const WorkspaceClaim middle(memory + 100, 100);
    CHECK(middle.acquired());
    CHECK(!WorkspaceClaim(memory + 100, 100).acquired());
    CHECK(!WorkspaceClaim(memory + 199, 1).acquired());
    CHECK(!WorkspaceClaim(memory, 101).acquired());
    const WorkspaceClaim before(memory, 100);
    {
      const WorkspaceClaim after(memory + 200, 1);
      CHECK(before.acquired() && after.acquired());
      CHECK(!WorkspaceClaim(memory + 200, 1).acquired());
    }
    CHECK(WorkspaceClaim(memory + 200, 1).acquired());
  }
}

#if defined(__unix__)
TEST(a_forked_child_has_no_claims_of_its_parents_threads) {
  const WorkspaceClaim claim(memory, 100);
  const pid_t child = fork();
  if (child == 0) {
    const bool acquired = WorkspaceClaim(memory, 100).acquired();
    _exit(acquired ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK(!WorkspaceClaim(memory, 100).acquired());
}
#endif

}  // namespace
}  // namespace flashplan::test
