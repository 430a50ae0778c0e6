// SPDX-License-Identifier: Apache-2.0
// What run() finds out about tensors besides whether they are right.
#include <cstddef>
#include <cstdint>
#include <string>

#include "api/tensor_checks.h"
#include "check.h"

namespace flashplan::test {
namespace {

TEST(rows_of_multiples_of_16_bytes) {
  alignas(16) std::byte memory[32];
  TensorView view{memory, DType::kBFloat16, {}, 3, {2, 3, 64}, {192, 64, 1}};
  CHECK(is_vectorized(view));
  view.data = memory + 8;
  CHECK(!is_vectorized(view));
  view.data = memory;
  view.stride[0] = 196;
  CHECK(!is_vectorized(view));
  view.stride[0] = 200;
  CHECK(is_vectorized(view));
  view.shape[2] = 60;
  CHECK(!is_vectorized(view));
  view.dtype = DType::kFloat32;
  CHECK(is_vectorized(view));
  view.dtype = DType::kFloat8E4M3;
  CHECK(!is_vectorized(view));
}

// Frameworks export anything there.
TEST(strides_of_single_elements_do_not_matter) {
  alignas(16) std::byte memory[32];
  TensorView pages{memory, DType::kFloat16, {}, 4, {1, 1, 1, 128}, {1, 3, 5, 1}};
  CHECK(is_vectorized(pages));
  for (int32_t d = 0; d < 3; ++d) {
    pages.shape[d] = 2;
    CHECK(!is_vectorized(pages));
    pages.shape[d] = 1;
  }
  const TensorView nothing{nullptr, DType::kFloat16, {}, 3, {0, 8, 128}, {1, 128, 1}};
  CHECK(is_vectorized(nothing));
}

TEST(columns_of_a_block_table) {
  TensorView table{nullptr, DType::kInt32, {DeviceType::kCuda, 0}, 2, {4, 5}, {5, 1}};
  CHECK(check_columns(table, 2, 80, 16).ok());
  CHECK(check_columns(table, 2, 0, 16).ok());
  CHECK_EQ(std::string(check_columns(table, 2, 81, 16).message),
           "block_table: expected >= 6 columns for kv_lens[2] = 81, got 5");
  CHECK_EQ(std::string(check_columns(table, 0, INT32_MAX, 1).message),
           "block_table: expected >= 2147483647 columns for kv_lens[0] = 2147483647, got 5");
}

}  // namespace
}  // namespace flashplan::test
