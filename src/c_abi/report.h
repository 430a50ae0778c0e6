// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>

#include "flashplan/flashplan_c.h"
#include "flashplan/status.h"

namespace flashplan::c_abi {

/// Returns the code of `status`, and writes its text to the caller's buffer `message`, if that is
/// not null.
inline flashplan_status report(const Status& status, char* message) noexcept {
  if (message != nullptr) {
    std::snprintf(message, FLASHPLAN_MESSAGE_SIZE, "%s", status.ok() ? "" : status.message);
  }
  return static_cast<flashplan_status>(status.code);
}

}  // namespace flashplan::c_abi
