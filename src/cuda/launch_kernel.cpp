// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch_kernel.h"

#include <cuda_runtime_api.h>

#include "common/error.h"
#include "cuda/device.h"
#include "cuda/launch_grid.h"

namespace flashplan::cuda {

Status prepare(Kernel* kernel, bool is_compiled_in) noexcept {
  for (const void** code : {&kernel->code.few_rows_first, &kernel->code.many_rows_first}) {
    if (is_compiled_in) {
      cudaKernel_t handle = nullptr;
      FLASHPLAN_CUDA_CALL(cudaGetKernel, &handle, *code);
      *code = reinterpret_cast<const void*>(handle);
    }
    cudaFuncAttributes attributes;
    FLASHPLAN_CUDA_CALL(cudaFuncGetAttributes, &attributes, *code);
    if (is_compiled_in && attributes.ptxVersion != kernel->architecture.number) {
      return error(StatusCode::kUnsupported, "device: expected code for sm_%d, got code for sm_%d",
                   kernel->architecture.number, attributes.ptxVersion);
    }
    FLASHPLAN_CUDA_CALL(cudaFuncSetAttribute, *code, cudaFuncAttributeMaxDynamicSharedMemorySize,
                        kernel->geometry.smem_bytes);
  }
  return {};
}

Status launch(const Kernel& kernel, const AttentionParams& params, Stream stream) noexcept {
  const void* const code =
      params.host.has_few_rows ? kernel.code.few_rows_first : kernel.code.many_rows_first;
  const Grid grid = {.ctas = dim3(static_cast<unsigned>(params.schedule.num_ctas)),
                     .threads = dim3(static_cast<unsigned>(kernel.geometry.threads)),
                     .smem_bytes = kernel.geometry.smem_bytes,
                     .pdl = params.host.pdl && kernel.architecture.number >= 90};
  return launch_grid(reinterpret_cast<cudaKernel_t>(const_cast<void*>(code)), grid, stream,
                     const_cast<AttentionParams*>(&params));
}

}  // namespace flashplan::cuda
