// SPDX-License-Identifier: Apache-2.0
// The operators on rows: threads share the rows, and call the kernels for this machine's
// instruction set.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#include "ops/cpu/kernels.h"
#include "ops/operators.h"

namespace flashplan::cpu {
namespace {

const OperatorKernels& kernels() noexcept {
  static const OperatorKernels& widest = [&]() -> const OperatorKernels& {
    switch (widest_isa()) {
#if defined(FLASHPLAN_HAVE_AVX512)
      case Isa::kAvx512: return avx512::operator_kernels();
#endif
#if defined(FLASHPLAN_HAVE_AVX2)
      case Isa::kAvx2: return avx2::operator_kernels();
#endif
      default: return baseline::operator_kernels();
    }
  }();
  return widest;
}

/// With fewer elements, each of which takes about 1 ns, waking a second thread costs more than it
/// brings.
constexpr int64_t kLeastElementsToShare = 32 * 1024;

/// Calls a kernel for all rows, in ranges of rows that threads take as they become free.
/// `elements_of_row`: the time that a row takes, as a number of elements that take 1 ns each.
template <class Params>
void for_all_rows(void (*kernel)(const Params&, int32_t, int32_t) noexcept, const Params& params,
                  int64_t elements_of_row) noexcept {
  struct Job {
    void (*kernel)(const Params&, int32_t, int32_t) noexcept;
    const Params& params;
    int64_t num_parts;
  };
  const int64_t rows = params.num_rows;
  const int64_t wanted = rows * elements_of_row / kLeastElementsToShare;
  const int64_t most = int64_t{4} * ThreadPool::num_threads();
  Job job{kernel, params, std::clamp<int64_t>(wanted, 1, std::min(rows, most))};
  const auto take = [](void* context, int32_t part, int32_t /*worker*/) noexcept {
    const Job& all = *static_cast<const Job*>(context);
    const int64_t num_rows = all.params.num_rows;
    all.kernel(all.params, static_cast<int32_t>(num_rows * part / all.num_parts),
               static_cast<int32_t>(num_rows * (part + 1) / all.num_parts));
  };
  const auto num_parts = static_cast<int32_t>(job.num_parts);
  ThreadPool::run(take, &job, num_parts, num_parts);
}

void copy_rows(const GatherParams& params, int32_t begin, int32_t end) noexcept {
  for (int32_t row = begin; row < end; ++row) {
    std::memcpy(params.out + row * params.out_stride,
                params.x + params.index(row) * params.x_stride,
                static_cast<std::size_t>(params.row_bytes));
  }
}

/// The number of elements of k and v in a token.
int64_t elements_of_token(const AppendParams& params) noexcept {
  int64_t elements = 0;
  for (const AppendSide& side : params.sides) elements += int64_t{side.num_heads} * side.head_dim;
  return elements;
}

}  // namespace

void norm(const NormParams& params) noexcept {
  for_all_rows(kernels().norm, params, params.row_size);
}

void gated_activation(const ActivationParams& params) noexcept {
  for_all_rows(kernels().gated_activation, params, 4 * int64_t{params.row_size});
}

void gather_rows(const GatherParams& params) noexcept {
  for_all_rows(copy_rows, params, params.row_bytes / 16);
}

void apply_rope(const RopeParams& params) noexcept {
  const int64_t num_heads = int64_t{params.sides[0].num_heads} + params.sides[1].num_heads;
  for_all_rows(kernels().rope, params, (num_heads + 2) * params.head_dim);
}

void quantize_fp8(const QuantizeParams& params) noexcept {
  const int64_t elements = int64_t{params.heads.num_heads} * params.head_dim;
  float* const scale_end = params.scale + params.num_scales;
  switch (params.source) {
    case ScaleSource::kValues:
      std::fill(params.scale, scale_end, 0.0F);
      if (params.num_rows > 0) for_all_rows(kernels().raise_scales, params, elements / 2);
      std::replace(params.scale, scale_end, 0.0F, 1.0F);
      break;
    case ScaleSource::kNumber: std::fill(params.scale, scale_end, params.number); break;
    case ScaleSource::kTensor: break;
  }
  if (params.num_rows > 0) for_all_rows(kernels().quantize, params, elements);
}

void append_paged_kv(const AppendParams& params) noexcept {
  for_all_rows(kernels().append, params, elements_of_token(params) / 4);
}

void rope_append_paged_kv(const RopeAppendParams& params) noexcept {
  const int64_t of_q = int64_t{params.rope.sides[0].num_heads} + 2;
  for_all_rows(kernels().rope_append, params,
               of_q * params.rope.head_dim + elements_of_token(params.append));
}

void append_mla(const MlaAppendParams& params) noexcept {
  const int64_t of_q = int64_t{params.rope.sides[0].num_heads} * params.rope.head_dim;
  for_all_rows(kernels().append_mla, params,
               of_q + params.parts[0].num_dims + params.parts[1].num_dims);
}

void gather_mla(const MlaGatherParams& params) noexcept {
  for_all_rows(kernels().gather_mla, params, params.parts[0].num_dims + params.parts[1].num_dims);
}

void softmax(const SoftmaxParams& params) noexcept {
  for_all_rows(kernels().softmax, params, 4 * int64_t{params.vocab});
}

}  // namespace flashplan::cpu
