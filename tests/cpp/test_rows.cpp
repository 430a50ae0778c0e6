// SPDX-License-Identifier: Apache-2.0
// Norms and activations from C++: against double arithmetic on random shapes, and what they refuse.
#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "flashplan/flashplan.h"
#include "host_tensor.h"
#include "random_batch.h"
#include "refusal.h"

namespace flashplan::test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

HostTensor random_tensor(Random& random, DType dtype, std::vector<int64_t> shape, int64_t pad = 0) {
  HostTensor tensor(dtype, std::move(shape), pad);
  const int64_t rows = tensor.view().rank > 1 ? tensor.size(0) : 1;
  const int64_t size = tensor.size(tensor.view().rank - 1);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < size; ++i) {
      tensor.set(tensor.view().rank > 1 ? Index{r, i} : Index{i}, random_element(random));
    }
  }
  return tensor;
}

void check_close(double actual, double exact, DType dtype) {
  const double allowed = (1.02 * rounding_error(dtype) + 1e-5) * std::fabs(exact) + 1e-5;
  CHECK(std::fabs(actual - exact) <= allowed);
}

TEST(norms_and_activations_are_right) {
  Random random(7);
  for (int round = 0; round < 60; ++round) {
    const DType dtype = kDTypes[round % 3];
    const int64_t rows = random.between(1, 40);
    const int64_t size = random.between(1, 400);
    const HostTensor x = random_tensor(random, dtype, {rows, 2 * size}, random.pick({0, 3}));
    const HostTensor weight = random_tensor(random, dtype, {2 * size});
    HostTensor rms(dtype, {rows, 2 * size}, 5);
    HostTensor layer(dtype, {rows, 2 * size});
    HostTensor gated(dtype, {rows, size});
    CHECK(rmsnorm(x.view(), weight.view(), rms.view(), {1e-5F, true}).ok());
    CHECK(layernorm(x.view(), weight.view(), weight.view(), layer.view()).ok());
    CHECK(gated_activation(Activation::kSilu, x.view(), gated.view(), 0.5F).ok());
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0;
      double squares = 0;
      for (int64_t i = 0; i < 2 * size; ++i) {
        sum += x.get({r, i});
        squares += x.get({r, i}) * x.get({r, i});
      }
      const auto n = static_cast<double>(2 * size);
      const double mean = sum / n;
      double variance = 0;
      for (int64_t i = 0; i < 2 * size; ++i) variance += std::pow(x.get({r, i}) - mean, 2) / n;
      for (int64_t i = 0; i < 2 * size; ++i) {
        const double w = weight.get({i});
        check_close(rms.get({r, i}), x.get({r, i}) / std::sqrt(squares / n + 1e-5) * (1 + w),
                    dtype);
        check_close(layer.get({r, i}), (x.get({r, i}) - mean) / std::sqrt(variance + 1e-5) * w + w,
                    dtype);
      }
      for (int64_t i = 0; i < size; ++i) {
        const double gate = x.get({r, i});
        check_close(gated.get({r, i}), gate / (1 + std::exp(-gate)) * x.get({r, size + i}) / 0.5,
                    dtype);
      }
    }
  }
}

TEST(in_place) {
  Random random(8);
  const HostTensor x = random_tensor(random, DType::kFloat16, {9, 70});
  const HostTensor weight = random_tensor(random, DType::kFloat16, {70});
  HostTensor out(DType::kFloat16, {9, 70});
  CHECK(rmsnorm(x.view(), weight.view(), out.view()).ok());
  HostTensor same = x;
  CHECK(rmsnorm(same.view(), weight.view(), same.view()).ok());
  CHECK(same.bytes() == out.bytes());
}

TEST(what_is_refused) {
  Random random(9);
  const auto value = StatusCode::kInvalidArgument;
  const auto type = StatusCode::kInvalidType;
  const HostTensor x = random_tensor(random, DType::kFloat32, {4, 8});
  const HostTensor weight = random_tensor(random, DType::kFloat32, {8});
  HostTensor out(DType::kFloat32, {4, 8});
  HostTensor half_out(DType::kFloat32, {4, 4});
  const std::vector<std::byte> before = out.bytes();
  const TensorView none;
  TensorView device = x.view();
  device.device = {DeviceType::kCuda, -1};
  TensorView narrow = x.view();
  narrow.dtype = DType::kFloat8E4M3;
  TensorView later = out.view();
  later.shape[0] = 3;
  later.data = static_cast<float*>(later.data) + 8;
  TensorView earlier = out.view();
  earlier.shape[0] = 3;

  check_refused(rmsnorm(none, weight.view(), out.view()), value, "x");
  check_refused(rmsnorm(device, weight.view(), out.view()), type, "x");
  check_refused(rmsnorm(narrow, weight.view(), out.view()), type, "x");
  check_refused(rmsnorm(x.view(), half_out.view(), out.view()), value, "weight");
  check_refused(rmsnorm(x.view(), weight.view(), none), value, "out");
  check_refused(rmsnorm(earlier, weight.view(), later), value, "out");
  check_refused(rmsnorm(x.view(), weight.view(), out.view(), {NAN, false}), value, "eps");
  check_refused(layernorm(x.view(), weight.view(), half_out.view(), out.view()), value, "bias");
  check_refused(layernorm(x.view(), weight.view(), none, out.view(), {-1.0F}), value, "eps");
  check_refused(add_rmsnorm(out.view(), out.view(), weight.view()), value, "x");
  check_refused(add_rmsnorm(out.view(), half_out.view(), weight.view()), value, "residual");
  check_refused(gated_activation(static_cast<Activation>(3), x.view(), half_out.view()), value,
                "activation");
  check_refused(gated_activation(Activation::kGelu, x.view(), out.view()), value, "out");
  check_refused(gated_activation(Activation::kGelu, x.view(), half_out.view(), -1.0F), value,
                "scale");
  CHECK(out.bytes() == before);
}

}  // namespace
}  // namespace flashplan::test
