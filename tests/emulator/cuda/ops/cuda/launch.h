// SPDX-License-Identifier: Apache-2.0
// In the place of the real launch.h: an operator's kernel on the emulated GPU.
#pragma once

#include <algorithm>

#include "../../../cuda_builtins.h"
#include "cuda/device.h"

namespace flashplan::cuda {

struct Grid {
  dim3 ctas;
  dim3 threads;
  int cluster = 0;
  int smem_bytes = 0;
};

inline simt::Machine& machine() {
  static simt::Machine the_machine;
  return the_machine;
}

template <class Params>
Status launch(void (*kernel)(Params), const Grid& grid, Device, Stream, Params params) noexcept {
  if (static_cast<size_t>(grid.smem_bytes) > simt::kDynamicBytes) simt::fail("too much memory");
  machine().run(grid.ctas.x, std::max(grid.cluster, 1), static_cast<int>(grid.threads.x),
                [&] { kernel(params); });
  return {};
}

}  // namespace flashplan::cuda
