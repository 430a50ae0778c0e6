// SPDX-License-Identifier: Apache-2.0
#include "tensor.h"

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string>

#include "dlpack.h"

namespace flashplan {
namespace {

using namespace nb::literals;

/// What is known of a Python type.
struct TypeFacts {
  std::atomic<PyTypeObject*> type{nullptr};
  const dlpack::ExchangeApi* exchange = nullptr;
  bool immutable = false;  // JAX: writing through DLPack would break its promises
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

bool starts_with(const std::string& text, const char* prefix) {
  return text.compare(0, std::strlen(prefix), prefix) == 0;
}

void learn(TypeFacts& facts, PyTypeObject* type) {
  const nb::handle handle(reinterpret_cast<PyObject*>(type));
  facts.exchange = exchange_api(handle);
  nb::object module = nb::getattr(handle, "__module__", nb::str(""));
  facts.immutable =
      nb::isinstance<nb::str>(module) && starts_with(std::string(nb::str(module).c_str()), "jax");
  Py_INCREF(handle.ptr());  // the address stays this type's
  facts.type.store(type, std::memory_order_release);
}

/// Facts of the first few types seen; further types are looked up each time.
const TypeFacts& facts_of(PyTypeObject* type, TypeFacts& uncached) {
  static TypeFacts cache[16];
  static nb::ft_mutex mutex;
  for (const TypeFacts& facts : cache) {
    PyTypeObject* known = facts.type.load(std::memory_order_acquire);
    if (known == type) return facts;
    if (known == nullptr) break;
  }
  const nb::ft_lock_guard lock(mutex);
  for (TypeFacts& facts : cache) {
    PyTypeObject* known = facts.type.load(std::memory_order_relaxed);
    if (known == nullptr) learn(facts, type);
    if (known == nullptr || known == type) return facts;
  }
  learn(uncached, type);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
  return uncached;
}

std::string name_of(const dlpack::DataType& dtype) {
  static constexpr const char* kNames[] = {"int",    "uint",    "float", "handle",
                                           "bfloat", "complex", "bool"};
  const char* kind = dtype.code < std::size(kNames) ? kNames[dtype.code] : "another kind of float";
  char name[48];
  std::snprintf(name, sizeof(name), "%s%d%s", kind, dtype.bits, dtype.lanes == 1 ? "" : " vectors");
  return name;
}

bool to_dtype(const dlpack::DataType& from, DType* to) {
  const auto is = [&](uint8_t code, uint8_t bits) {
    return from.code == code && from.bits == bits;
  };
  if (from.lanes != 1) return false;
  if (is(dlpack::kFloat, 32)) return *to = DType::kFloat32, true;
  if (is(dlpack::kFloat, 16)) return *to = DType::kFloat16, true;
  if (is(dlpack::kBfloat, 16)) return *to = DType::kBFloat16, true;
  if (is(dlpack::kFloat8E4M3fn, 8)) return *to = DType::kFloat8E4M3, true;
  if (is(dlpack::kFloat8E5M2, 8)) return *to = DType::kFloat8E5M2, true;
  if (is(dlpack::kInt, 32)) return *to = DType::kInt32, true;
  return false;
}

[[noreturn]] void raise_type(const std::string& message) { throw nb::type_error(message.c_str()); }
[[noreturn]] void raise_value(const std::string& message) {
  throw nb::value_error(message.c_str());
}

[[noreturn]] void raise_not_a_tensor(const char* name, nb::handle object, const char* why = "") {
  raise_type(std::string(name) + ": expected a tensor (with __dlpack__), got " +
             nb::type_name(object.type()).c_str() + why);
}

const char* to_name(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kFloat8E5M2: return "float8_e5m2";
    default: return "another dtype";
  }
}

void check_kind(const char* name, TensorKind kind, DType dtype, const std::string& dtype_name) {
  if ((kind == TensorKind::kInt32) == (dtype == DType::kInt32)) return;
  raise_type(std::string(name) + ": expected " +
             (kind == TensorKind::kInt32 ? "dtype int32" : "a float dtype") + ", got " +
             dtype_name);
}

/// Fills a view from a DLPack tensor.
void fill(const char* name, const dlpack::Tensor& t, TensorKind kind, const DType* stored_as,
          TensorView* view) {
  DType dtype = DType::kFloat32;
  const bool is_raw = stored_as != nullptr && t.dtype.code == dlpack::kUInt && t.dtype.lanes == 1 &&
                      t.dtype.bits == 8 * item_size(*stored_as) && t.dtype.bits <= 16;
  if (is_raw) {
    dtype = *stored_as;
  } else if (!to_dtype(t.dtype, &dtype)) {
    raise_type(std::string(name) + ": expected " +
               (kind == TensorKind::kInt32
                    ? "dtype int32"
                    : "float32, float16, bfloat16, float8_e4m3fn or float8_e5m2") +
               ", got " + name_of(t.dtype));
  }
  check_kind(name, kind, dtype, name_of(t.dtype));
  if (t.ndim > kMaxRank || t.ndim < 1) {
    raise_value(std::string(name) + ": expected 1 to " + std::to_string(kMaxRank) +
                " dimensions, got " + std::to_string(t.ndim));
  }
  view->dtype = dtype;
  view->data = t.data == nullptr ? nullptr : static_cast<char*>(t.data) + t.byte_offset;
  const bool on_host = t.device.type == dlpack::kCpu || t.device.type == dlpack::kCudaHost;
  view->device = {on_host ? DeviceType::kCpu : DeviceType::kCuda, on_host ? 0 : t.device.index};
  view->rank = t.ndim;
  int64_t contiguous = 1;
  for (int32_t d = t.ndim - 1; d >= 0; --d) {
    view->shape[d] = t.shape[d];
    view->stride[d] = t.strides != nullptr ? t.strides[d] : contiguous;
    contiguous *= t.shape[d];
  }
}

}  // namespace

TensorArg::TensorArg(const char* name, nb::handle object, TensorKind kind, const DType* stored_as,
                     Access access) {
  if (object.is_none()) return;
  TypeFacts uncached;
  const TypeFacts& facts = facts_of(Py_TYPE(object.ptr()), uncached);
  if (facts.exchange != nullptr) {
    dlpack::Tensor tensor;
    if (facts.exchange->tensor_from_object(object.ptr(), &tensor) != 0) {
      PyErr_Clear();
      raise_not_a_tensor(name, object, " without storage (a meta, fake or sparse tensor?)");
    }
    fill(name, tensor, kind, stored_as, &view_);
  } else if (!import_dlpack(name, object, kind, stored_as) &&
             !import_array_interface(name, object)) {
    raise_not_a_tensor(name, object);
  }
  check_kind(name, kind, view_.dtype, to_name(view_.dtype));
  if (access == Access::kWrite && facts.immutable) {
    raise_type(std::string(name) + ": expected a writable tensor, got a JAX array");
  }
}

bool TensorArg::import_dlpack(const char* name, nb::handle object, TensorKind kind,
                              const DType* stored_as) {
  nb::object method = nb::getattr(object, "__dlpack__", nb::none());
  if (method.is_none() || PyType_Check(object.ptr())) return false;
  static const nb::handle version = nb::make_tuple(1, 3).release();
  nb::object capsule;
  try {
    capsule = method("max_version"_a = version);
  } catch (nb::python_error& e) {
    if (e.matches(PyExc_TypeError)) {  // a producer from before DLPack 1.0
      capsule = method();
    } else if (e.matches(PyExc_BufferError)) {  // a dtype that DLPack has no code for
      return false;
    } else {
      throw;
    }
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    managed_.tensor = PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned");
    managed_.versioned = true;
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    const auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(managed_.tensor);
    if (managed->version.major != 1) raise_not_a_tensor(name, object, " of another DLPack version");
    fill(name, managed->tensor, kind, stored_as, &view_);
    view_.read_only = (managed->flags & dlpack::kReadOnlyFlag) != 0;
    return true;
  }
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor")) raise_not_a_tensor(name, object);
  managed_.tensor = PyCapsule_GetPointer(capsule.ptr(), "dltensor");
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  fill(name, static_cast<dlpack::ManagedTensor*>(managed_.tensor)->tensor, kind, stored_as, &view_);
  return true;
}

bool TensorArg::import_array_interface(const char* name, nb::handle object) {
  nb::object interface = nb::getattr(object, "__array_interface__", nb::none());
  if (!nb::isinstance<nb::dict>(interface)) return false;
  const nb::str dtype_name(
      nb::getattr(nb::getattr(object, "dtype", nb::none()), "name", nb::str("")));
  const std::string text = dtype_name.c_str();
  if (text == "bfloat16") {
    view_.dtype = DType::kBFloat16;
  } else if (text == "float8_e4m3fn") {
    view_.dtype = DType::kFloat8E4M3;
  } else if (text == "float8_e5m2") {
    view_.dtype = DType::kFloat8E5M2;
  } else {
    raise_type(std::string(name) +
               ": expected float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int32, got " +
               text + " stored as " + nb::str(interface["typestr"]).c_str());
  }
  const nb::tuple shape(interface["shape"]);
  const nb::tuple data(interface["data"]);
  nb::object strides(interface["strides"]);
  const size_t rank = nb::len(shape);
  if (rank < 1 || rank > static_cast<size_t>(kMaxRank)) {
    raise_value(std::string(name) + ": expected 1 to " + std::to_string(kMaxRank) +
                " dimensions, got " + std::to_string(rank));
  }
  view_.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(data[0]));
  view_.read_only = nb::cast<bool>(data[1]);
  view_.rank = static_cast<int32_t>(rank);
  int64_t contiguous = 1;
  for (size_t d = rank; d-- > 0;) {
    view_.shape[d] = nb::cast<int64_t>(shape[d]);
    view_.stride[d] =
        strides.is_none() ? contiguous : nb::cast<int64_t>(strides[d]) / item_size(view_.dtype);
    contiguous *= view_.shape[d];
  }
  return true;
}

