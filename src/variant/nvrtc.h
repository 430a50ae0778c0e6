// SPDX-License-Identifier: Apache-2.0
// NVRTC, NVIDIA's run-time compiler. The library does not link it, but loads it when it is first
// needed.
#pragma once

#include <string>
#include <vector>

#include "flashplan/status.h"

namespace flashplan {

/// Sets a path of NVRTC's library, which is tried before the usual names; empty: there is none. The
/// Python package sets it, since it knows where pip installs NVRTC. If FLASHPLAN_NVRTC is set, only
/// the library that it names is tried.
void set_nvrtc_path(const std::string& path) noexcept;

struct NvrtcResult {
  std::string cubin;
  std::string name;  // name of the kernel in the cubin
  std::string log;
};

/// Loads NVRTC unless it is loaded. `argument`: the argument that needs it, for the message.
///   kUnsupported  there is no NVRTC; the message says how to get it
Status load_nvrtc(const char* argument = "variant") noexcept;

/// The version of the loaded library, such as "13.0"; empty if none is loaded.
std::string nvrtc_version();

/// Compiles `source`, which may include the library's own headers. `kernel`: the kernel in
/// `source`, a template with its arguments. `options`: options of NVRTC, such as the architecture.
///   kInvalidArgument  it does not compile, or not within compile_seconds(); the log says why
///   kUnsupported      there is no NVRTC
Status compile_with_nvrtc(const std::string& source, const std::string& kernel,
                          const std::vector<std::string>& options, NvrtcResult* result);

}  // namespace flashplan
