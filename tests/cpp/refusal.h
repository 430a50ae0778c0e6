// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "check.h"
#include "flashplan/status.h"

namespace flashplan::test {

/// Checks that a call was refused with this code and a message `<argument>: expected ..., got ...`.
inline void check_refused(const Status& status, StatusCode code, const std::string& argument) {
  const std::string message = status.message;
  const std::string start = argument + ": expected ";
  if (status.code == code && message.rfind(start, 0) == 0 &&
      message.find(", got ") != std::string::npos) {
    return;
  }
  check::fail(__FILE__, __LINE__,
              "want '" + start + "...' with code " + std::to_string(static_cast<int>(code)) +
                  ", got '" + message + "' with code " +
                  std::to_string(static_cast<int>(status.code)));
}

}  // namespace flashplan::test
