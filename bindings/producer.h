// SPDX-License-Identifier: Apache-2.0
// Who made a tensor: what its Python type says of DLPack, of streams and of writing.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "dlpack.h"
#include "flashplan/tensor.h"

namespace flashplan {

namespace nb = nanobind;

[[noreturn]] void raise_type(const std::string& message);
[[noreturn]] void raise_value(const std::string& message);

enum class Framework { kOther, kTorch, kCupy, kJax };

struct Producer {
  Framework framework = Framework::kOther;
  const dlpack::ExchangeApi* exchange = nullptr;

  /// Writing to a JAX array through DLPack would break its promises.
  bool immutable() const noexcept { return framework == Framework::kJax; }
};

/// The producer of a type's instances; looked up once per type.
Producer producer_of(PyTypeObject* type);
inline Producer producer_of(nb::handle object) { return producer_of(Py_TYPE(object.ptr())); }

constexpr bool is_cuda(const dlpack::DeviceId& device) noexcept {
  return device.type == dlpack::kCuda || device.type == dlpack::kCudaManaged;
}

/// Where DLPack says that memory is. Pinned host memory is the host's.
constexpr Device to_device(const dlpack::DeviceId& device) noexcept {
  const bool on_host = device.type == dlpack::kCpu || device.type == dlpack::kCudaHost;
  return {on_host ? DeviceType::kCpu : DeviceType::kCuda, on_host ? 0 : device.index};
}

/// Where a tensor is; the CPU for what does not say so.
Device device_of(nb::handle object, const Producer& producer);

/// Raises TypeError: `name` is no tensor; `why` is appended.
[[noreturn]] void raise_not_a_tensor(const char* name, nb::handle object, const char* why = "");

struct CallStream;

/// The memory of an object, for the duration of a call: by DLPack's C exchange API (no Python call,
/// no synchronisation), else by __dlpack__.
class DlpackImport {
 public:
  /// `stream`: the call's, on which producers without a current stream order their work.
  DlpackImport(const char* name, nb::handle object, const Producer& producer, CallStream& stream);

  /// Null where the object has no DLPack, or DLPack no code for its dtype.
  const dlpack::Tensor* tensor() const noexcept { return tensor_; }
  bool read_only() const noexcept { return read_only_; }

 private:
  void import_method(const char* name, nb::handle object, const Producer& producer,
                     CallStream& stream);
  void adopt(const char* name, nb::handle object, nb::handle capsule);

  struct Release {
    template <class Managed>
    void operator()(Managed* managed) const {
      if (managed->deleter != nullptr) managed->deleter(managed);
    }
  };

  const dlpack::Tensor* tensor_ = nullptr;
  bool read_only_ = false;
  // Of the three at most one is in use.
  dlpack::Tensor borrowed_;
  std::unique_ptr<dlpack::ManagedTensor, Release> managed_;
  std::unique_ptr<dlpack::ManagedTensorVersioned, Release> versioned_;
};

}  // namespace flashplan
