// SPDX-License-Identifier: Apache-2.0
// The CUDA kernel of softmax(), run by an emulator of clusters, against double arithmetic.
#include "cuda_builtins.h"
#include "dynamic_memory.h"
#include "flashplan/sampling.h"
#include "ops/operators.h"
// The library defines this function, too, so the emulated one gets another name.
#define softmax emulated_softmax
#include "ops/cuda/sample/softmax.cu"
#undef softmax

#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "logit_rows.h"

namespace flashplan::test {
namespace {

TEST(softmax_of_hard_rows) {
  for (const int32_t vocab : {1, 7, 5003, 20'008, 40'003, 128'256, 151'936, 200'003, 270'003}) {
    const Rows rows = hard_rows(vocab, 9);
    const int32_t gap = vocab % 2;
    const int64_t stride = (vocab + 3) / 4 * 4 + gap;
    std::vector<float4> in(rows.rows.size() * static_cast<size_t>(stride) / 4 + 1);
    std::vector<float4> out(in.size());
    auto* x = reinterpret_cast<float*>(in.data());
    auto* y = reinterpret_cast<float*>(out.data());
    for (size_t r = 0; r < rows.rows.size(); ++r) {
      std::copy(rows.rows[r].begin(), rows.rows[r].end(), x + r * static_cast<size_t>(stride));
    }
    const bool in_place = vocab % 8 == 3;
    SoftmaxParams p;
    p.logits = reinterpret_cast<const char*>(x);
    p.row_stride = p.out_stride = stride * 4;
    p.out = reinterpret_cast<char*>(in_place ? x : y);
    p.num_rows = static_cast<int32_t>(rows.rows.size());
    p.vocab = vocab;
    p.temperature.all = 0.8F;
    CHECK(cuda::emulated_softmax(p, Device{DeviceType::kCuda, 0}, nullptr).ok());
    for (size_t r = 0; r < rows.rows.size(); ++r) {
      double largest = -kInfinity;
      for (const float v : rows.rows[r]) largest = std::max<double>(largest, v);
      double sum = 0;
      for (const float v : rows.rows[r]) sum += std::exp((v - largest) / 0.8F);
      bool is_right = true;
      for (size_t i = 0; i < rows.rows[r].size(); ++i) {
        const double wanted = std::exp((rows.rows[r][i] - largest) / 0.8F) / sum;
        const double got = (in_place ? x : y)[r * static_cast<size_t>(stride) + i];
        is_right = is_right && (std::isnan(sum) ? std::isnan(got)
                                                : std::fabs(got - wanted) <= 3e-5 * wanted + 2e-38);
      }
      if (!is_right)
        check::fail(__FILE__, __LINE__, rows.names[r] + " of " + std::to_string(vocab));
    }
  }
}

}  // namespace
}  // namespace flashplan::test
