// SPDX-License-Identifier: Apache-2.0
#include "bindings/tensors/producer.h"

#include <atomic>
#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>

#include "bindings/gil.h"
#include "bindings/tensors/stream.h"

namespace flashplan {
namespace {

using namespace nb::literals;

/// A type and the Producer that was found for it. Kept until the type is destroyed.
struct TypeFacts {
  std::atomic<PyTypeObject*> type{nullptr};  // null: this entry is free
  Producer producer;
};

TypeFacts known_types[16];

/// Frees the entry of a type when the type is destroyed, since another type may get its address.
/// Python calls it through the weak reference that remember_type() makes.
PyObject* forget_type(PyObject* index, PyObject* reference) {
  known_types[PyLong_AsLong(index)].type.store(nullptr, std::memory_order_release);
  Py_DECREF(reference);  // remember_type() kept this reference
  Py_RETURN_NONE;
}

void remember_type(std::size_t index, PyTypeObject* type, const Producer& producer) {
  static PyMethodDef method = {"forget_type", &forget_type, METH_O, nullptr};
  const nb::object number = nb::int_(index);
  const nb::object callback = nb::steal(PyCFunction_New(&method, number.ptr()));
  PyObject* reference = PyWeakref_NewRef(reinterpret_cast<PyObject*>(type),
                                         callback.ptr());  // forget_type() releases the reference
  if (reference == nullptr) throw nb::python_error();
  known_types[index].producer = producer;
  known_types[index].type.store(type, std::memory_order_release);
}

const dlpack::ExchangeApi* exchange_api(nb::handle type) {
  nb::object capsule = attribute(type, "__dlpack_c_exchange_api__");
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

/// Finds the framework by the packages of the type and its bases.
Framework framework_of(nb::handle type) {
  for (nb::handle base : nb::tuple(type.attr("__mro__"))) {
    nb::object module = attribute(base, "__module__");
    if (!nb::isinstance<nb::str>(module)) continue;
    const std::string name = nb::str(module).c_str();
    const std::string_view package = std::string_view(name).substr(0, name.find('.'));
    if (package == "torch") return Framework::kTorch;
    if (package == "cupy") return Framework::kCupy;
    if (package == "jax" || package == "jaxlib") return Framework::kJax;
  }
  return Framework::kOther;
}

/// Whether the type or one of its bases has this name.
bool is_called(nb::handle type, std::string_view name) {
  for (nb::handle base : nb::tuple(type.attr("__mro__"))) {
    if (nb::isinstance<nb::str>(base.attr("__name__")) &&
        nb::str(base.attr("__name__")).c_str() == name) {
      return true;
    }
  }
  return false;
}

Producer learn(PyTypeObject* type) {
  const nb::handle handle(reinterpret_cast<PyObject*>(type));
  const Framework framework = framework_of(handle);
  return {.framework = framework,
          .exchange = exchange_api(handle),
          .traced = framework == Framework::kJax && is_called(handle, "Tracer"),
          .masked = framework == Framework::kOther && is_called(handle, "MaskedArray")};
}

}  // namespace

void raise_type(const std::string& message) { throw nb::type_error(message.c_str()); }
void raise_value(const std::string& message) { throw nb::value_error(message.c_str()); }

nb::object attribute(nb::handle object, const char* name) {
  return attribute(object, nb::str(name));
}

nb::object attribute(nb::handle object, nb::handle name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value != nullptr) return nb::steal(value);
  nb::python_error error;
  if (!error.matches(PyExc_AttributeError)) throw error;
  return nb::none();
}

void raise_not_a_tensor(const char* name, nb::handle object, const std::string& why) {
  raise_type(std::string(name) + ": expected a tensor (with __dlpack__), got " +
             nb::type_name(object.type()).c_str() + why);
}

/// The first few types that are seen are remembered. Further types are looked up at each call.
Producer producer_of(PyTypeObject* type) {
  static nb::ft_mutex mutex;
  for (const TypeFacts& facts : known_types) {
    if (facts.type.load(std::memory_order_acquire) == type) return facts.producer;
  }
  const Producer producer = learn(type);  // outside the lock, because it runs Python code
  const nb::ft_lock_guard lock(mutex);
  for (std::size_t i = 0; i < std::size(known_types); ++i) {
    PyTypeObject* known = known_types[i].type.load(std::memory_order_relaxed);
    if (known == type) break;
    if (known != nullptr) continue;
    remember_type(i, type, producer);
    break;
  }
  return producer;
}

Device device_of(nb::handle object, const Producer& producer) {
  dlpack::DeviceId id{dlpack::kCpu, 0};
  if (producer.exchange != nullptr) {
    dlpack::Tensor tensor;
    if (producer.exchange->tensor_from_object(object.ptr(), &tensor) == 0) {
      id = tensor.device;
    } else {
      PyErr_Clear();
    }
  } else {
    nb::object method = attribute(object, "__dlpack_device__");
    if (PyCallable_Check(method.ptr()) == 0 || PyType_Check(object.ptr())) return {};
    const nb::object pair = surviving_exit([&] { return method(); });
    int type = 0;
    int index = 0;
    if (PyTuple_Check(pair.ptr()) == 0 || PyArg_ParseTuple(pair.ptr(), "ii", &type, &index) == 0) {
      PyErr_Clear();  // the import will say what is wrong with the object
      return {};
    }
    id = {type, index};
  }
  return to_device(id).value_or(Device{});
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
  if (producer.traced) {
    raise_type(
        std::string(name) +
        ": expected an array with values (under jit and vmap call flashplan.jax.run), got one "
        "that JAX traces");
  }
  if (producer.masked) {
    raise_type(std::string(name) +
               ": expected an array without a mask (such as its filled()), got a MaskedArray");
  }
  static const nb::handle method_name = PyUnicode_InternFromString("__dlpack__");  // made once
  nb::object method = attribute(object, method_name);
  if (PyCallable_Check(method.ptr()) == 0 || PyType_Check(object.ptr())) return;
  // A framework with a current stream has made the tensor ready on that stream. Other frameworks
  // get the stream of this call, and make it wait for their work.
  const bool has_current_stream =
      producer.framework == Framework::kTorch || producer.framework == Framework::kCupy;
  nb::object on = nb::none();
  if (has_current_stream) {
    on = nb::int_(-1);
  } else if (stream.on_cuda() && device_of(object, producer).type == DeviceType::kCuda) {
    on = nb::int_(stream.dlpack());
    stream.waits_for_producer = true;
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
    } else if (e.matches(PyExc_BufferError)) {  // such as a dtype that DLPack has no code for
      refusal_ = nb::borrow(e.value());
      return;
    } else {
      throw;
    }
  }
  adopt(name, object, capsule);
}

std::string DlpackImport::refusal() const {
  if (!refusal_.is_valid()) return "";
  return std::string(" that refuses to be exported (") + nb::str(refusal_).c_str() + ")";
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
