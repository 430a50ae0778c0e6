// SPDX-License-Identifier: Apache-2.0
// NVRTC, NVIDIA's run-time compiler, loaded when it is first needed: no link dependency.
#pragma once

#include <string>
#include <vector>

#include "flashplan/status.h"

namespace flashplan {

/// The file of the library, looked for before the usual names; empty: none. For the Python package,
/// which knows where pip installs it. FLASHPLAN_NVRTC comes before both.
void set_nvrtc_path(const std::string& path) noexcept;

struct NvrtcResult {
  std::string cubin;
  std::string name;  // the kernel's, in the cubin
  std::string log;
};

/// Whether NVRTC can be loaded: kUnsupported says how to get it.
Status load_nvrtc() noexcept;

/// "13.0", of the library that is loaded; empty: none is.
std::string nvrtc_version();

/// Compiles `source`, which may include the library's own headers, for an architecture ("sm_90a").
/// `kernel`: a template-id of a kernel.
///   kInvalidArgument  it does not compile, or not within compile_seconds(); the log has the
///   reasons kUnsupported      there is no NVRTC
Status compile_with_nvrtc(const std::string& source, const std::string& kernel,
                          const std::vector<std::string>& options, NvrtcResult* result);

}  // namespace flashplan
