// SPDX-License-Identifier: Apache-2.0
// filtered_probs(), top_k_mask() and the log-probabilities of sample() on CUDA: a cluster of CTAs
// has a row.
#include <cstdint>

#include "ops/cuda/launch.h"
#include "ops/cuda/sample/row_filter.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

template <DType kDType, bool kFromProbs, bool kHeld>
__global__ void __launch_bounds__(kRowThreads, kRowCtasOfSm)
    filter_kernel(const __grid_constant__ RowParams<FilterParams> params) {
  __shared__ SampleShared shared;
  extern __shared__ float4 memory[];
  using Filter = RowFilter<kDType, kFromProbs, kHeld>;
  const int32_t row = row_of_cluster();
  if (params.p.out == nullptr && (params.p.logits_row(row) < 0 || params.p.ids[row] < 0)) {
    Filter::write_no_logprobs(params.p, row);
    return;
  }
  Filter(params.p, params.split, shared, reinterpret_cast<float*>(memory)).run();
}

}  // namespace

Status filter_rows(const FilterParams& p, Device device, Stream stream) noexcept {
  const RowDivision division =
      division_of_row(ctas_that_hold(p.num_rows, p.vocab, device, most_filtering_ctas(device)));
  return with_float(p.dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    constexpr RowKernels<FilterParams> kFromProbs{filter_kernel<kDType, true, true>,
                                                  filter_kernel<kDType, true, false>};
    constexpr RowKernels<FilterParams> kFromLogits{filter_kernel<kDType, false, true>,
                                                   filter_kernel<kDType, false, false>};
    return launch_rows(p.from_probs ? kFromProbs : kFromLogits, p, device, stream, division);
  });
}

Status list_logprobs(const FilterParams& p, Device device, Stream stream) noexcept {
  return filter_rows(p, device, stream);
}

}  // namespace flashplan::cuda
