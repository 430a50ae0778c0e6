// SPDX-License-Identifier: Apache-2.0
// Divisions of the planner: by multiplication, and of numbers beyond 32 bits.
#include "plan/schedule/division.h"

#include <cstdint>

#include "check.h"

namespace flashplan::test {
namespace {

TEST(division_by_multiplication) {
  for (const int32_t divisor : {1, 2, 3, 7, 32, 64, 80, 128, 1000003, INT32_MAX}) {
    const Divisor known = make_divisor(divisor);
    for (int32_t k = 0; k < 1000; ++k) {
      for (const int64_t value : {int64_t{k}, int64_t{k} * divisor, int64_t{k} * divisor + 1,
                                  int64_t{k} * divisor - 1, int64_t{INT32_MAX} - k}) {
        if (value < 0 || value > INT32_MAX) continue;
        const auto x = static_cast<int32_t>(value);
        CHECK_EQ(ceil_divide(x, known), ceil_divide(x, divisor));
      }
    }
  }
}

TEST(division_of_32_bits_and_more) {
  constexpr int64_t kEnd = int64_t{1} << 32;
  for (const int64_t value :
       {int64_t{1}, kEnd - 1, kEnd, kEnd + 1, 5 * kEnd + 7, int64_t{1} << 59}) {
    for (const int64_t divisor : {int64_t{1}, int64_t{3}, kEnd - 1, kEnd, 2 * kEnd + 3}) {
      CHECK_EQ(divide(value, divisor), value / divisor);
    }
  }
}

}  // namespace
}  // namespace flashplan::test
