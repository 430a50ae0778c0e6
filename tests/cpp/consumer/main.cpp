// SPDX-License-Identifier: Apache-2.0
// Two requests over ragged keys, one head: small enough to check against a plain loop.
#include <flashplan/flashplan.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

namespace fp = flashplan;

namespace {

constexpr int kHeadDim = 4;

fp::TensorView matrix(std::vector<float>& values, int64_t rows) {
  return fp::contiguous(values.data(), fp::DType::kFloat32, fp::Device{}, {rows, 1, kHeadDim});
}

std::vector<float> numbers(int64_t rows, float seed) {
  std::vector<float> values(static_cast<std::size_t>(rows * kHeadDim));
  for (float& value : values) value = std::sin(seed += 1.7F);
  return values;
}

// Attention of one query over `kv_len` keys, in double.
void attend(const float* q, const float* k, const float* v, int kv_len, double* o) {
  double sum = 0.0;
  for (int d = 0; d < kHeadDim; ++d) o[d] = 0.0;
  for (int j = 0; j < kv_len; ++j) {
    double logit = 0.0;
    for (int d = 0; d < kHeadDim; ++d) logit += double{q[d]} * double{k[j * kHeadDim + d]};
    const double weight = std::exp(logit / std::sqrt(double{kHeadDim}));
    sum += weight;
    for (int d = 0; d < kHeadDim; ++d) o[d] += weight * double{v[j * kHeadDim + d]};
  }
  for (int d = 0; d < kHeadDim; ++d) o[d] /= sum;
}

int fail(const char* what, const fp::Status& status) {
  std::printf("%s failed, %s: %s\n", what, fp::to_string(status.code), status.message);
  return 1;
}

}  // namespace

int main() {
  const std::string built = std::to_string(FLASHPLAN_VERSION_MAJOR) + "." +
                            std::to_string(FLASHPLAN_VERSION_MINOR) + "." +
                            std::to_string(FLASHPLAN_VERSION_PATCH);
  if (fp::version() != built) {
    std::printf("headers are %s, the library is %s\n", built.c_str(), fp::version());
    return 1;
  }

  fp::AttentionOptions options;
  options.num_qo_heads = 1;
  options.num_kv_heads = 1;
  options.head_dim_qk = kHeadDim;
  options.head_dim_vo = kHeadDim;
  options.q_dtype = options.kv_dtype = options.o_dtype = fp::DType::kFloat32;
  options.max_batch_size = 2;
  options.max_qo_tokens = 2;

  fp::Plan plan;
  if (fp::Status s = fp::Plan::create(options, &plan); !s.ok()) return fail("create", s);

  const int32_t qo_indptr[] = {0, 1, 2};
  const int32_t kv_lens[] = {3, 5};
  fp::Batch batch;
  batch.qo_indptr = qo_indptr;
  batch.kv_lens = kv_lens;
  batch.batch_size = 2;
  if (fp::Status s = plan.plan(batch); !s.ok()) return fail("plan", s);

  std::vector<float> q = numbers(2, 1.0F), k = numbers(8, 2.0F), v = numbers(8, 3.0F);
  std::vector<float> o(2 * kHeadDim);
  struct alignas(256) Block {
    unsigned char bytes[256];
  };
  std::vector<Block> workspace(plan.workspace_bytes() / sizeof(Block) + 1);

  fp::AttentionTensors tensors;
  tensors.q = matrix(q, 2);
  tensors.k = matrix(k, 8);
  tensors.v = matrix(v, 8);
  tensors.o = matrix(o, 2);
  tensors.workspace = workspace.data();
  tensors.workspace_bytes = workspace.size() * sizeof(Block);
  if (fp::Status s = plan.run(tensors); !s.ok()) return fail("run", s);

  for (int r = 0, row = 0; r < 2; row += kv_lens[r++]) {
    double expected[kHeadDim];
    attend(&q[r * kHeadDim], &k[row * kHeadDim], &v[row * kHeadDim], kv_lens[r], expected);
    for (int d = 0; d < kHeadDim; ++d) {
      const double got = o[r * kHeadDim + d];
      if (std::abs(got - expected[d]) > 1e-5) {
        std::printf("o[%d][%d]: expected %g, got %g\n", r, d, expected[d], got);
        return 1;
      }
    }
  }

  // A bad length comes back as a status, not as an exception.
  const int32_t bad_lens[] = {3, -1};
  batch.kv_lens = bad_lens;
  if (plan.plan(batch).code != fp::StatusCode::kInvalidArgument) {
    std::printf("plan() took a negative length\n");
    return 1;
  }
  std::printf("flashplan %s: %s\n", fp::version(), plan.kernel_name());
  return 0;
}
