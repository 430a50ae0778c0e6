// SPDX-License-Identifier: Apache-2.0
#include "workspace.h"

#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "cuda/memory.h"
#include "flashplan/plan.h"

namespace flashplan {
namespace {

[[noreturn]] void raise_strides(const char* name) {
  raise_value(std::string(name) + ": expected contiguous memory, got strides");
}

[[noreturn]] void raise_read_only(const char* name) {
  raise_type(std::string(name) + ": expected a writable tensor, got a read-only one");
}

std::string to_text(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

std::size_t contiguous_bytes(const char* name, const dlpack::Tensor& t) {
  int64_t count = 1;
  for (int32_t d = t.ndim - 1; d >= 0; --d) {
    const bool fits = t.strides == nullptr || t.shape[d] == 1 || t.strides[d] == count;
    if (!fits && t.shape[d] != 0) raise_strides(name);
    count *= t.shape[d];
  }
  return static_cast<std::size_t>(count) * t.dtype.bits * t.dtype.lanes / 8;
}

}  // namespace

BytesArg::BytesArg(const char* name, nb::handle object, Device device) {
  const Producer producer = producer_of(object);
  if (producer.immutable()) {
    raise_type(std::string(name) + ": expected a writable tensor, got a JAX array");
  }
  Device found;
  nb::object interface = nb::getattr(object, "__array_interface__", nb::none());
  if (!interface.is_none()) {  // NumPy: also what it does not export through DLPack
    const nb::tuple memory(interface["data"]);
    if (nb::cast<bool>(memory[1])) raise_read_only(name);
    if (!nb::object(interface["strides"]).is_none()) raise_strides(name);
    data = reinterpret_cast<void*>(nb::cast<uintptr_t>(memory[0]));
    size = nb::cast<size_t>(object.attr("nbytes"));
  } else {
    CallStream stream = call_stream(nb::none(), producer, device);
    const DlpackImport import(name, object, producer, stream);
    const dlpack::Tensor* tensor = import.tensor();
    if (tensor == nullptr) {
      raise_not_a_tensor(name, object, " (workspaces come from NumPy, PyTorch or CuPy)");
    }
    if (import.read_only()) raise_read_only(name);
    size = contiguous_bytes(name, *tensor);
    data =
        tensor->data == nullptr ? nullptr : static_cast<char*>(tensor->data) + tensor->byte_offset;
    found = to_device(tensor->device);
  }
  if (found != device) {
    raise_type(std::string(name) + ": expected a tensor on " + to_text(device) + ", got one on " +
               to_text(found));
  }
}

void Workspace::borrow(nb::object memory, Device device) {
  const BytesArg bytes("workspace", memory, device);
  const auto address = reinterpret_cast<uintptr_t>(bytes.data);
  const std::size_t skip =
      (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
  data_ = reinterpret_cast<void*>(address + skip);
  size_ = bytes.size > skip ? bytes.size - skip : 0;
  owner_ = std::move(memory);
}

void Workspace::allocate(std::size_t size, Device device) {
  if (device.type == DeviceType::kCpu) {
    data_ = ::operator new(size, std::align_val_t{kWorkspaceAlignment});
  } else {
    check(cuda::allocate(device.index, size, &data_));
  }
  size_ = size;
  device_ = device;
  owned_ = true;
}

Workspace::~Workspace() {
  if (!owned_) return;
  if (device_.type == DeviceType::kCpu) {
    ::operator delete(data_, std::align_val_t{kWorkspaceAlignment});
  } else {
    cuda::release(device_.index, data_);
  }
}

}  // namespace flashplan
