// SPDX-License-Identifier: Apache-2.0
// Plan::check_device_data(), which copies tensors to the host, and checks their values there.
#include <cstddef>
#include <memory>
#include <new>
#include <span>

#include "api/plan_impl.h"
#include "api/run_checks.h"
#include "checks/tensor_checks.h"
#include "common/error.h"
#include "cuda/device.h"
#include "cuda/memory.h"
#include "flashplan/plan.h"

namespace flashplan {
namespace {

/// A tensor on the host: the caller's own, or a copy.
class HostTensor {
 public:
  const TensorView& view() const { return view_; }

  /// Copies the tensor if it lies on `device`, a GPU. A tensor that was not given stays empty.
  Status read(const TensorArgument& given, Device device, Stream stream) {
    view_ = given.view;
    const bool is_on_host = view_.device == Device{};
    if (view_.empty() || is_on_host) return {};
    FLASHPLAN_RETURN_IF_ERROR(check_device(given, device));
    FLASHPLAN_RETURN_IF_ERROR(check_strided(given));
    view_.device = Device{};
    if (!has_elements(view_)) return {};
    std::size_t size = static_cast<std::size_t>(item_size(view_.dtype));
    for (int32_t d = 0; d < view_.rank; ++d) {
      size +=
          static_cast<std::size_t>((view_.shape[d] - 1) * view_.stride[d] * item_size(view_.dtype));
    }
    copy_.reset(new (std::nothrow) std::byte[size]);
    if (copy_ == nullptr) {
      return error(StatusCode::kOutOfMemory, "%s: expected %zu free bytes on the host, got fewer",
                   given.name, size);
    }
    view_.data = copy_.get();
    return cuda::copy_to_host(device.index, given.view.data, size, copy_.get(), stream);
  }

 private:
  /// Checks that no stride is negative, so that one copy, from the first element to the last one,
  /// brings all elements.
  static Status check_strided(const TensorArgument& given) {
    if (given.view.rank > kMaxRank) {
      return error(StatusCode::kInvalidArgument, "%s: expected at most %d dimensions, got %d",
                   given.name, kMaxRank, given.view.rank);
    }
    const Dim any[kMaxRank] = {Dim::any(), Dim::any(), Dim::any(), Dim::any()};
    return check_shape(given, std::span(any).first(static_cast<std::size_t>(given.view.rank)));
  }

  TensorView view_;
  std::unique_ptr<std::byte[]> copy_;
};

}  // namespace

Status Plan::check_device_data(const DeviceData& data, Stream stream) const noexcept {
  if (!impl_) {
    return error(StatusCode::kNotReady,
                 "check_device_data: expected create() before it, got an empty Plan");
  }
  const InUseGuard guard(impl_->in_use);
  if (!guard.acquired()) {
    return error(StatusCode::kNotReady,
                 "check_device_data: expected one thread at a time, got a second one");
  }
  if (!impl_->planned) {
    return error(StatusCode::kNotReady,
                 "check_device_data: expected plan() before it, got no plan");
  }
  const Device device = impl_->options.device;
  if (device.type == DeviceType::kCuda) {
    const cuda::DeviceGuard device_guard(device.index);
    FLASHPLAN_RETURN_IF_ERROR(device_guard.status());
    bool capturing = false;
    FLASHPLAN_RETURN_IF_ERROR(cuda::is_capturing(stream, &capturing));
    if (capturing) {
      return error(StatusCode::kNotReady,
                   "stream: expected no capture under way, got a capturing stream");
    }
  }
  HostTensor block_table, page_indptr, page_indices, kv_lens, slots;
  const auto read = [&](HostTensor& tensor, const char* name, const TensorView& given) {
    return tensor.read({name, given}, device, stream);
  };
  FLASHPLAN_RETURN_IF_ERROR(read(block_table, "block_table", data.block_table));
  FLASHPLAN_RETURN_IF_ERROR(read(page_indptr, "page_indptr", data.page_indptr));
  FLASHPLAN_RETURN_IF_ERROR(read(page_indices, "page_indices", data.page_indices));
  FLASHPLAN_RETURN_IF_ERROR(read(kv_lens, "kv_lens", data.kv_lens));
  FLASHPLAN_RETURN_IF_ERROR(read(slots, "slot_mapping", data.slot_mapping));
  return check_data({block_table.view(), page_indptr.view(), page_indices.view(), kv_lens.view(),
                     slots.view(), data.num_pages},
                    *impl_);
}

}  // namespace flashplan
