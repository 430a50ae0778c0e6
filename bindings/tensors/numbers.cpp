// SPDX-License-Identifier: Apache-2.0
#include "bindings/tensors/numbers.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings/gil.h"
#include "bindings/tensors/array_interface.h"
#include "bindings/tensors/dlpack_view.h"
#include "bindings/tensors/producer.h"
#include "bindings/tensors/stream.h"
#include "bindings/tensors/tensor.h"
#include "checks/memory_checks.h"
#include "common/error.h"

namespace flashplan {
namespace {

[[noreturn]] void raise_not_integers(const char* name, const std::string& got) {
  raise_type(std::string(name) + ": expected an integer dtype, got " + got);
}

/// Reads a tensor of integers, of any integer dtype and strides. The constructor raises TypeError
/// or ValueError if the tensor is not in host memory, or has another dtype or shape than expected.
class HostIntegers {
 public:
  HostIntegers(const char* name, const dlpack::Tensor& tensor, int32_t columns)
      : name_(name), dtype_(tensor.dtype), columns_(std::max(columns, 1)) {
    check_dtype();
    TensorView view;
    fill_dims(name, tensor, &view);
    check_shape(view, columns);
    const std::optional<Device> device = to_device(tensor.device);
    if (device != Device{}) {
      raise_type(std::string(name) + ": expected host memory, got a tensor on " +
                 (device ? "cuda:" + std::to_string(device->index) : "another device"));
    }
    view.data =
        tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
    to_elements_of_bytes(&view);
    check(check_memory({name, view}));
    data_ = static_cast<const char*>(view.data);
    size_ = view.shape[0];
    stride_ = view.stride[0];
    if (columns > 0) column_stride_ = view.stride[1];
  }

  int64_t size() const noexcept { return size_; }

  /// Copies all integers, one row after the other. Raises ValueError, naming the index, for an
  /// integer beyond int32.
  void copy_to(int32_t* to) const {
    const bool is_signed = dtype_.code == dlpack::kInt;
    switch (dtype_.bits) {
      case 8: return is_signed ? copy<int8_t>(to) : copy<uint8_t>(to);
      case 16: return is_signed ? copy<int16_t>(to) : copy<uint16_t>(to);
      case 32: return is_signed ? copy<int32_t>(to) : copy<uint32_t>(to);
      default: return is_signed ? copy<int64_t>(to) : copy<uint64_t>(to);
    }
  }

 private:
  void check_dtype() const {
    const bool is_integer = dtype_.code == dlpack::kInt || dtype_.code == dlpack::kUInt;
    const bool has_size =
        dtype_.bits == 8 || dtype_.bits == 16 || dtype_.bits == 32 || dtype_.bits == 64;
    if (!is_integer || !has_size || dtype_.lanes != 1) raise_not_integers(name_, name_of(dtype_));
  }

  void check_shape(const TensorView& view, int32_t columns) const {
    if (columns == 0 && view.rank != 1) {
      raise_value(std::string(name_) + ": expected one dimension, got " +
                  std::to_string(view.rank));
    }
    if (columns > 0 && (view.rank != 2 || view.shape[1] != columns)) {
      std::string shape;
      for (int32_t d = 0; d < view.rank; ++d) {
        shape += (d > 0 ? ", " : "") + std::to_string(view.shape[d]);
      }
      raise_value(std::string(name_) + ": expected shape [n, " + std::to_string(columns) +
                  "], got [" + shape + "]");
    }
  }

  /// Turns each integer into a row of bytes, with strides in bytes, so that check_memory() can take
  /// the view: not every integer dtype is a DType.
  void to_elements_of_bytes(TensorView* view) const {
    const int64_t item = dtype_.bits / 8;
    for (int32_t d = 0; d < view->rank; ++d) {
      if (__builtin_mul_overflow(view->stride[d], item, &view->stride[d])) {
        raise_value(std::string(name_) +
                    ": expected elements within the address space, got a stride of more");
      }
    }
    view->dtype = DType::kFloat8E4M3;  // any DType of one byte
    view->shape[view->rank] = item;
    view->stride[view->rank] = 1;
    ++view->rank;
  }

