// SPDX-License-Identifier: Apache-2.0
// NVRTC, NVIDIA's run-time compiler. It is loaded when it is first needed, so that the library does
// not link it.
#pragma once

#include <string>
#include <vector>

#include "flashplan/status.h"

namespace flashplan {

/// The path of NVRTC's library, which is tried before the usual names; empty: none. The Python
/// package sets it, since it knows where pip installs NVRTC. FLASHPLAN_NVRTC is tried before both.
void set_nvrtc_path(const std::string& path) noexcept;

struct NvrtcResult {
  std::string cubin;
  std::string name;  // name of the kernel in the cubin
  std::string log;
};

/// Whether NVRTC can be loaded: kUnsupported says how to get it. `argument`: what needs it.
Status load_nvrtc(const char* argument = "variant") noexcept;

/// The version of the loaded library, such as "13.0"; empty if none is loaded.
std::string nvrtc_version();

/// Compiles `source`, which may include the library's own headers, with the options of a compiler,
/// such as the architecture. `kernel`: a template-id of a kernel.
///   kInvalidArgument  it does not compile, or not within compile_seconds(); the log has the
///                     reasons
///   kUnsupported      there is no NVRTC
Status compile_with_nvrtc(const std::string& source, const std::string& kernel,
                          const std::vector<std::string>& options, NvrtcResult* result);

}  // namespace flashplan