ManagedMemory::~ManagedMemory() {
  if (tensor == nullptr) return;
  if (versioned) {
    auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(tensor);
    if (managed->deleter != nullptr) managed->deleter(managed);
  } else {
    auto* managed = static_cast<dlpack::ManagedTensor*>(tensor);
    if (managed->deleter != nullptr) managed->deleter(managed);
  }
}

BytesArg::BytesArg(const char* name, nb::handle object) {
  nb::object interface = nb::getattr(object, "__array_interface__", nb::none());
  if (!interface.is_none()) {
    const nb::tuple memory(interface["data"]);
    if (nb::cast<bool>(memory[1])) {
      raise_type(std::string(name) + ": expected a writable tensor, got a read-only one");
    }
    if (!nb::object(interface["strides"]).is_none()) {
      raise_value(std::string(name) + ": expected contiguous memory, got strides");
    }
    data = reinterpret_cast<void*>(nb::cast<uintptr_t>(memory[0]));
    size = nb::cast<size_t>(object.attr("nbytes"));
    return;
  }
  if (!nb::hasattr(object, "data_ptr") || !nb::hasattr(object, "is_contiguous")) {
    raise_not_a_tensor(name, object, " (workspaces come from NumPy or PyTorch)");
  }
  const nb::object device_object = object.attr("device");
  const std::string device = nb::str(nb::handle(device_object)).c_str();
  if (device != "cpu") {
    raise_type(std::string(name) + ": expected a tensor on cpu, got one on " + device);
  }
  if (!nb::cast<bool>(object.attr("is_contiguous")())) {
    raise_value(std::string(name) + ": expected contiguous memory, got strides");
  }
  data = reinterpret_cast<void*>(nb::cast<uintptr_t>(object.attr("data_ptr")()));
  size = nb::cast<size_t>(object.attr("nbytes"));
}