  template <class T>
  void copy(int32_t* to) const {
    constexpr int64_t kItem = sizeof(T);
    const bool is_contiguous =
        stride_ == columns_ * kItem && (columns_ == 1 || column_stride_ == kItem);
    if (std::is_same_v<T, int32_t> && is_contiguous) {
      if (size_ > 0) std::memcpy(to, data_, static_cast<size_t>(size_ * columns_ * kItem));
      return;
    }
    for (int64_t n = 0; n < size_ * columns_; ++n) {
      const int64_t i = n / columns_;
      T value;  // copied by memcpy, because it may be misaligned
      std::memcpy(&value, data_ + i * stride_ + n % columns_ * column_stride_, sizeof(T));
      if (!std::in_range<int32_t>(value)) {
        raise_value(std::string(name_) + "[" + std::to_string(i) + "]: expected an int32, got " +
                    std::to_string(value));
      }
      to[n] = static_cast<int32_t>(value);
    }
  }

  const char* name_;
  dlpack::DataType dtype_;
  int64_t columns_;
  const char* data_ = nullptr;
  int64_t size_ = 0;    // number of rows
  int64_t stride_ = 0;  // bytes from one row to the next; column_stride_ is in bytes too
  int64_t column_stride_ = 0;
};

int32_t to_int32(const std::string& name, Py_ssize_t i, nb::handle item) {
  const auto where = [&] { return name + "[" + std::to_string(i) + "]"; };
  const auto raise_no_int = [&] {
    raise_type(where() + ": expected an int, got " + nb::type_name(item.type()).c_str());
  };
  if (PyIndex_Check(item.ptr()) == 0) raise_no_int();
  int overflow = 0;
  const long long value =
      surviving_exit([&] { return PyLong_AsLongLongAndOverflow(item.ptr(), &overflow); });
  if (value == -1 && PyErr_Occurred() != nullptr) {
    nb::python_error error;
    if (!error.matches(PyExc_TypeError)) throw error;
    raise_no_int();
  }
  if (overflow != 0 || value > INT_MAX || value < INT_MIN) {
    raise_value(where() + ": expected an int32, got " + nb::str(item).c_str());
  }
  return static_cast<int32_t>(value);
}

/// Reads a list or tuple of integers. Converting an item may run Python code, which may shorten the
/// list, so get() checks that each item still exists.
class Items {
 public:
  Items(std::string name, nb::handle object)
      : name_(std::move(name)),
        object_(object),
        is_list_(PyList_Check(object.ptr()) != 0),
        count_(is_list_ ? PyList_Size(object.ptr()) : PyTuple_Size(object.ptr())) {}

  static bool accepts(nb::handle object) {
    return PyList_Check(object.ptr()) != 0 || PyTuple_Check(object.ptr()) != 0;
  }

  Py_ssize_t count() const { return count_; }

  nb::object get(Py_ssize_t i) const {
    nb::object item =
        nb::borrow(is_list_ ? PyList_GetItem(object_.ptr(), i) : PyTuple_GetItem(object_.ptr(), i));
    if (!item.is_valid()) {
      PyErr_Clear();
      raise_value(name_ + ": expected a list that stays as it is, got one of " +
                  std::to_string(PyList_Size(object_.ptr())) + " entries after " +
                  std::to_string(count_));
    }
    return item;
  }

  int32_t get_int(Py_ssize_t i) const { return to_int32(name_, i, get(i)); }

