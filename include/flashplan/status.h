// SPDX-License-Identifier: Apache-2.0
// The result of every call. Nothing in this library throws, prints, aborts or exits.
#pragma once

#include "flashplan/export.h"

namespace flashplan {

enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument,  // a wrong value or shape
  kInvalidType,      // a wrong dtype or device, or a tensor that may not be written
  kUnsupported,      // valid, but this build or this device has no kernel for it
  kNotReady,         // run() before plan(), plan() on a stream that is being captured, or a Plan
                     // or workspace used from two threads at once
  kOutOfMemory,      // an allocation failed, on the host or on a GPU
  kCudaError,        // a CUDA call failed; the context may be lost
};

/// "kInvalidArgument" and so on, for logs; "unknown" for any other number.
FLASHPLAN_API const char* to_string(StatusCode code) noexcept;

/// Code and text of an outcome. Trivially copyable, never allocates.
/// A failed call leaves its object usable and has written nothing to the caller's tensors.
struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  /// `<argument>: expected <what>, got <what>`, NUL-terminated; empty when ok().
  char message[252];

  Status() noexcept { message[0] = '\0'; }
  bool ok() const noexcept { return code == StatusCode::kOk; }
};

}  // namespace flashplan
