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
  const bool is_small = emulated_facts.major >= 12;
  // Of the 99 KB of a CTA, 12 KB are for static shared memory and 1 KB is CUDA's.
  const size_t most_bytes = is_small ? 86 * 1024 : simt::kDynamicBytes;
  if (static_cast<size_t>(grid.smem_bytes) > most_bytes) simt::fail("too much memory");
  if (grid.cluster > (is_small ? 8 : 16)) simt::fail("too large a cluster");
  machine().run(grid.ctas.x, std::max(grid.cluster, 1), static_cast<int>(grid.threads.x),
                [&] { kernel(params); });
  return {};
}

}  // namespace flashplan::cuda
