// SPDX-License-Identifier: Apache-2.0
// The checks and the description of a cache that append_mla() and gather_mla() have in common.
#pragma once

#include "checks/memory_checks.h"
#include "flashplan/mla.h"
#include "ops/mla_params.h"

namespace flashplan {

/// Checks dtype, device and shape of a cache. `num_dims`: the latent and the rotated dims of a key.
Status check_mla_cache(const MlaCache& cache, const int64_t (&num_dims)[2], Device device,
                       bool written) noexcept;

/// The page size of a cache, and the number of pages that slots and page ids can refer to.
int64_t page_size_of(const MlaCache& cache) noexcept;
int32_t num_pages_of(const MlaCache& cache) noexcept;

/// Writes to `parts` where the dims of keys lie in a cache, and their dtypes there.
void place_parts(const MlaCache& cache, const int64_t (&num_dims)[2], MlaPart (&parts)[2]) noexcept;

}  // namespace flashplan
