// SPDX-License-Identifier: Apache-2.0
#include "bindings/run/workspace.h"

#include <cstdint>
#include <new>
#include <utility>

#include "bindings/tensors/array_interface.h"
#include "checks/tensor_checks.h"
#include "common/error.h"
#include "cuda/memory.h"
#include "flashplan/plan.h"

namespace flashplan {
void Workspace::borrow(nb::object memory, Device device) {
  CallStream stream = call_stream(nb::none(), producer_of(memory), device);
  const nb::object array = plain_array(memory);
  export_.emplace("workspace", array.is_valid() ? array : memory, TensorKind::kBytes, stream,
                  nullptr, Access::kWrite);
  const TensorView view = export_->view();
  const TensorArgument argument{"workspace", view, true};
  check(check_device(argument, device));
  check(check_memory(argument));
  if (array.is_valid()) export_.reset();
  owner_ = std::move(memory);

  const auto size = static_cast<std::size_t>(view.shape[0]);
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  const std::size_t skip =
      (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
  data_ = reinterpret_cast<void*>(address + skip);
  size_ = size > skip ? size - skip : 0;
}

void Workspace::allocate(std::size_t size, Device device) {
  if (device.type == DeviceType::kCpu) {
    data_ = ::operator new(size, std::align_val_t{kWorkspaceAlignment}, std::nothrow);
    if (data_ == nullptr) {
      raise_status(error(StatusCode::kOutOfMemory,
                         "workspace: expected %zu bytes of host memory, got none", size));
    }
  } else {
    check(cuda::allocate(device.index, size, &data_));
  }
  size_ = size;
  device_ = device;
  owned_ = true;
}

void Workspace::release() noexcept {
  if (owned_ && device_.type == DeviceType::kCpu) {
    ::operator delete(data_, std::align_val_t{kWorkspaceAlignment});
  } else if (owned_) {
    cuda::release(device_.index, data_);
  }
  data_ = nullptr;
  size_ = 0;
  owned_ = false;
  export_.reset();
  owner_.reset();
}

}  // namespace flashplan
