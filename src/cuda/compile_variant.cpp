// SPDX-License-Identifier: Apache-2.0
#include "cuda/compile_variant.h"

#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "common/error.h"
#include "cuda/device.h"
#include "cuda/runtime.h"
#include "variant/gpu_code.h"
#include "variant/registry.h"

namespace flashplan::cuda {
namespace {

struct Loaded {
  std::mutex mutex;
  cudaKernel_t kernel = nullptr;  // one handle for all devices
  std::string name;
};

Status load_code(const GpuCode& code, Loaded* loaded) {
  cudaLibrary_t library = nullptr;
  FLASHPLAN_CUDA_CALL(cudaLibraryLoadData, &library, code.cubin.data(), nullptr, nullptr, 0,
                      nullptr, nullptr, 0);
  cudaKernel_t kernel = nullptr;
  const cudaError_t failed = cudaLibraryGetKernel(&kernel, library, code.kernel.c_str());
  if (failed != cudaSuccess) {
    succeeded(cudaLibraryUnload(library));
    return cuda_error("cudaLibraryGetKernel", failed);
  }
  loaded->kernel = kernel;
  return {};
}

}  // namespace

Status compile_variant(const AttentionOptions& options, const RopeTurns* rope,
                       Kernel* kernel) noexcept try {
  const DeviceGuard guard(options.device.index);
  FLASHPLAN_RETURN_IF_ERROR(guard.status());
  const ApartFromCaptures apart;
  static const Variant::Impl none;
  const Variant::Impl& variant = options.variant.empty() ? none : *options.variant.impl();
  const GpuKernelTraits traits = {.program = *kernel->family->program,
                                  .architecture = kernel->architecture,
                                  .q_dtype = kernel->q_dtype,
                                  .kv_dtype = kernel->kv_dtype,
                                  .o_dtype = options.o_dtype,
                                  .head_dim_qk = kernel->head_dim_qk,
                                  .head_dim_vo = kernel->head_dim_vo,
                                  .softcap = kernel->softcap,
                                  .custom_mask = options.custom_mask,
                                  .batch_invariant = options.batch_invariant,
                                  .few_rows_alone = kernel->geometry == kernel->few_rows_geometry,
                                  .rope = rope};
  std::string key;
  FLASHPLAN_RETURN_IF_ERROR(gpu_code_key(variant, traits, &key));
  Loaded& loaded = Registry<Loaded>::instance().at(key);
  const std::scoped_lock lock(loaded.mutex);
  if (loaded.kernel == nullptr) {
    GpuCode code;
    FLASHPLAN_RETURN_IF_ERROR(make_gpu_code(variant, traits, key, &code));
    loaded.name = kernel->name;
    if (!variant.name.empty()) loaded.name += "_" + variant.name;
    if (rope != nullptr) loaded.name += "_rope";
    Status status = load_code(code, &loaded);
    if (!status.ok() && code.was_cached) {  // the cache may have code for a newer driver
      const GpuCode refused = std::move(code);
      FLASHPLAN_RETURN_IF_ERROR(make_gpu_code(variant, traits, key, &code, &refused));
      status = load_code(code, &loaded);
    }
    FLASHPLAN_RETURN_IF_ERROR(status);
  }
  kernel->name = loaded.name;
  KernelCode& code = kernel->code;
  // Only one kernel is compiled. If keys in two tensors would need another one, the plan does not
  // take such keys.
  const bool takes_key_tails = code.key_tails == code.many_rows_first;
  code.few_rows_first = code.many_rows_first = reinterpret_cast<const void*>(loaded.kernel);
  code.key_tails = takes_key_tails ? code.many_rows_first : nullptr;
  return {};
} catch (const std::exception&) {
  return error(StatusCode::kOutOfMemory, "variant: expected memory to compile it, got none");
}

}  // namespace flashplan::cuda
