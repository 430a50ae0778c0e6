// SPDX-License-Identifier: Apache-2.0
// Compiles users' variants and rotations for a GPU. It needs neither a GPU nor a build with CUDA.
#pragma once

#include <cstdint>
#include <string>

#include "abi/architecture.h"
#include "abi/rope_turns.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "variant/variant_impl.h"

namespace flashplan {

/// The code of a kernel family that is compiled at run time.
struct DeviceProgram {
  const char* header = nullptr;
  const char* kernel = nullptr;  // a template of namespace flashplan::device
};
inline constexpr DeviceProgram kSm80Program = {"kernels/device/sm80/attention.h",
                                               "attention_kernel"};
inline constexpr DeviceProgram kSm90Program = {"kernels/device/sm90/attention.h",
                                               "sm90_attention_kernel"};

/// The choices that a kernel is compiled for.
struct GpuKernelTraits {
  DeviceProgram program;
  Architecture architecture;
  DType q_dtype = DType::kFloat16;
  DType kv_dtype = DType::kFloat16;
  DType o_dtype = DType::kFloat16;
  int32_t head_dim_qk = 0;
  int32_t head_dim_vo = 0;
  bool softcap = false;
  bool custom_mask = false;
  bool batch_invariant = false;
  bool few_rows_alone = false;      // sm80: only the code for work tiles of few rows
  const RopeTurns* rope = nullptr;  // rotation of queries and keys; null: none
};

struct GpuCode {
  std::string cubin;
  std::string kernel;  // name of the kernel in the cubin
  bool was_cached = false;
};

/// A hash of everything that the code of a variant depends on.
///   kUnsupported  there is no NVRTC, whose version is part of the hash
Status gpu_code_key(const Variant::Impl& variant, const GpuKernelTraits& traits, std::string* key);

/// Gets the code from the cache on disk, or compiles it. `key`: the result of gpu_code_key().
/// `refused`: code from the cache that the driver could not load, or null. Such code is compiled
/// again, and replaced in the cache. Errors are those of compile_with_nvrtc();
/// Variant::compile_log() then has the log.
Status make_gpu_code(const Variant::Impl& variant, const GpuKernelTraits& traits,
                     const std::string& key, GpuCode* code, const GpuCode* refused = nullptr);

}  // namespace flashplan
