// SPDX-License-Identifier: Apache-2.0
#include "ops/mla_checks.h"

#include <algorithm>

#include "checks/tensor_checks.h"
#include "common/error.h"
#include "ops/checks.h"

namespace flashplan {
namespace {

Status check_part(const TensorArgument& cache, int64_t num_dims, const TensorView& first,
                  Device device) {
  FLASHPLAN_RETURN_IF_ERROR(check_device(cache, device));
  const bool is_first = cache.view.data == first.data;
  const Dim page = is_first || first.rank < 2 ? Dim::int32(1) : Dim::exactly(first.shape[1]);
  const Dim dims = Dim::exactly(num_dims);
  return cache.view.rank == 4 ? check_shape(cache, {Dim::any(), page, Dim::exactly(1), dims})
                              : check_shape(cache, {Dim::any(), page, dims});
}

void place_part(const TensorView& view, int64_t first_byte, int64_t num_dims, DType dtype,
                MlaPart& part) {
  if (!has_elements(view) || num_dims == 0) return;
  part.cache = static_cast<char*>(view.data) + first_byte;
  part.page_stride = stride_bytes(view, 0);
  part.slot_stride = stride_bytes(view, 1);
  part.num_dims = static_cast<int32_t>(num_dims);
  part.cache_dtype = dtype;
}

}  // namespace

Status check_mla_cache(const MlaCache& cache, const int64_t (&num_dims)[2], Device device,
                       bool written) noexcept {
  const TensorArgument latent{"cache", cache.latent, written};
  const TensorArgument tail{"cache_tail", cache.tail, written};
  const bool has_tail = !cache.tail.empty();
  if (cache.latent.dtype == DType::kFp8DsMla) {
    if (has_tail || num_dims[0] != kDsMlaScaledDims || num_dims[0] + num_dims[1] != kDsMlaDims) {
      return error(StatusCode::kInvalidArgument,
                   "cache: expected one tensor with fp8_ds_mla, for %d and %d dims, got %s of %lld "
                   "and %lld",
                   kDsMlaScaledDims, kDsMlaDims - kDsMlaScaledDims, has_tail ? "two" : "one",
                   static_cast<long long>(num_dims[0]), static_cast<long long>(num_dims[1]));
    }
    return check_part(latent, kDsMlaBytes, cache.latent, device);
  }
  if (!has_tail) return check_part(latent, num_dims[0] + num_dims[1], cache.latent, device);
  FLASHPLAN_RETURN_IF_ERROR(check_part(latent, num_dims[0], cache.latent, device));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(tail, cache.latent.dtype, " (as the other part)"));
  return check_part(tail, num_dims[1], cache.latent, device);
}

int64_t page_size_of(const MlaCache& cache) noexcept { return cache.latent.shape[1]; }

int32_t num_pages_of(const MlaCache& cache) noexcept {
  return num_pages_of(cache.latent, cache.tail.empty() ? cache.latent : cache.tail);
}

void place_parts(const MlaCache& cache, const int64_t (&num_dims)[2],
                 MlaPart (&parts)[2]) noexcept {
  const DType dtype = cache.latent.dtype;
  if (dtype == DType::kFp8DsMla) {
    constexpr int64_t kTailBytes = 2 * (kDsMlaDims - kDsMlaScaledDims);
    place_part(cache.latent, 0, num_dims[0], DType::kFloat8E4M3, parts[0]);
    place_part(cache.latent, kDsMlaBytes - kTailBytes, num_dims[1], DType::kBFloat16, parts[1]);
    return;
  }
  place_part(cache.latent, 0, num_dims[0], dtype, parts[0]);
  if (!cache.tail.empty()) return place_part(cache.tail, 0, num_dims[1], dtype, parts[1]);
  place_part(cache.latent, num_dims[0] * item_size(dtype), num_dims[1], dtype, parts[1]);
}

}  // namespace flashplan
