// SPDX-License-Identifier: Apache-2.0
// The producer of a tensor: how tensors of a Python type are imported, which stream they are ready
// on, and whether they may be written.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/tensors/dlpack.h"
#include "flashplan/tensor.h"

namespace flashplan {

namespace nb = nanobind;

[[noreturn]] void raise_type(const std::string& message);
[[noreturn]] void raise_value(const std::string& message);

/// An attribute, or None if the object has no such attribute. All exceptions except AttributeError
/// propagate. nb::getattr with a default would drop all exceptions, also KeyboardInterrupt.
nb::object attribute(nb::handle object, const char* name);
nb::object attribute(nb::handle object, nb::handle name);

enum class Framework { kOther, kTorch, kCupy, kJax };

struct Producer {
  Framework framework = Framework::kOther;
  const dlpack::ExchangeApi* exchange = nullptr;
  bool traced = false;  // a JAX tracer, which stands for an array under jit, vmap or grad
  bool masked = false;  // numpy.ma.MaskedArray, which is refused: DLPack has no masks

  /// JAX arrays are immutable, so they must not be written through DLPack.
  bool immutable() const noexcept { return framework == Framework::kJax; }
};

/// The producer of a type's instances. The first few types that are seen are remembered.
Producer producer_of(PyTypeObject* type);
inline Producer producer_of(nb::handle object) { return producer_of(Py_TYPE(object.ptr())); }

/// The device of DLPack memory; empty for devices other than CPUs and CUDA GPUs. Pinned host memory
/// is on the CPU.
constexpr std::optional<Device> to_device(const dlpack::DeviceId& device) noexcept {
  switch (device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost: return Device{};
    case dlpack::kCuda:
    case dlpack::kCudaManaged: return Device{DeviceType::kCuda, device.index};
    default: return std::nullopt;
  }
}

/// The device of a tensor; the CPU for an object that does not tell its device.
Device device_of(nb::handle object, const Producer& producer);

/// Raises TypeError: `name` is no tensor; `why` is appended.
[[noreturn]] void raise_not_a_tensor(const char* name, nb::handle object,
                                     const std::string& why = "");

struct CallStream;

/// The memory of a Python object that supports DLPack, for C++ code.
///
/// If the object's type has DLPack's C exchange API, the constructor calls this API, which runs no
/// Python code and does not synchronise. The object keeps ownership of the memory, so the caller
/// must keep the object alive for as long as it uses the DlpackImport.
///
/// Otherwise the constructor calls the object's __dlpack__(). The DlpackImport owns the DLPack
/// tensor that this call returns, and frees it in its destructor.
class DlpackImport {
 public:
  /// `stream` is the stream of the call. A producer without a current stream makes this stream wait
  /// for the producer's work.
  DlpackImport(const char* name, nb::handle object, const Producer& producer, CallStream& stream);

  DlpackImport(const DlpackImport&) = delete;
  DlpackImport& operator=(const DlpackImport&) = delete;

  /// Null if the object does not support DLPack, or refuses to be exported.
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
      if (managed->deleter == nullptr) return;
      // This may run while a Python exception is set. A deleter that is Python code would take that
      // exception for its own, so the exception is put aside until the deleter returns.
      std::optional<nb::error_scope> apart;
      if (PyErr_Occurred() != nullptr) apart.emplace();
      managed->deleter(managed);
    }
  };

  const dlpack::Tensor* tensor_ = nullptr;
  bool read_only_ = false;
  nb::object refusal_;  // the exception that the export raised
  // At most one of the next three members is in use.
  dlpack::Tensor borrowed_;
  std::unique_ptr<dlpack::ManagedTensor, Release> managed_;
  std::unique_ptr<dlpack::ManagedTensorVersioned, Release> versioned_;
};

}  // namespace flashplan
