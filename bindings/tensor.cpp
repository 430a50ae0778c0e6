// SPDX-License-Identifier: Apache-2.0
#include "tensor.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "api/memory_checks.h"
#include "array_interface.h"
#include "dlpack.h"
#include "gil.h"

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
  if (is(dlpack::kInt, 64)) return *to = DType::kInt64, true;
  if (is(dlpack::kUInt, 32)) return *to = DType::kUInt32, true;
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
  const bool is_int = dtype == DType::kInt32 || dtype == DType::kInt64;
  switch (kind) {
    case TensorKind::kInt32: return dtype == DType::kInt32;
    case TensorKind::kInt64: return dtype == DType::kInt64;
    case TensorKind::kInt: return is_int;
    case TensorKind::kUInt32: return dtype == DType::kUInt32;
    default: return !is_int && dtype != DType::kUInt32;
  }
}

const char* to_text(TensorKind kind) {
  switch (kind) {
    case TensorKind::kInt32: return "dtype int32";
    case TensorKind::kInt64: return "dtype int64";
    case TensorKind::kInt: return "dtype int32 or int64";
    case TensorKind::kUInt32: return "dtype uint32";
    default: return "a float dtype";
  }
}

[[noreturn]] void raise_wrong_kind(const char* name, TensorKind kind, const std::string& got) {
  raise_type(std::string(name) + ": expected " + to_text(kind) + ", got " + got);
}

/// Turns a view with strides in elements into one row of bytes.
void to_bytes(const char* name, int64_t bits, TensorView* view) {
  int64_t count = bits / 8;
  TensorView contiguous = *view;
  set_contiguous_strides(name, &contiguous);
  for (int32_t d = 0; d < view->rank; ++d) {
    if (view->shape[d] > 1 && view->stride[d] != contiguous.stride[d] && has_elements(*view)) {
      raise_value(std::string(name) + ": expected contiguous memory, got strides");
    }
    if (view->shape[d] < 0 || __builtin_mul_overflow(count, view->shape[d], &count)) {
      raise_value(std::string(name) + ": expected sizes that memory can have, got " +
                  std::to_string(view->shape[d]) + " in dim " + std::to_string(d));
    }
  }
  const bool read_only = view->read_only;
  *view = bytes_view(view->data, static_cast<size_t>(count), view->device);
  view->read_only = read_only;
}

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

/// The dtype of float and integer arguments.
DType dtype_of(const char* name, const dlpack::DataType& from, TensorKind kind,
               const DType* stored_as) {
  const bool is_raw = stored_as != nullptr && from.code == dlpack::kUInt && from.lanes == 1 &&
                      from.bits == 8 * item_size(*stored_as) && from.bits <= 16;
  if (is_raw) return *stored_as;
  DType dtype = DType::kFloat32;
  if (!to_dtype(from, &dtype)) {
    raise_type(std::string(name) + ": expected " +
               (kind == TensorKind::kFloat
                    ? "float32, float16, bfloat16, float8_e4m3fn or float8_e5m2"
                    : to_text(kind)) +
               ", got " + name_of(from));
  }
  if (!is_of_kind(kind, dtype)) raise_wrong_kind(name, kind, name_of(from));
  return dtype;
}

/// The shape and strides of a DLPack tensor.
void fill_dims(const char* name, const dlpack::Tensor& t, TensorView* view) {
  if (t.ndim > kMaxRank || t.ndim < 1) {
    raise_value(std::string(name) + ": expected 1 to " + std::to_string(kMaxRank) +
                " dimensions, got " + std::to_string(t.ndim));
  }
  if (t.shape == nullptr) {
    raise_type(std::string(name) + ": expected a DLPack tensor with a shape, got a null pointer");
  }
  view->rank = t.ndim;
  for (int32_t d = 0; d < t.ndim; ++d) {
    view->shape[d] = t.shape[d];
    if (t.strides != nullptr) view->stride[d] = t.strides[d];
  }
  if (t.strides == nullptr) set_contiguous_strides(name, view);
}

/// Fills a view from a DLPack tensor.
void fill(const char* name, const dlpack::Tensor& t, TensorKind kind, const DType* stored_as,
          TensorView* view) {
  const std::optional<Device> device = to_device(t.device);
  if (!device) {
    raise_type(std::string(name) + ": expected a tensor on the cpu or a CUDA device, got one on " +
               "DLPack device " + std::to_string(t.device.type));
  }
  view->device = *device;
  view->data = t.data == nullptr ? nullptr : static_cast<char*>(t.data) + t.byte_offset;
  fill_dims(name, t, view);
  if (kind == TensorKind::kBytes) {
    if (t.dtype.code == dlpack::kHandle || t.dtype.bits % 8 != 0) {
      raise_type(std::string(name) + ": expected numbers of whole bytes, got " + name_of(t.dtype));
    }
    to_bytes(name, int64_t{t.dtype.bits} * t.dtype.lanes, view);
  } else {
    view->dtype = dtype_of(name, t.dtype, kind, stored_as);
  }
}

/// torch's imaginary parts of conjugates are views of memory that holds the opposite. They lie
/// among numbers of twice their size, so that their strides are even, but for a dim of size 1 that
/// was added later. Other tensors are not asked, since that takes as long as all other checks.
void check_not_negated(const char* name, nb::handle object, const TensorView& view) {
  const int32_t last = view.rank - 1;
  if (view.stride[last] % 2 != 0 && view.shape[last] != 1) return;
  const nb::object is_neg = attribute(object, "is_neg");
  if (PyCallable_Check(is_neg.ptr()) == 0 || !nb::cast<bool>(is_neg())) return;
  raise_value(std::string(name) +
              ": expected memory of the tensor's values, got a negated view (see resolve_neg())");
}

