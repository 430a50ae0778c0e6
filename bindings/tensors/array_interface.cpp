// SPDX-License-Identifier: Apache-2.0
#include "bindings/tensors/array_interface.h"

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>

#include "bindings/tensors/dlpack_view.h"
#include "bindings/tensors/producer.h"
#include "bindings/tensors/stream.h"

namespace flashplan {
namespace {

/// Reads the dictionary __array_interface__ of an object. Its entries may have any type, so each is
/// checked.
class Answers {
 public:
  Answers(const char* name, nb::handle interface) : name_(name), interface_(interface) {}

  /// An entry of the dictionary, None if there is none.
  nb::object entry(const char* key) const {
    PyObject* value = PyDict_GetItemString(interface_.ptr(), key);  // a borrowed reference
    return value != nullptr ? nb::borrow(value) : nb::none();
  }

  nb::object tuple(const char* key) const {
    nb::object value = entry(key);
    if (PyTuple_Check(value.ptr()) == 0) raise_malformed(key, value);
    return value;
  }

  int64_t integer(const char* key, nb::handle tuple, Py_ssize_t i) const {
    PyObject* item = PyTuple_GetItem(tuple.ptr(), i);  // a borrowed reference
    const int64_t value =
        item != nullptr && PyLong_Check(item) != 0 ? PyLong_AsLongLong(item) : kNoInteger;
    if (value < 0 && PyErr_Occurred() != nullptr) PyErr_Clear();
    if (item == nullptr || PyLong_Check(item) == 0) raise_malformed(key, tuple);
    return value;
  }

  void* pointer(nb::handle data) const {
    PyObject* item = PyTuple_Size(data.ptr()) == 2 ? PyTuple_GetItem(data.ptr(), 0) : nullptr;
    if (item == nullptr || PyLong_Check(item) == 0) raise_malformed("data", data);
    const unsigned long long address = PyLong_AsUnsignedLongLong(item);
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      raise_malformed("data", data);
    }
    return reinterpret_cast<void*>(static_cast<uintptr_t>(address));
  }

  std::string text(const char* key) const {
    nb::object value = entry(key);
    if (!nb::isinstance<nb::str>(value)) raise_malformed(key, value);
    return nb::borrow<nb::str>(value).c_str();
  }

  [[noreturn]] void raise_malformed(const char* key, nb::handle value) const {
    raise_type(std::string(name_) + ": expected an __array_interface__ of version 3, got '" + key +
               "' " + nb::repr(value).c_str());
  }

 private:
  static constexpr int64_t kNoInteger = -1;

  const char* name_;
  nb::handle interface_;
};

std::string dtype_name_of(nb::handle object) {
  nb::object name = attribute(attribute(object, "dtype"), "name");
  return nb::isinstance<nb::str>(name) ? nb::borrow<nb::str>(name).c_str() : "another dtype";
}

std::optional<DType> to_dtype(const std::string& name) {
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float8_e4m3fn") return DType::kFloat8E4M3;
  if (name == "float8_e5m2") return DType::kFloat8E5M2;
  return std::nullopt;
}

[[noreturn]] void raise_dtype(const char* name, const std::string& dtype,
                              const std::string& typestr) {
  raise_type(std::string(name) +
             ": expected a dtype of numbers in the byte order of this machine, got " + dtype +
             " stored as " + typestr);
}

}  // namespace

ArrayInterface::ArrayInterface(const char* name, nb::handle object) {
  nb::object found = attribute(object, "__array_interface__");
  if (PyDict_Check(found.ptr()) == 0 || PyType_Check(object.ptr()) != 0) return;
  const Answers answers(name, found);
  const std::string typestr = answers.text("typestr");
  const char foreign = std::endian::native == std::endian::little ? '>' : '<';
  if (typestr.rfind(foreign, 0) == 0) {
    raise_type(std::string(name) + ": expected the byte order of this machine, got " + typestr);
  }
  const nb::object shape = answers.tuple("shape");
  const auto rank = static_cast<int32_t>(PyTuple_Size(shape.ptr()));
  if (rank < 1 || rank > kMaxRank) {
    raise_value(std::string(name) + ": expected 1 to " + std::to_string(kMaxRank) +
                " dimensions, got " + std::to_string(rank));
  }
  const std::string dtype_name = dtype_name_of(object);
  const int64_t item = typestr.size() > 2 ? std::strtoll(typestr.c_str() + 2, nullptr, 10) : 0;
  if (item < 1) raise_dtype(name, dtype_name, typestr);
  const bool is_contiguous = answers.entry("strides").is_none();
  const nb::object strides = is_contiguous ? nb::none() : answers.tuple("strides");
  if (!is_contiguous && PyTuple_Size(strides.ptr()) != rank) {
    answers.raise_malformed("strides", strides);
  }
  view.rank = rank;
  for (int32_t d = rank - 1; d >= 0; --d) {
    view.shape[d] = answers.integer("shape", shape, d);
    if (is_contiguous) continue;
    const int64_t bytes = answers.integer("strides", strides, d);
    if (bytes % item != 0) {
      raise_value(std::string(name) + ": expected strides of whole elements (" +
                  std::to_string(item) + " bytes), got " + std::to_string(bytes) +
                  " bytes in dim " + std::to_string(d));
    }
    view.stride[d] = bytes / item;
  }
  if (is_contiguous) set_contiguous_strides(name, &view);
  const std::optional<DType> dtype = to_dtype(dtype_name);
  if (!dtype || item_size(*dtype) != item) raise_dtype(name, dtype_name, typestr);
  view.dtype = *dtype;
  const nb::object data = answers.tuple("data");
  view.data = answers.pointer(data);
  view.read_only = PyObject_IsTrue(PyTuple_GetItem(data.ptr(), 1)) != 0;
  interface = std::move(found);
}

nb::object plain_array(nb::handle object) {
  const nb::object numpy = module_if_imported("numpy");
  if (!numpy.is_valid()) return {};
  const nb::object type = attribute(numpy, "ndarray");
  if (PyType_Check(type.ptr()) == 0 || PyObject_IsInstance(object.ptr(), type.ptr()) != 1) {
    PyErr_Clear();
    return {};
  }
  return type.attr("view")(object, type);
}

}  // namespace flashplan