 private:
  const std::string name_;
  const nb::handle object_;
  const bool is_list_;
  const Py_ssize_t count_;
};

/// Copies row `i` of a list of rows.
void read_row(const char* name, Py_ssize_t i, nb::handle row, int32_t columns, int32_t* to) {
  const std::string where = std::string(name) + "[" + std::to_string(i) + "]";
  if (!Items::accepts(row)) {
    raise_type(where + ": expected a list or tuple, got " + nb::type_name(row.type()).c_str());
  }
  const Items items(where, row);
  if (items.count() != columns) {
    raise_value(where + ": expected " + std::to_string(columns) + " integers, got " +
                std::to_string(items.count()));
  }
  for (int32_t c = 0; c < columns; ++c) to[c] = items.get_int(c);
}

}  // namespace

IntsArg::IntsArg(const char* name, nb::handle object, int64_t max_size, const char* limit,
                 std::vector<int32_t>& buffer, int32_t columns) {
  const auto resize = [&](int64_t count) {
    if (count > max_size) {
      raise_value(std::string(name) + ": expected <= " + std::to_string(max_size) + " entries (" +
                  limit + "), got " + std::to_string(count));
    }
    size = static_cast<int32_t>(count);
    buffer.resize(static_cast<size_t>(count) * static_cast<size_t>(std::max(columns, 1)));
    data = buffer.data();
  };
  nb::object numbers_of_range;
  if (PyRange_Check(object.ptr())) {
    const Py_ssize_t count = PyObject_Length(object.ptr());
    if (count < 0) PyErr_Clear();  // the range is longer than any list
    resize(count < 0 ? PY_SSIZE_T_MAX : count);
    numbers_of_range = nb::steal(PySequence_List(object.ptr()));
    if (!numbers_of_range.is_valid()) throw nb::python_error();
    object = numbers_of_range;
  }
  if (!Items::accepts(object)) {
    CallStream host;
    const DlpackImport import(name, object, producer_of(object), host);
    if (import.tensor() == nullptr) {
      const ArrayInterface array(name, object);
      if (!array.found()) {
        raise_type(std::string(name) + ": expected a list or a tensor of integers, got " +
                   nb::type_name(object.type()).c_str() + import.refusal());
      }
      raise_not_integers(name, to_string(array.view.dtype));
    }
    const HostIntegers integers(name, *import.tensor(), columns);
    resize(integers.size());
    integers.copy_to(buffer.data());
    return;
  }
  const Items items(name, object);
  resize(items.count());
  for (Py_ssize_t i = 0; i < items.count(); ++i) {
    if (columns == 0) {
      buffer[static_cast<size_t>(i)] = items.get_int(i);
    } else {
      read_row(name, i, items.get(i), columns, &buffer[static_cast<size_t>(i * columns)]);
    }
  }
}

void check_indptr_size(const char* name, const IntsArg& indptr, const IntsArg& lens) {
  if (indptr.size == lens.size + 1) return;
  raise_value(std::string(name) + ": expected " + std::to_string(lens.size + 1) +
              " entries (one more than kv_lens), got " + std::to_string(indptr.size));
}

float float_arg(const char* name, nb::handle object) {
  if (PyFloat_Check(object.ptr()) == 0) check_number_without_gradient(name, object);
  const double value = surviving_exit([&] { return PyFloat_AsDouble(object.ptr()); });
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    nb::python_error error;
    if (error.matches(PyExc_OverflowError)) {
      raise_value(std::string(name) + ": expected a float32, got a larger number");
    }
    if (!error.matches(PyExc_TypeError)) throw error;
    raise_type(std::string(name) + ": expected a number, got " +
               nb::type_name(object.type()).c_str());
  }
  return static_cast<float>(value);
}

bool bool_arg(const char* name, nb::handle object) {
  if (PyBool_Check(object.ptr()) == 0) {
    const std::string type = nb::str(object.type().attr("__name__")).c_str();
    if (type != "bool" && type != "bool_") {
      raise_type(std::string(name) + ": expected a bool, got " + type);
    }
  }
  return PyObject_IsTrue(object.ptr()) == 1;
}

}  // namespace flashplan