[[noreturn]] void raise_not_integers(const char* name, const std::string& got) {
  raise_type(std::string(name) + ": expected an integer dtype, got " + got);
}

/// Integers of any size in host memory, with any strides: one dimension, or rows of `columns`.
class Integers {
 public:
  Integers(const char* name, const dlpack::Tensor& tensor, int32_t columns)
      : name_(name), dtype_(tensor.dtype) {
    const bool is_integer = dtype_.code == dlpack::kInt || dtype_.code == dlpack::kUInt;
    const bool has_size =
        dtype_.bits == 8 || dtype_.bits == 16 || dtype_.bits == 32 || dtype_.bits == 64;
    if (!is_integer || !has_size || dtype_.lanes != 1) raise_not_integers(name, name_of(dtype_));
    // As bytes, of which each integer is a row: there is no DType of every size.
    TensorView view;
    fill_dims(name, tensor, &view);
    if (columns == 0 && view.rank != 1) {
      raise_value(std::string(name) + ": expected one dimension, got " + std::to_string(view.rank));
    }
    if (columns > 0 && (view.rank != 2 || view.shape[1] != columns)) {
      std::string shape;
      for (int32_t d = 0; d < view.rank; ++d) {
        shape += (d > 0 ? ", " : "") + std::to_string(view.shape[d]);
      }
      raise_value(std::string(name) + ": expected shape [n, " + std::to_string(columns) +
                  "], got [" + shape + "]");
    }
    const std::optional<Device> device = to_device(tensor.device);
    if (device != Device{}) {
      raise_type(std::string(name) + ": expected host memory, got a tensor on " +
                 (device ? "cuda:" + std::to_string(device->index) : "another device"));
    }
    const int64_t item = dtype_.bits / 8;
    for (int32_t d = 0; d < view.rank; ++d) {
      if (__builtin_mul_overflow(view.stride[d], item, &view.stride[d])) {
        raise_value(std::string(name) +
                    ": expected elements within the address space, got a stride "
                    "of more");
      }
    }
    view.data =
        tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
    view.dtype = DType::kFloat8E4M3;  // of one byte
    view.shape[view.rank] = item;
    view.stride[view.rank] = 1;
    ++view.rank;
    check(check_memory({name, view}));
    data_ = static_cast<const char*>(view.data);
    size_ = view.shape[0];
    stride_ = view.stride[0];
    if (columns > 0) {
      columns_ = columns;
      column_stride_ = view.stride[1];
    }
  }

  int64_t size() const noexcept { return size_; }

  /// Row after row. Raises ValueError naming the entry that is no int32.
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
  template <class T>
  void copy(int32_t* to) const {
    if (std::is_same_v<T, int32_t> && stride_ == sizeof(T) && columns_ == 1) {
      if (size_ > 0) std::memcpy(to, data_, static_cast<size_t>(size_) * sizeof(T));
      return;
    }
    for (int64_t n = 0; n < size_ * columns_; ++n) {
      const int64_t i = n / columns_;
      T value;  // which may be misaligned
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
  const char* data_ = nullptr;
  int64_t size_ = 0;
  int64_t stride_ = 0;  // in bytes
  int64_t columns_ = 1;
  int64_t column_stride_ = 0;
};

/// Refuses what torch would record a gradient of: none would come, and the parameters behind the
/// tensor would be trained on zeros.
void check_no_gradient(const char* name, nb::handle object, CallStream& call) {
  if (!call.torch_records_gradients) {
    static const nb::handle is_grad_enabled =
        nb::object(nb::module_::import_("torch").attr("is_grad_enabled")).release();
    call.torch_records_gradients = nb::cast<bool>(is_grad_enabled());
  }
  if (!*call.torch_records_gradients) return;
  static const nb::handle requires_grad = PyUnicode_InternFromString("requires_grad");
  if (!attribute(object, requires_grad).is(nb::bool_(true))) return;
  raise_value(std::string(name) +
              ": expected a tensor for inference only (no gradient: under torch.no_grad(), or "
              "detach() it), got one that requires grad");
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
    if (producer.framework == Framework::kTorch) {
      check_not_negated(name, object, view_);
      if (kind == TensorKind::kFloat) check_no_gradient(name, object, stream);
    }
  } else {
    ArrayInterface array(name, object);
    if (!array.found()) raise_not_a_tensor(name, object, dlpack_->refusal());
    view_ = array.view;
    array_interface_ = std::move(array.interface);
    if (!is_of_kind(kind, view_.dtype)) raise_wrong_kind(name, kind, to_name(view_.dtype));
    if (kind == TensorKind::kBytes) to_bytes(name, 8 * item_size(view_.dtype), &view_);
  }
  if (access == Access::kWrite && producer.immutable()) {
    raise_type(std::string(name) + ": expected a writable tensor, got a JAX array");
  }
}

namespace {

/// A list or tuple while it is read. Converting an item may run Python code, which may drop the
/// item and change the list.
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

/// Row `i` of a list of rows.
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
  if (!Items::accepts(object)) {
    CallStream host;
    const DlpackImport import(name, object, producer_of(object), host);
    if (import.tensor() == nullptr) {
      const ArrayInterface array(name, object);
      if (!array.found()) raise_not_a_tensor(name, object, import.refusal());
      raise_not_integers(name, to_name(array.view.dtype));
    }
    const Integers integers(name, *import.tensor(), columns);
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

float float_arg(const char* name, nb::handle object) {
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

}  // namespace flashplan
