// SPDX-License-Identifier: Apache-2.0
#include "variant/nvrtc.h"

#include <dlfcn.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>

#include "common/error.h"
#include "common/forks.h"
#include "variant/compiler_process.h"
#include "variant/embedded_sources.h"

namespace flashplan {
namespace {

using Clock = std::chrono::steady_clock;
using Program = void*;

/// The functions of nvrtc.h that are used here; they return 0 if all is well.
struct Nvrtc {
  int (*version)(int* major, int* minor);
  int (*create)(Program*, const char* source, const char* name, int num_headers,
                const char* const* headers, const char* const* names);
  int (*destroy)(Program*);
  int (*add_name)(Program, const char* expression);
  int (*compile)(Program, int num_options, const char* const* options);
  int (*log_size)(Program, std::size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, std::size_t*);
  int (*cubin)(Program, char*);
  int (*lowered_name)(Program, const char* expression, const char** name);
  /// Exists in NVRTC 12.9 and later, else null: a callback that can cancel a compilation.
  int (*set_flow_callback)(Program, int (*callback)(void* payload, void*), void* payload);
};

// fork_safe_lock<Nvrtc>() guards these three variables.
std::string path_of_package;
bool is_loaded = false;
Nvrtc nvrtc;

bool load(const char* path) {
  void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return false;
  bool all = true;
  const auto find = [&](auto* function, const char* name, bool needed = true) {
    *function =
        reinterpret_cast<std::remove_reference_t<decltype(*function)>>(::dlsym(library, name));
    all = all && (*function != nullptr || !needed);
  };
  find(&nvrtc.version, "nvrtcVersion");
  find(&nvrtc.create, "nvrtcCreateProgram");
  find(&nvrtc.destroy, "nvrtcDestroyProgram");
  find(&nvrtc.add_name, "nvrtcAddNameExpression");
  find(&nvrtc.compile, "nvrtcCompileProgram");
  find(&nvrtc.log_size, "nvrtcGetProgramLogSize");
  find(&nvrtc.log, "nvrtcGetProgramLog");
  find(&nvrtc.cubin_size, "nvrtcGetCUBINSize");
  find(&nvrtc.cubin, "nvrtcGetCUBIN");
  find(&nvrtc.lowered_name, "nvrtcGetLoweredName");
  find(&nvrtc.set_flow_callback, "nvrtcSetFlowCallback", false);
  return all;
}

/// NVRTC has no C++ standard library. Device code needs only one header of it, <cstdint>, which
/// this text replaces.
constexpr const char* kCstdint =
    "using int8_t = signed char;\nusing int16_t = short;\nusing int32_t = int;\n"
    "using int64_t = long;\nusing uint8_t = unsigned char;\nusing uint16_t = unsigned short;\n"
    "using uint32_t = unsigned int;\nusing uint64_t = unsigned long;\n"
    "using uintptr_t = unsigned long;\n";

int is_late(void* payload, void*) {
  return Clock::now() > *static_cast<Clock::time_point*>(payload);
}

Status compile(Program program, const std::string& kernel, const std::vector<std::string>& options,
               NvrtcResult* result) {
  const double seconds = compile_seconds();
  auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(seconds));
  if (nvrtc.set_flow_callback != nullptr) nvrtc.set_flow_callback(program, is_late, &deadline);
  std::vector<const char*> words;
  for (const std::string& option : options) words.push_back(option.c_str());
  int failed = nvrtc.add_name(program, kernel.c_str());
  if (failed == 0) failed = nvrtc.compile(program, static_cast<int>(words.size()), words.data());
  std::size_t size = 0;
  if (nvrtc.log_size(program, &size) == 0 && size > 1) {
    result->log.resize(size);
    const bool has_log = nvrtc.log(program, result->log.data()) == 0;
    result->log.resize(has_log ? size - 1 : 0);  // the size counts the final NUL
  }
  if (failed != 0 && Clock::now() > deadline) {
    return error(StatusCode::kInvalidArgument,
                 "variant: expected source that compiles within %g s (FLASHPLAN_COMPILE_SECONDS), "
                 "got no end",
                 seconds);
  }
  const char* name = nullptr;
  if (failed == 0) failed = nvrtc.lowered_name(program, kernel.c_str(), &name);
  if (failed == 0) failed = nvrtc.cubin_size(program, &size);
  if (failed == 0) {
    result->name = name;
    result->cubin.resize(size);
    failed = nvrtc.cubin(program, result->cubin.data());
  }
  if (failed == 0) return {};
  return error(StatusCode::kInvalidArgument,
               "variant: expected source that compiles, got error %d of "
               "NVRTC",
               failed);
}

}  // namespace

void set_nvrtc_path(const std::string& path) noexcept try {
  const auto lock = fork_safe_lock<Nvrtc>();
  path_of_package = path;
} catch (...) {
  // Out of memory: load_nvrtc() then tries the usual names alone.
}

Status load_nvrtc(const char* argument) noexcept try {
  const auto lock = fork_safe_lock<Nvrtc>();
  if (is_loaded) return {};
  const char* wanted = std::getenv("FLASHPLAN_NVRTC");
  const char* names[] = {path_of_package.c_str(), "libnvrtc.so.13", "libnvrtc.so.12",
                         "/usr/local/cuda/lib64/libnvrtc.so"};
  if (wanted != nullptr && *wanted != '\0') {
    is_loaded = load(wanted);
  } else {
    for (const char* name : names) {
      if (is_loaded) break;
      if (*name != '\0') is_loaded = load(name);
    }
  }
  if (is_loaded) return {};
  return error(StatusCode::kUnsupported,
               "%s: expected NVRTC for a GPU (pip install nvidia-cuda-nvrtc, or set "
               "FLASHPLAN_NVRTC to its library), got none%s%.80s",
               argument, wanted != nullptr ? " at " : "", wanted != nullptr ? wanted : "");
} catch (...) {
  return error(StatusCode::kOutOfMemory, "variant: expected memory to load NVRTC, got none");
}

std::string nvrtc_version() {
  const auto lock = fork_safe_lock<Nvrtc>();
  int major = 0;
  int minor = 0;
  if (!is_loaded || nvrtc.version(&major, &minor) != 0) return {};
  return std::to_string(major) + "." + std::to_string(minor);
}

Status compile_with_nvrtc(const std::string& source, const std::string& kernel,
                          const std::vector<std::string>& options, NvrtcResult* result) {
  FLASHPLAN_RETURN_IF_ERROR(load_nvrtc());
  std::vector<const char*> headers = {kCstdint};
  std::vector<const char*> names = {"cstdint"};
  for (const EmbeddedSource& file : embedded_sources()) {
    headers.push_back(file.text.data());
    names.push_back(file.path);
  }
  Program program = nullptr;
  const int failed = nvrtc.create(&program, source.c_str(), "variant.cu",
                                  static_cast<int>(headers.size()), headers.data(), names.data());
  if (failed != 0) {
    return error(StatusCode::kOutOfMemory, "variant: expected a program of NVRTC, got error %d",
                 failed);
  }
  const Status status = compile(program, kernel, options, result);
  nvrtc.destroy(&program);
  return status;
}

}  // namespace flashplan
