// SPDX-License-Identifier: Apache-2.0
// Tensors and checks for the tests of the operators of the C interface.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "c_structs.h"
#include "check.h"
#include "host_tensor.h"

namespace flashplan::test {

inline HostTensor random_tensor(uint64_t seed, DType dtype, std::vector<int64_t> shape) {
  Random random(seed);
  HostTensor tensor(dtype, std::move(shape));
  const TensorView view = tensor.view();
  const auto dim = [&](int d) { return d < view.rank ? view.shape[d] : 1; };
  for (int64_t a = 0; a < dim(0); ++a) {
    for (int64_t b = 0; b < dim(1); ++b) {
      for (int64_t c = 0; c < dim(2); ++c) tensor.set({a, b, c}, random_element(random));
    }
  }
  return tensor;
}

inline HostTensor float_tensor(const std::vector<double>& values) {
  HostTensor tensor(DType::kFloat32, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) tensor.set({static_cast<int64_t>(i)}, values[i]);
  return tensor;
}

inline void check_ok(flashplan_status status, const Message& message) {
  CHECK_EQ(std::string(message.text), "");
  CHECK_EQ(status, FLASHPLAN_OK);
}

}  // namespace flashplan::test
