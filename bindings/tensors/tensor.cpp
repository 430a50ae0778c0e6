// SPDX-License-Identifier: Apache-2.0
#include "bindings/tensors/tensor.h"

#include <string>
#include <utility>

#include "bindings/tensors/array_interface.h"
#include "bindings/tensors/dlpack_view.h"
#include "checks/memory_checks.h"
#include "common/dtypes.h"
#include "common/error.h"

namespace flashplan {
namespace {

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

bool is_of_kind(TensorKind kind, DType dtype) {
  switch (kind) {
    case TensorKind::kFloat:
    case TensorKind::kPlanned: return is_float(dtype);
    case TensorKind::kFloat32:
    case TensorKind::kScales: return dtype == DType::kFloat32;
    case TensorKind::kInt32: return dtype == DType::kInt32;
    case TensorKind::kInt64: return dtype == DType::kInt64;
    case TensorKind::kInt: return dtype == DType::kInt32 || dtype == DType::kInt64;
    case TensorKind::kUInt32: return dtype == DType::kUInt32;
    case TensorKind::kBytes: break;
  }
  return true;
}

bool holds_floats(TensorKind kind) {
  return kind == TensorKind::kFloat || kind == TensorKind::kPlanned ||
         kind == TensorKind::kFloat32 || kind == TensorKind::kScales;
}

std::string to_text(TensorKind kind, const DType* stored_as) {
  switch (kind) {
    case TensorKind::kPlanned:
      return std::string("dtype ") + to_string(*stored_as) + " (as planned)";
    case TensorKind::kFloat: return "a float dtype of at most 32 bits";
    case TensorKind::kFloat32:
    case TensorKind::kScales: return "dtype float32";
    case TensorKind::kInt32: return "dtype int32";
    case TensorKind::kInt64: return "dtype int64";
    case TensorKind::kInt: return "dtype int32 or int64";
    case TensorKind::kUInt32: return "dtype uint32";
    case TensorKind::kBytes: break;
  }
  return "any dtype";
}

[[noreturn]] void raise_wrong_kind(const char* name, TensorKind kind, const DType* stored_as,
                                   const std::string& got) {
  raise_type(std::string(name) + ": expected " + to_text(kind, stored_as) + ", got " + got);
}

/// Turns a contiguous view of items of `bits` bits into one row of bytes. Raises ValueError if it
/// is not contiguous.
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

/// The dtype of an argument's values. It is `stored_as`, if that is given and has 8 or 16 bits, and
/// `from` is unsigned integers of as many bits. Otherwise it is the dtype that `from` names.
DType dtype_of(const char* name, const dlpack::DataType& from, TensorKind kind,
               const DType* stored_as) {
  const bool is_raw = stored_as != nullptr && from.code == dlpack::kUInt && from.lanes == 1 &&
                      from.bits == 8 * item_size(*stored_as) && from.bits <= 16;
  if (is_raw) return *stored_as;
  DType dtype = DType::kFloat32;
  if (!to_dtype(from, &dtype) || !is_of_kind(kind, dtype)) {
    raise_wrong_kind(name, kind, stored_as, name_of(from));
  }
  return dtype;
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
  if (kind == TensorKind::kScales && t.ndim == 0) {
    view->rank = 1;
    view->shape[0] = view->stride[0] = 1;
  } else {
    fill_dims(name, t, view);
  }
  if (kind == TensorKind::kBytes) {
    if (t.dtype.code == dlpack::kHandle || t.dtype.bits % 8 != 0) {
      raise_type(std::string(name) + ": expected numbers of whole bytes, got " + name_of(t.dtype));
    }
    to_bytes(name, int64_t{t.dtype.bits} * t.dtype.lanes, view);
  } else {
    view->dtype = dtype_of(name, t.dtype, kind, stored_as);
  }
}

/// Refuses a view that torch negates only when it reads it, such as x.conj().imag: kernels would
/// read the values before the negation. Calling is_neg() for every tensor would raise the time of
/// the smallest run from 2.3 to 2.9 us. So it is called only for tensors whose last stride is even,
/// or whose last dim has size 1: the elements of an imaginary part alternate with real parts in
/// memory, so their stride is even. Negated views with an odd stride come from as_strided() and
/// torch._neg_view() alone, and are not refused.
void check_not_negated(const char* name, nb::handle object, const TensorView& view) {
  const int32_t last = view.rank - 1;
  if (view.stride[last] % 2 != 0 && view.shape[last] != 1) return;
  const nb::object is_neg = attribute(object, "is_neg");
  if (PyCallable_Check(is_neg.ptr()) == 0 || !nb::cast<bool>(is_neg())) return;
  raise_value(std::string(name) +
              ": expected memory of the tensor's values, got a negated view (see resolve_neg())");
}

bool torch_records_gradients() {
  static const nb::handle is_grad_enabled =
      nb::object(nb::module_::import_("torch").attr("is_grad_enabled")).release();
  return nb::cast<bool>(is_grad_enabled());
}

bool requires_grad(nb::handle object) {
  static const nb::handle name = PyUnicode_InternFromString("requires_grad");
  return attribute(object, name).is(nb::bool_(true));
}

/// Refuses a tensor of which torch would record a gradient. This library computes no gradients, so
/// the parameters that the tensor depends on would be trained as if their gradients were 0.
void check_no_gradient(const char* name, nb::handle object, CallStream& call) {
  if (!call.torch_records_gradients) call.torch_records_gradients = torch_records_gradients();
  if (*call.torch_records_gradients && requires_grad(object)) raise_gradient(name);
}

}  // namespace

void check_number_without_gradient(const char* name, nb::handle object) {
  if (producer_of(object).framework != Framework::kTorch) return;
  if (requires_grad(object) && torch_records_gradients()) raise_gradient(name);
}

void raise_gradient(const char* name) {
  raise_value(std::string(name) +
              ": expected a tensor for inference only (no gradient: under torch.no_grad(), or "
              "detach() it), got one that requires grad");
}

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
      if (holds_floats(kind)) {
        check_no_gradient(name, object, stream);
      }
    }
  } else {
    ArrayInterface array(name, object);
    if (!array.found()) raise_not_a_tensor(name, object, dlpack_->refusal());
    view_ = array.view;
    array_interface_ = std::move(array.interface);
    if (!is_of_kind(kind, view_.dtype)) {
      raise_wrong_kind(name, kind, stored_as, to_string(view_.dtype));
    }
    if (kind == TensorKind::kBytes) to_bytes(name, 8 * item_size(view_.dtype), &view_);
  }
  if (access == Access::kWrite && producer.immutable()) {
    raise_type(std::string(name) +
               ": expected a writable tensor (flashplan.jax returns new arrays), got a JAX array");
  }
}

void TensorArg::release_import_of_array(nb::handle object) {
  const nb::object array = plain_array(object);
  if (!array.is_valid()) return;
  const nb::object address = nb::borrow<nb::dict>(array.attr("__array_interface__"))["data"][0];
  if (nb::cast<uintptr_t>(address) != reinterpret_cast<uintptr_t>(view_.data)) return;
  dlpack_.reset();
  array_interface_.reset();
}

}  // namespace flashplan
