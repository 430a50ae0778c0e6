// SPDX-License-Identifier: Apache-2.0
#include "producer.h"

#include <atomic>
#include <string>
#include <string_view>

#include "gil.h"
#include "stream.h"

namespace flashplan {
namespace {

using namespace nb::literals;

struct TypeFacts {
  std::atomic<PyTypeObject*> type{nullptr};
  Producer producer;
};

const dlpack::ExchangeApi* exchange_api(nb::handle type) {
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (capsule.is_none()) return nullptr;
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (pointer == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* api = static_cast<const dlpack::ExchangeApi*>(pointer);
  while (api != nullptr && api->version.major != 1) api = api->previous;
  return api != nullptr && api->tensor_from_object != nullptr ? api : nullptr;
}

/// By the packages of the type and its bases.
Framework framework_of(nb::handle type) {
  for (nb::handle base : nb::tuple(type.attr("__mro__"))) {
    nb::object module = nb::getattr(base, "__module__", nb::none());
    if (!nb::isinstance<nb::str>(module)) continue;
    const std::string name = nb::str(module).c_str();
    const std::string_view package = std::string_view(name).substr(0, name.find('.'));
    if (package == "torch") return Framework::kTorch;
    if (package == "cupy") return Framework::kCupy;
    if (package == "jax" || package == "jaxlib") return Framework::kJax;
  }
  return Framework::kOther;
}

Producer learn(PyTypeObject* type) {
  const nb::handle handle(reinterpret_cast<PyObject*>(type));
  return {framework_of(handle), exchange_api(handle)};
}

}  // namespace

void raise_type(const std::string& message) { throw nb::type_error(message.c_str()); }
void raise_value(const std::string& message) { throw nb::value_error(message.c_str()); }

void raise_not_a_tensor(const char* name, nb::handle object, const char* why) {
  raise_type(std::string(name) + ": expected a tensor (with __dlpack__), got " +
             nb::type_name(object.type()).c_str() + why);
}

/// The first few types seen are remembered; further ones are looked up each time.
Producer producer_of(PyTypeObject* type) {
  static TypeFacts cache[16];
  static nb::ft_mutex mutex;
  for (const TypeFacts& facts : cache) {
    PyTypeObject* known = facts.type.load(std::memory_order_acquire);
    if (known == type) return facts.producer;
    if (known == nullptr) break;
  }
  const Producer producer = learn(type);  // outside the lock: it runs Python
  const nb::ft_lock_guard lock(mutex);
  for (TypeFacts& facts : cache) {
    PyTypeObject* known = facts.type.load(std::memory_order_relaxed);
    if (known == type) break;
    if (known != nullptr) continue;
    facts.producer = producer;
    Py_INCREF(reinterpret_cast<PyObject*>(type));  // the address stays this type's
    facts.type.store(type, std::memory_order_release);
    break;
  }
  return producer;
}

Device device_of(nb::handle object, const Producer& producer) {
  if (producer.exchange != nullptr) {
    dlpack::Tensor tensor;
    if (producer.exchange->tensor_from_object(object.ptr(), &tensor) == 0) {
      return to_device(tensor.device);
    }
    PyErr_Clear();
    return {};
  }
  nb::object method = nb::getattr(object, "__dlpack_device__", nb::none());
  if (method.is_none() || PyType_Check(object.ptr())) return {};
  const nb::tuple device(surviving_exit([&] { return method(); }));
  return to_device({nb::cast<int32_t>(nb::int_(nb::object(device[0]))),
                    nb::cast<int32_t>(nb::int_(nb::object(device[1])))});
}

DlpackImport::DlpackImport(const char* name, nb::handle object, const Producer& producer,
                           CallStream& stream) {
  if (producer.exchange == nullptr) {
    import_method(name, object, producer, stream);
    return;
  }
  if (producer.exchange->tensor_from_object(object.ptr(), &borrowed_) != 0) {
    PyErr_Clear();
    raise_not_a_tensor(name, object, " without storage (a meta, fake or sparse tensor?)");
  }
  tensor_ = &borrowed_;
}

void DlpackImport::import_method(const char* name, nb::handle object, const Producer& producer,
                                 CallStream& stream) {
  nb::object method = nb::getattr(object, "__dlpack__", nb::none());
  if (method.is_none() || PyType_Check(object.ptr())) return;
  // Who has a current stream has made the tensor ready there. Others order themselves with ours.
  const bool has_current_stream =
      producer.framework == Framework::kTorch || producer.framework == Framework::kCupy;
  nb::object on = nb::none();
  if (has_current_stream) {
    on = nb::int_(-1);
  } else if (stream.on_cuda() && device_of(object, producer).type == DeviceType::kCuda) {
    on = nb::int_(stream.dlpack());
    if (producer.framework == Framework::kJax) stream.must_finish = true;
  }
  static const nb::handle version = nb::make_tuple(1, 3).release();
  nb::object capsule;
  try {
    capsule = surviving_exit([&] {
      return on.is_none() ? method("max_version"_a = version)
                          : method("stream"_a = on, "max_version"_a = version);
    });
  } catch (nb::python_error& e) {
    if (e.matches(PyExc_TypeError)) {  // a producer from before DLPack 1.0
      capsule = surviving_exit([&] { return on.is_none() ? method() : method("stream"_a = on); });
    } else if (e.matches(PyExc_BufferError)) {  // a dtype that DLPack has no code for
      return;
    } else {
      throw;
    }
  }
  adopt(name, object, capsule);
}

void DlpackImport::adopt(const char* name, nb::handle object, nb::handle capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    versioned_.reset(static_cast<dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned")));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    if (versioned_->version.major != 1) {
      raise_not_a_tensor(name, object, " of another DLPack version");
    }
    tensor_ = &versioned_->tensor;
    read_only_ = (versioned_->flags & dlpack::kReadOnlyFlag) != 0;
    return;
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") == 0) raise_not_a_tensor(name, object);
  managed_.reset(
      static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor")));
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  tensor_ = &managed_->tensor;
}

}  // namespace flashplan
