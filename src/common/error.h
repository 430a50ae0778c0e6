// SPDX-License-Identifier: Apache-2.0
// error() makes every Status that has a message.
#pragma once

#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// printf-style. The text reads `<argument>: expected <what>, got <what>`.
[[gnu::format(printf, 2, 3)]] Status error(StatusCode code, const char* format, ...) noexcept;

/// The spelling that the Python package uses: "bfloat16", "float8_e4m3fn", ...
const char* to_string(DType dtype) noexcept;

/// "cpu" or "cuda:0"; valid until the end of the full expression it is used in.
struct DeviceName {
  char text[32];
};
DeviceName to_string(Device device) noexcept;

}  // namespace flashplan

/// Returns from the enclosing function if `expression` is not ok.
#define FLASHPLAN_RETURN_IF_ERROR(expression)          \
  do {                                                 \
    ::flashplan::Status status_of_call = (expression); \
    if (!status_of_call.ok()) return status_of_call;   \
  } while (false)