IntsArg::IntsArg(const char* name, nb::handle object, std::vector<int32_t>& buffer) {
  const bool is_list = PyList_Check(object.ptr()) != 0;
  if (!is_list && PyTuple_Check(object.ptr()) == 0) {
    const TensorArg tensor(name, object, TensorKind::kInt32);
    const TensorView& view = tensor.view();
    if (view.rank != 1) {
      raise_value(std::string(name) + ": expected one dimension, got " + std::to_string(view.rank));
    }
    if (view.device.type != DeviceType::kCpu) {
      raise_type(std::string(name) + ": expected host memory, got a tensor on cuda:" +
                 std::to_string(view.device.index));
    }
    if (view.shape[0] > INT_MAX) raise_value(std::string(name) + ": expected fewer entries");
    // Copied: the tensor's memory may be the caller's only while it is imported.
    size = static_cast<int32_t>(view.shape[0]);
    buffer.resize(static_cast<size_t>(size));
    const auto* from = static_cast<const int32_t*>(view.data);
    for (int32_t i = 0; i < size; ++i) buffer[static_cast<size_t>(i)] = from[i * view.stride[0]];
    data = buffer.data();
    return;
  }
  const Py_ssize_t count = is_list ? PyList_Size(object.ptr()) : PyTuple_Size(object.ptr());
  buffer.resize(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = is_list ? PyList_GetItem(object.ptr(), i) : PyTuple_GetItem(object.ptr(), i);
    int overflow = 0;
    const long long value = PyIndex_Check(item) != 0 ? PyLong_AsLongLongAndOverflow(item, &overflow)
                                                     : (PyErr_Clear(), -1);
    const auto where = [&] { return std::string(name) + "[" + std::to_string(i) + "]"; };
    if (PyIndex_Check(item) == 0 || (value == -1 && PyErr_Occurred() != nullptr)) {
      PyErr_Clear();
      raise_type(where() + ": expected an int, got " +
                 nb::type_name(nb::handle(item).type()).c_str());
    }
    if (overflow != 0 || value > INT_MAX || value < INT_MIN) {
      raise_value(where() + ": expected an int32, got " + nb::str(nb::handle(item)).c_str());
    }
    buffer[static_cast<size_t>(i)] = static_cast<int32_t>(value);
  }
  data = buffer.data();
  size = static_cast<int32_t>(count);
}

float float_arg(const char* name, nb::handle object) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_type(std::string(name) + ": expected a number, got " +
               nb::type_name(object.type()).c_str());
  }
  return static_cast<float>(value);
}

}  // namespace flashplan
