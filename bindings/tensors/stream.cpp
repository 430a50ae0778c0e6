// SPDX-License-Identifier: Apache-2.0
#include "bindings/tensors/stream.h"

#include <atomic>
#include <iterator>
#include <string>
#include <string_view>

#include "bindings/gil.h"
#include "bindings/tensors/tensor.h"
#include "cuda/memory.h"

namespace flashplan {
namespace {

Stream to_stream(nb::handle number) {
  const unsigned long long handle = PyLong_AsUnsignedLongLong(number.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_value(std::string("stream: expected a handle, got ") + nb::repr(number).c_str());
  }
  return reinterpret_cast<Stream>(static_cast<uintptr_t>(handle));
}

bool is_int(nb::handle object) {
  return PyLong_Check(object.ptr()) != 0 && PyBool_Check(object.ptr()) == 0;
}

/// The stream handle that an int, or a stream object of cuda.core, CuPy or torch, holds.
Stream explicit_stream(nb::handle stream) {
  if (is_int(stream)) return to_stream(stream);
  nb::object protocol = attribute(stream, "__cuda_stream__");
  if (!protocol.is_none()) {
    nb::object answer = PyCallable_Check(protocol.ptr()) != 0 ? protocol() : protocol;
    if (nb::isinstance<nb::tuple>(answer) && nb::len(answer) == 2) {
      nb::object handle = answer[1];
      if (is_int(handle)) return to_stream(handle);
    }
  }
  for (const char* name : {"cuda_stream", "ptr"}) {
    nb::object handle = attribute(stream, name);
    if (is_int(handle)) return to_stream(handle);
  }
  raise_type(std::string("stream: expected an int or an object with __cuda_stream__, .ptr or "
                         ".cuda_stream, got ") +
             nb::type_name(stream.type()).c_str());
}

/// The library's own stream of a device, for callers without a stream. It is made at the first use,
/// and lives as long as the process.
Stream library_stream(Device device) {
  static std::atomic<Stream> streams[64];
  static nb::ft_mutex mutex;
  std::atomic<Stream>& slot = streams[static_cast<std::size_t>(device.index) % std::size(streams)];
  Stream stream = slot.load(std::memory_order_acquire);
  if (stream != nullptr) return stream;
  const nb::ft_lock_guard lock(mutex);
  stream = slot.load(std::memory_order_acquire);
  if (stream == nullptr) {
    check(cuda::create_stream(device.index, &stream));
    slot.store(stream, std::memory_order_release);
  }
  return stream;
}

/// Gets the current stream by DLPack's C exchange API. False: the framework has none on this
/// device.
bool exchanged_stream(const dlpack::ExchangeApi& exchange, Device device, Stream* stream) {
  void* handle = nullptr;
  if (exchange.current_stream == nullptr) return false;
  if (exchange.current_stream(dlpack::kCuda, device.index, &handle) != 0) {
    PyErr_Clear();
    return false;
  }
  *stream = static_cast<Stream>(handle);
  return true;
}

Stream torch_stream(Device device) {
  nb::object cuda = nb::module_::import_("torch").attr("cuda");
  nb::object index = nb::int_(device.index);
  return to_stream(nb::object(cuda.attr("current_stream")(index).attr("cuda_stream")));
}

nb::object cupy_stream(Device device) {
  static const nb::handle current =
      nb::object(nb::module_::import_("cupy.cuda").attr("get_current_stream")).release();
  nb::object index = nb::int_(device.index);
  return current(index);
}

}  // namespace

nb::object module_if_imported(const char* name) {
  // Both references are borrowed. The module is None if imports of it are blocked.
  PyObject* modules = PyImport_GetModuleDict();
  PyObject* module = PyDict_GetItemString(modules, name);
  return module == Py_None ? nb::object() : nb::borrow(module);
}

void CallStream::finish() const {
  if (!on_cuda() || !must_finish) return;
  Status status;
  {
    const GilRelease released;
    status = cuda::synchronize(device.index, handle);
  }
  check(status);
}

CallStream call_stream(nb::handle stream, const Producer& producer, Device device) {
  CallStream call{device};
  if (!call.on_cuda()) {
    if (stream.is_none()) return call;
    raise_value(std::string("stream: expected None on the cpu, got ") + nb::repr(stream).c_str());
  }
  if (!stream.is_none()) {
    call.handle = explicit_stream(stream);
    call.owner = nb::borrow(stream);
    return call;
  }
  if (producer.exchange != nullptr && exchanged_stream(*producer.exchange, device, &call.handle)) {
    return call;
  }
  switch (producer.framework) {
    case Framework::kTorch: call.handle = torch_stream(device); break;
    case Framework::kCupy:
      call.owner = cupy_stream(device);
      call.handle = to_stream(nb::object(call.owner.attr("ptr")));
      break;
    case Framework::kJax:
    case Framework::kOther:
      call.handle = library_stream(device);
      call.must_finish = true;  // the caller's work does not wait for this stream
      break;
  }
  return call;
}

Producer imported_producer() {
  static constexpr struct {
    const char* package;
    const char* type;
  } kFrameworks[] = {{"torch", "Tensor"}, {"cupy", "ndarray"}};
  for (const auto& [package, type] : kFrameworks) {
    nb::object module = module_if_imported(package);
    if (!module.is_valid()) continue;
    nb::object tensor = attribute(module, type);
    if (PyType_Check(tensor.ptr()) == 0) continue;  // the module is still being imported
    // PyTorch without CUDA has no streams.
    if (std::string_view(package) == "torch" &&
        !nb::cast<bool>(module.attr("cuda").attr("is_available")())) {
      continue;
    }
    return producer_of(reinterpret_cast<PyTypeObject*>(tensor.ptr()));
  }
  return {};
}

}  // namespace flashplan
