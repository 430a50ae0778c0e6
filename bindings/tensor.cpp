// SPDX-License-Identifier: Apache-2.0
#include "tensor.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <string>

#include "dlpack.h"

namespace flashplan {
namespace {

using namespace nb::literals;

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

const char* to_name(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kFloat8E5M2: return "float8_e5m2";
    default: return "another dtype";
  }
}

bool is_of_kind(TensorKind kind, DType dtype) {
  return (kind == TensorKind::kInt32) == (dtype == DType::kInt32);
}

[[noreturn]] void raise_wrong_kind(const char* name, TensorKind kind, const std::string& got) {
  raise_type(std::string(name) + ": expected " +
             (kind == TensorKind::kInt32 ? "dtype int32" : "a float dtype") + ", got " + got);
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
  if (!is_of_kind(kind, dtype)) raise_wrong_kind(name, kind, name_of(t.dtype));
  if (t.ndim > kMaxRank || t.ndim < 1) {
    raise_value(std::string(name) + ": expected 1 to " + std::to_string(kMaxRank) +
                " dimensions, got " + std::to_string(t.ndim));
  }
  view->dtype = dtype;
  view->data = t.data == nullptr ? nullptr : static_cast<char*>(t.data) + t.byte_offset;
  view->device = to_device(t.device);
  view->rank = t.ndim;
  int64_t contiguous = 1;
  for (int32_t d = t.ndim - 1; d >= 0; --d) {
    view->shape[d] = t.shape[d];
    view->stride[d] = t.strides != nullptr ? t.strides[d] : contiguous;
    contiguous *= t.shape[d];
  }
}

}  // namespace

TensorArg::TensorArg(const char* name, nb::handle object, TensorKind kind, CallStream& stream,
                     const DType* stored_as, Access access) {
  if (object.is_none()) return;
  const Producer producer = producer_of(object);
  dlpack_.emplace(name, object, producer, stream);
  if (dlpack_->tensor() != nullptr) {
    fill(name, *dlpack_->tensor(), kind, stored_as, &view_);
    view_.read_only = dlpack_->read_only();
  } else {
    if (!import_array_interface(name, object)) raise_not_a_tensor(name, object);
    if (!is_of_kind(kind, view_.dtype)) raise_wrong_kind(name, kind, to_name(view_.dtype));
  }
  if (access == Access::kWrite && producer.immutable()) {
    raise_type(std::string(name) + ": expected a writable tensor, got a JAX array");
  }
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

IntsArg::IntsArg(const char* name, nb::handle object, std::vector<int32_t>& buffer) {
  const bool is_list = PyList_Check(object.ptr()) != 0;
  if (!is_list && PyTuple_Check(object.ptr()) == 0) {
    CallStream host;
    const TensorArg tensor(name, object, TensorKind::kInt32, host);
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
    if (view.stride[0] == 1) {
      std::copy_n(from, size, buffer.data());
    } else {
      for (int32_t i = 0; i < size; ++i) buffer[static_cast<size_t>(i)] = from[i * view.stride[0]];
    }
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
