// SPDX-License-Identifier: Apache-2.0
// What run() finds out about tensors besides whether they are right.
#include <cstddef>
#include <cstdint>
#include <string>

#include "check.h"
#include "checks/tensor_checks.h"

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

TEST(contiguous_views) {
  float memory[24];
  const TensorView view = contiguous(memory, DType::kFloat32, {}, {2, 3, 4});
  CHECK(view.data == memory && view.rank == 3 && !view.read_only);
  const int64_t strides[] = {12, 4, 1};
  for (int32_t d = 0; d < 3; ++d) {
    CHECK_EQ(view.shape[d], d + 2);
    CHECK_EQ(view.stride[d], strides[d]);
  }
  const float* constant = memory;
  CHECK(contiguous(constant, DType::kFloat32, {}, {24}).read_only);
  CHECK_EQ(contiguous(memory, DType::kFloat32, {}, {1, 1, 1, 1, 1}).rank, 5);
  CHECK(contiguous(memory, DType::kFloat32, {}, {}).empty());
  const int64_t most = INT64_MAX;
  CHECK_EQ(contiguous(memory, DType::kFloat32, {}, {1, most, most}).stride[1], most);
}

TEST(names_of_status_codes) {
  CHECK_EQ(std::string(to_string(StatusCode::kOk)), "kOk");
  CHECK_EQ(std::string(to_string(StatusCode::kCudaError)), "kCudaError");
  CHECK_EQ(std::string(to_string(static_cast<StatusCode>(99))), "unknown");
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
