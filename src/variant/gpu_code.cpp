// SPDX-License-Identifier: Apache-2.0
#include "variant/gpu_code.h"

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/sha256.h"
#include "flashplan/runtime.h"
#include "variant/compiler_process.h"
#include "variant/disk_cache.h"
#include "variant/embedded_sources.h"
#include "variant/nvrtc.h"
#include "variant/source.h"

namespace flashplan {
namespace {

/// A struct of constants that describe the plan, so that the kernel has no code for other plans.
std::string plan_source(const GpuKernelTraits& traits) {
  const auto flag = [](const char* name, bool value) {
    return std::string("  static constexpr bool ") + name + (value ? " = true;\n" : " = false;\n");
  };
  std::string text =
      "struct PlanVariant : variant::UserVariant {\n  using UserVariant::UserVariant;\n";
  text +=
      std::string("  static constexpr DType kOutput = ") + dtype_constant(traits.o_dtype) + ";\n";
  return text + flag("kHasMaskBits", traits.custom_mask) +
         flag("kHasChunks", traits.batch_invariant) + "};\n";
}

std::string program_source(const Variant::Impl& variant, const GpuKernelTraits& traits) {
  std::string text = "#include \"kernels/device/traits.h\"\n";
  text += std::string("#include \"") + traits.program.header + "\"\n";
  text +=
      "namespace flashplan::device::variant {\n"
      "#include \"kernels/device/variant_math.h\"\n"
      "#include \"abi/variant_math.h\"\n";
  text += variant_source(variant, traits.softcap, traits.rope);
  text += "}\nnamespace flashplan::device {\n";
  text += plan_source(traits);
  std::string choices = std::string("Traits<") + dtype_constant(traits.q_dtype) + ", " +
                        dtype_constant(traits.kv_dtype) + ", " +
                        std::to_string(traits.head_dim_qk) + ", " +
                        std::to_string(traits.head_dim_vo) + ", PlanVariant>";
  if (traits.few_rows_alone) choices = "FewRowsAlone<" + choices + ">";
  return text + "using UserKernel = " + choices + ";\n}\n";
}

std::string kernel_name(const GpuKernelTraits& traits) {
  return std::string("flashplan::device::") + traits.program.kernel +
         "<flashplan::device::UserKernel>";
}

std::vector<std::string> compiler_options(const Variant::Impl& variant,
                                          const GpuKernelTraits& traits) {
  std::string architecture = "--gpu-architecture=sm_" + std::to_string(traits.architecture.number);
  if (traits.architecture.suffix != '\0') architecture += traits.architecture.suffix;
  std::vector<std::string> options = {
      architecture,
      "--std=c++20",
      "--device-as-default-execution-space",  // so that kernels may call constexpr functions
      "--prec-div=false",  // for divisions in bodies; the kernel itself has hardly any
      "--prec-sqrt=false",
      "--diag-error=940"};  // refuses a body that returns no value
  // --ftz=true flushes subnormal numbers to zero. With it, exponentials and quotients, which bodies
  // of `logits` use, take fewer instructions. Comparisons, of which bodies of `mask` mostly
  // consist, take more, so a variant without `logits` is compiled without it.
  if (variant.logits) options.emplace_back("--ftz=true");
  const std::vector<std::string> own = words_of("FLASHPLAN_NVRTC_FLAGS");
  options.insert(options.end(), own.begin(), own.end());
  return options;
}

std::string first_error(const std::string& log) {
  std::size_t begin = 0;
  while (begin < log.size()) {
    const std::size_t end = log.find('\n', begin);
    const std::string line = log.substr(begin, end - begin);
    if (line.find("error") != std::string::npos) return line;
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  return "no message";
}

/// Loads a file of the cache. Its first line is the name of the kernel, and the rest is the cubin.
/// Returns false if there is no such file, or if its cubin is that of `refused`.
bool load_cached(const DiskCache& cache, const std::string& key, const GpuCode* refused,
                 GpuCode* code) {
  const std::optional<std::string> content = cache.load(key);
  const std::size_t end = content ? content->find('\n') : std::string::npos;
  if (end == std::string::npos) return false;
  std::string cubin = content->substr(end + 1);
  if (refused != nullptr && refused->cubin == cubin) return false;
  *code = {std::move(cubin), content->substr(0, end), true};
  return true;
}

}  // namespace

Status gpu_code_key(const Variant::Impl& variant, const GpuKernelTraits& traits, std::string* key) {
  FLASHPLAN_RETURN_IF_ERROR(load_nvrtc(variant.name.empty() ? "rope" : "variant"));
  Sha256 hash;
  hash.add_text("nvrtc");
  hash.add_text(nvrtc_version());
  hash.add_text(version());
  hash.add_text(program_source(variant, traits));
  hash.add_text(kernel_name(traits));
  for (const std::string& option : compiler_options(variant, traits)) hash.add_text(option);
  for (const EmbeddedSource& file : embedded_sources()) {
    hash.add_text(file.path);
    hash.add_text(file.text);
  }
  *key = to_hex(hash.digest());
  return {};
}

Status make_gpu_code(const Variant::Impl& variant, const GpuKernelTraits& traits,
                     const std::string& key, GpuCode* code, const GpuCode* refused) {
  const DiskCache cache;
  if (load_cached(cache, key, refused, code)) return {};
  const DiskCache::Lock lock(cache, key);
  if (load_cached(cache, key, refused, code)) return {};  // another process has compiled it
  NvrtcResult result;
  const Status status = compile_with_nvrtc(program_source(variant, traits), kernel_name(traits),
                                           compiler_options(variant, traits), &result);
  if (!result.log.empty()) {  // an empty log must not replace another kernel's log
    const std::scoped_lock log_lock(variant.log_mutex);
    variant.log = result.log;
  }
  if (status.code == StatusCode::kInvalidArgument && !result.log.empty()) {
    return error(StatusCode::kInvalidArgument,
                 "variant: expected source of \"%s\" that compiles, got %.150s",
                 variant.name.c_str(), first_error(result.log).c_str());
  }
  FLASHPLAN_RETURN_IF_ERROR(status);
  cache.store(key, result.name + "\n" + result.cubin);
  *code = {std::move(result.cubin), std::move(result.name), false};
  return {};
}

}  // namespace flashplan
