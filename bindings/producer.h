// SPDX-License-Identifier: Apache-2.0
// Who made a tensor: what its Python type says of DLPack, of streams and of writing.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>

#include "dlpack.h"
#include "flashplan/tensor.h"

namespace flashplan {

namespace nb = nanobind;

[[noreturn]] void raise_type(const std::string& message);
[[noreturn]] void raise_value(const std::string& message);

/// An attribute, None if the object has none. Any exception but AttributeError goes on, which
/// nb::getattr with a default would drop: attributes may be Python code, and so are signals.
nb::object attribute(nb::handle object, const char* name);
nb::object attribute(nb::handle object, nb::handle name);

enum class Framework { kOther, kTorch, kCupy, kJax };

struct Producer {
  Framework framework = Framework::kOther;
  const dlpack::ExchangeApi* exchange = nullptr;
  bool traced = false;  // stands for an array of JAX while jit, vmap or grad look at a function

  /// Writing to a JAX array through DLPack would break its promises.
  bool immutable() const noexcept { return framework == Framework::kJax; }
};

/// The producer of a type's instances; looked up once for the first types that are seen.
Producer producer_of(PyTypeObject* type);
inline Producer producer_of(nb::handle object) { return producer_of(Py_TYPE(object.ptr())); }

/// Where DLPack says that memory is; nothing for other makers' devices. Pinned host memory is the
/// host's.
constexpr std::optional<Device> to_device(const dlpack::DeviceId& device) noexcept {
  switch (device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost: return Device{};
    case dlpack::kCuda:
    case dlpack::kCudaManaged: return Device{DeviceType::kCuda, device.index};
    default: return std::nullopt;
  }
}

/// Where a tensor is; the CPU for what does not say so.
Device device_of(nb::handle object, const Producer& producer);

/// Raises TypeError: `name` is no tensor; `why` is appended.
[[noreturn]] void raise_not_a_tensor(const char* name, nb::handle object,
                                     const std::string& why = "");

struct CallStream;

/// The memory of an object: by DLPack's C exchange API (no Python call, no synchronisation), which
/// lends it as long as the object lives, else by __dlpack__, as long as this import lives.
class DlpackImport {
 public:
  /// `stream`: the call's, on which producers without a current stream order their work.
  DlpackImport(const char* name, nb::handle object, const Producer& producer, CallStream& stream);

  DlpackImport(const DlpackImport&) = delete;
  DlpackImport& operator=(const DlpackImport&) = delete;

  /// Null where the object has no DLPack, or refuses to be exported.
  const dlpack::Tensor* tensor() const noexcept { return tensor_; }
  bool read_only() const noexcept { return read_only_; }
  /// Why the object refused, to be appended to a message.
  std::string refusal() const;

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
  nb::object refusal_;  // the exception
  // Of the three at most one is in use.
  dlpack::Tensor borrowed_;
  std::unique_ptr<dlpack::ManagedTensor, Release> managed_;
  std::unique_ptr<dlpack::ManagedTensorVersioned, Release> versioned_;
};

}  // namespace flashplan
