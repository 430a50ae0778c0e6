// SPDX-License-Identifier: Apache-2.0
#include <nvtx3/nvToolsExt.h>

#include "cuda/range.h"

namespace flashplan::cuda {

Range::Range(const char* name) noexcept { nvtxRangePushA(name); }
Range::~Range() { nvtxRangePop(); }

}  // namespace flashplan::cuda
