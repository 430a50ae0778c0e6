// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch_kernel.h"

#include "common/error.h"
#include "cuda/runtime.h"

namespace flashplan::cuda {

Status prepare(const Kernel& kernel, bool is_compiled_in) noexcept {
  for (const void* code :
       {kernel.code.few_rows_first, kernel.code.many_rows_first, kernel.code.key_tails}) {
    if (code == nullptr) continue;  // the kernel has no key_tails
    cudaFuncAttributes attributes;
    FLASHPLAN_CUDA_CALL(cudaFuncGetAttributes, &attributes, code);
    if (is_compiled_in && attributes.ptxVersion != kernel.architecture.number) {
      return error(StatusCode::kUnsupported, "device: expected code for sm_%d, got code for sm_%d",
                   kernel.architecture.number, attributes.ptxVersion);
    }
    FLASHPLAN_CUDA_CALL(cudaFuncSetAttribute, code, cudaFuncAttributeMaxDynamicSharedMemorySize,
                        kernel.geometry.smem_bytes);
  }
  return {};
}

Status launch(const Kernel& kernel, const AttentionParams& params, Stream stream) noexcept {
  const void* const code = params.tensors.has_key_tail ? kernel.code.key_tails
                           : params.host.has_few_rows  ? kernel.code.few_rows_first
                                                       : kernel.code.many_rows_first;
  void* arguments[] = {const_cast<AttentionParams*>(&params)};
  cudaLaunchAttribute pdl = {};
  pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(params.schedule.num_ctas * kernel.geometry.ctas_of_queue));
  config.blockDim = dim3(static_cast<unsigned>(kernel.geometry.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(kernel.geometry.smem_bytes);
  config.stream = stream;
  config.attrs = &pdl;
  config.numAttrs = params.host.pdl && kernel.architecture.number >= 90 ? 1 : 0;
  FLASHPLAN_CUDA_CALL(cudaLaunchKernelExC, &config, code, arguments);
  return {};
}

}  // namespace flashplan::cuda
