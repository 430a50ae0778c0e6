// SPDX-License-Identifier: Apache-2.0
// Times the products of a model on the GPU, whose weights are read from memory each time:
//
//   products FOLDER [ROWS...]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <vector>

#include "device.h"
#include "model_config.h"
#include "open_device.h"

namespace {

struct Shape {
  const char* name;
  int64_t n, k;
};

/// Seconds of one product, the mean of many.
double time_of(engine::Device& device, const Shape& shape, int64_t rows) {
  // Enough matrices that none of them is still in the cache of the GPU when it is read again.
  constexpr int64_t kBytes = int64_t{512} << 20;
  constexpr int kRounds = 10;
  const int64_t matrix_bytes = 2 * shape.n * shape.k;
  const int64_t num_matrices = std::max<int64_t>(1, kBytes / matrix_bytes);
  const auto w = device.allocate(static_cast<std::size_t>(num_matrices * matrix_bytes));
  const int64_t padded = device.padded_rows(rows);
  const auto x = device.allocate(static_cast<std::size_t>(2 * padded * shape.k));
  const auto y = device.allocate(static_cast<std::size_t>(2 * padded * shape.n));
  engine::Product product;
  product.x = x.get();
  product.m = rows;
  product.k = shape.k;
  product.n = shape.n;
  product.y = y.get();
  product.y_stride = shape.n;
  product.y_dtype = device.dtype();
  double busy = 0;
  for (int round = 0; round <= kRounds; ++round) {
    if (round == 1) busy = device.times().busy;  // the first one chooses an algorithm
    device.stage(16);
    device.send(y.get(), 16, true);
    for (int64_t i = 0; i < num_matrices; ++i) {
      product.w = static_cast<const std::byte*>(w.get()) + i * matrix_bytes;
      device.multiply(product);
    }
    device.fetch(y.get(), 16);
    device.wait();
  }
  return (device.times().busy - busy) / static_cast<double>(kRounds * num_matrices);
}

void measure(int argc, char** argv) {
  const engine::ModelConfig c = engine::read_model_config(argv[1]);
  std::vector<int64_t> all_rows;
  for (int i = 2; i < argc; ++i) all_rows.push_back(std::atoll(argv[i]));
  if (all_rows.empty()) all_rows = {1, 16, 64, 256, 2048};
  engine::Options options;
  options.device = engine::DeviceType::kCuda;
  const auto device = engine::open_device(options);
  const int64_t q_size = int64_t{c.num_qo_heads} * c.head_dim;
  const int64_t kv_size = int64_t{c.num_kv_heads} * c.head_dim;
  const Shape shapes[] = {{"qkv", q_size + 2 * kv_size, c.hidden},
                          {"o", c.hidden, q_size},
                          {"gate_up", 2 * int64_t{c.ffn}, c.hidden},
                          {"down", c.hidden, c.ffn},
                          {"output", c.vocab, c.hidden}};
  std::printf("rows product      us     TB/s  TFLOP/s\n");
  for (const int64_t rows : all_rows) {
    double step = 0;
    for (const Shape& shape : shapes) {
      const double seconds = time_of(*device, shape, rows);
      const auto size = static_cast<double>(shape.n * shape.k);
      std::printf("%4lld %-8s %8.1f %8.2f %8.1f\n", static_cast<long long>(rows), shape.name,
                  1e6 * seconds, 2e-12 * size / seconds,
                  2e-12 * size * static_cast<double>(rows) / seconds);
      step += seconds * (shape.n == c.vocab ? 1 : c.num_layers);
    }
    std::printf("%4lld all of a step: %.3f ms\n", static_cast<long long>(rows), 1e3 * step);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: products FOLDER [ROWS...]\n");
    return 2;
  }
  try {
    measure(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
