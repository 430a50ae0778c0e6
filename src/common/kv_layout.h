// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/error.h"
#include "flashplan/plan.h"

namespace flashplan {

/// Refuses a number that names no layout.
inline Status check_kv_layout(KvLayout layout) noexcept {
  if (layout == KvLayout::kNHD || layout == KvLayout::kHND) return {};
  return error(StatusCode::kInvalidArgument, "kv_layout: expected kNHD (0) or kHND (1), got %d",
               static_cast<int>(layout));
}

}  // namespace flashplan
