// SPDX-License-Identifier: Apache-2.0
// Makes Status values with messages, and the names of dtypes and devices that stand in them.
#pragma once

#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// A Status with a message in the style of printf(). Messages about arguments read
/// `<argument>: expected <what>, got <what>`.
[[gnu::format(printf, 2, 3)]] Status error(StatusCode code, const char* format, ...) noexcept;

/// The name of a dtype as the Python package spells it: "bfloat16", "float8_e4m3fn", ...
const char* to_string(DType dtype) noexcept;

/// The name of a device: "cpu" or "cuda:0".
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
