// SPDX-License-Identifier: Apache-2.0
// gather_rows() on CUDA: a thread copies one word, of 16 bytes or of one element.
#include <algorithm>
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

constexpr int kThreads = 256;

/// CTAs lie along rows in x and along the words of a row in y. Inside a CTA, threads lie along
/// words in x and along rows in y.
template <class Word>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  const auto word = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  const auto row = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  if (row >= p.num_rows || word >= p.row_bytes / static_cast<int64_t>(sizeof(Word))) return;
  const int64_t from = p.index(row);
  Word value{};
  if (p.is_inside(from)) {
    value = __ldg(reinterpret_cast<const Word*>(p.x + from * p.x_stride) + word);
  }
  reinterpret_cast<Word*>(p.out + row * p.out_stride)[word] = value;
}

template <class Word>
Status run(const GatherParams& p, Device device, Stream stream) {
  const int64_t num_words = p.row_bytes / static_cast<int64_t>(sizeof(Word));
  const auto width = static_cast<int>(std::min<int64_t>((num_words + 31) / 32 * 32, kThreads));
  const int rows = kThreads / width;
  constexpr int64_t kMostCtas = 65535;  // CUDA's limit of CTAs along y
  const int64_t ctas = (num_words + width - 1) / width;
  if (ctas > kMostCtas) {
    return error(StatusCode::kUnsupported, "x: expected rows of at most %lld words, got %lld",
                 static_cast<long long>(kMostCtas * width), static_cast<long long>(num_words));
  }
  const Grid grid{.ctas = dim3(static_cast<unsigned>((p.num_rows + rows - 1) / rows),
                               static_cast<unsigned>(ctas)),
                  .threads = dim3(static_cast<unsigned>(width), static_cast<unsigned>(rows))};
  return launch(gather_kernel<Word>, grid, device, stream, p);
}

}  // namespace

Status gather_rows(const GatherParams& p, Device device, Stream stream) noexcept {
  if (p.row_bytes % 16 == 0 && is_aligned(p.x, 16, p.x_stride) &&
      is_aligned(p.out, 16, p.out_stride)) {
    return run<uint4>(p, device, stream);
  }
  switch (p.item_bytes) {
    case 1: return run<uint8_t>(p, device, stream);
    case 2: return run<uint16_t>(p, device, stream);
    case 4: return run<uint32_t>(p, device, stream);
    default: return run<uint64_t>(p, device, stream);
  }
}

}  // namespace flashplan::cuda
