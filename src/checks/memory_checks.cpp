// SPDX-License-Identifier: Apache-2.0
#include "checks/memory_checks.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "common/error.h"

namespace flashplan {
namespace {

/// Byte addresses [begin, end).
struct Extent {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  bool intersects(const Extent& other) const { return begin < other.end && other.begin < end; }
};

/// The addresses of a view that has passed check_shape(); empty if it has no elements.
Extent extent_of(const TensorView& view) {
  uintptr_t last = 0;  // unsigned: strides of a view without elements may be anything
  bool is_empty = view.empty();
  for (int32_t d = 0; d < view.rank; ++d) {
    is_empty |= view.shape[d] == 0;
    last += static_cast<uintptr_t>(view.shape[d] - 1) * static_cast<uintptr_t>(view.stride[d]);
  }
  if (is_empty) return {};
  const auto data = reinterpret_cast<uintptr_t>(view.data);
  return {data, data + (last + 1) * static_cast<uintptr_t>(item_size(view.dtype))};
}

/// Whether all addresses of a view with elements can be represented.
bool is_addressable(const TensorView& view) {
  int64_t reach = 1;  // elements from the lowest to the highest address
  bool overflows = false;
  for (int32_t d = 0; d < view.rank; ++d) {
    int64_t steps = 0;  // stays 0 if the size is 1, whatever the stride is
    overflows |= __builtin_mul_overflow(view.shape[d] - 1, view.stride[d], &steps);
    overflows |= steps < 0 ? __builtin_sub_overflow(reach, steps, &reach)
                           : __builtin_add_overflow(reach, steps, &reach);
  }
  const auto data = reinterpret_cast<intptr_t>(view.data);
  intptr_t end = 0;
  overflows |= __builtin_mul_overflow(reach, item_size(view.dtype), &reach);
  overflows |= __builtin_add_overflow(data, reach, &end);
  return !overflows && data >= 0;
}

/// A dimension along which elements share memory, or -1. The stride of each dimension must step
/// over all memory that the dimensions with smaller strides span. (This also refuses strides that
/// interleave without sharing memory.)
int32_t shared_dim(const TensorView& view) {
  struct Step {
    int64_t stride;
    int32_t dim;
  };
  // Sorts dimensions by stride. The usual order, the last dimension first, needs no moves.
  std::array<Step, kMaxRank> steps;
  std::size_t count = 0;
  for (int32_t d = view.rank - 1; d >= 0; --d) {
    if (view.shape[d] == 1) continue;
    const int64_t stride = std::abs(view.stride[d]);
    std::size_t at = count++;
    for (; at > 0 && steps[at - 1].stride > stride; --at) steps[at] = steps[at - 1];
    steps[at] = {stride, d};
  }
  int64_t span = 1;
  for (std::size_t i = 0; i < count; ++i) {
    const auto& [stride, dim] = steps[i];
    if (stride < span) return dim;
    span += (view.shape[dim] - 1) * stride;
  }
  return -1;
}

/// A bound on the bytes that the elements of a view span if their addresses are taken modulo
/// `period`; 0: no bound is known.
int64_t span_modulo(const TensorView& view, int64_t period) {
  const int64_t item = item_size(view.dtype);
  int64_t span = item;
  for (int32_t d = 0; d < view.rank; ++d) {
    const int64_t stride = view.stride[d] * item;
    if (view.shape[d] == 1 || stride % period == 0) continue;
    if (stride < 0 || stride > period) return 0;
    span += (view.shape[d] - 1) * stride;
  }
  return span;
}

/// Whether the elements of two views alternate with a period: if addresses are taken modulo the
/// period, all elements of `a` lie before all elements of `b`.
bool alternate(const TensorView& a, const TensorView& b, int64_t period) {
  const int64_t span_a = span_modulo(a, period);
  const int64_t span_b = span_modulo(b, period);
  if (span_a == 0 || span_b == 0) return false;
  const auto distance = reinterpret_cast<uintptr_t>(b.data) - reinterpret_cast<uintptr_t>(a.data);
  auto offset = static_cast<int64_t>(distance) % period;
  if (offset < 0) offset += period;
  return span_a <= offset && offset + span_b <= period;
}

/// Whether one of two views whose extents intersect lies in the gaps of the other, so that no two
/// elements share memory.
bool lie_in_gaps(const TensorView& a, const TensorView& b) {
  for (const TensorView* view : {&a, &b}) {
    for (int32_t d = 0; d < view->rank; ++d) {
      const int64_t period = view->stride[d] * item_size(view->dtype);
      if (view->shape[d] > 1 && period > 0 && alternate(a, b, period)) return true;
    }
  }
  return false;
}

/// Checks two arguments whose extents intersect: one must lie in the gaps of the other.
Status check_gaps(const TensorArgument& written, const TensorArgument& other) {
  if (lie_in_gaps(written.view, other.view)) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected memory apart from %s, got an overlap",
               written.name, other.name);
}

}  // namespace

bool has_elements(const TensorView& view) noexcept {
  for (int32_t d = 0; d < view.rank; ++d) {
    if (view.shape[d] == 0) return false;
  }
  return true;
}

bool is_plain(const TensorArgument& argument) noexcept {
  const TensorView& view = argument.view;
  int64_t span = 1;  // elements spanned by the dimensions that the loop has passed
  bool fails = view.data == nullptr || (argument.written && view.read_only);
  for (int32_t d = view.rank - 1; d >= 0; --d) {
    const int64_t steps = view.shape[d] - 1;
    if (steps == 0) continue;  // a dimension of size 1 may have any stride
    int64_t reach = 0;
    fails |= steps < 0 || view.stride[d] < span || (d == view.rank - 1 && view.stride[d] != 1);
    fails |= __builtin_mul_overflow(steps, view.stride[d], &reach);
    fails |= __builtin_add_overflow(span, reach, &span);
  }
  const int64_t item = item_size(view.dtype);
  const auto data = reinterpret_cast<intptr_t>(view.data);
  intptr_t end = 0;
  fails |= __builtin_mul_overflow(span, item, &span);
  fails |= data < 0 || (data & (item - 1)) != 0 || __builtin_add_overflow(data, span, &end);
  return !fails;
}

Status check_memory(const TensorArgument& argument) noexcept {
  const TensorView& view = argument.view;
  int64_t smallest = 1;
  for (int32_t d = 0; d < view.rank; ++d) smallest = std::min(smallest, view.shape[d]);
  if (smallest < 0) {
    return error(StatusCode::kInvalidArgument, "%s: expected sizes >= 0, got %lld", argument.name,
                 static_cast<long long>(smallest));
  }
  if (argument.written && view.read_only) {
    return error(StatusCode::kInvalidType, "%s: expected a writable tensor, got a read-only one",
                 argument.name);
  }
  if (smallest == 0) return {};
  if (view.data == nullptr) {
    return error(StatusCode::kInvalidArgument,
                 "%s: expected a tensor with storage, got a null pointer (a meta or fake tensor?)",
                 argument.name);
  }
  // Item sizes are powers of two, so this needs no division, which would take as long as all other
  // checks here.
  const auto item = static_cast<uintptr_t>(item_size(view.dtype));
  if ((reinterpret_cast<uintptr_t>(view.data) & (item - 1)) != 0) {
    return error(StatusCode::kInvalidArgument,
                 "%s: expected a pointer aligned to %lld bytes, got %p", argument.name,
                 static_cast<long long>(item), view.data);
  }
  if (!is_addressable(view)) {
    return error(StatusCode::kInvalidArgument,
                 "%s: expected elements within the address space, got strides that leave it",
                 argument.name);
  }
  const int32_t shared = argument.written ? shared_dim(view) : -1;
  if (shared >= 0) {
    return error(StatusCode::kInvalidArgument,
                 "%s: expected memory of its own for each element, got stride %lld in dim %d",
                 argument.name, static_cast<long long>(view.stride[shared]), shared);
  }
  return {};
}

Status check_apart(const TensorArgument& written, const TensorArgument& other) noexcept {
  if (!extent_of(written.view).intersects(extent_of(other.view))) return {};
  return check_gaps(written, other);
}

Status check_apart(std::span<const TensorArgument> arguments) noexcept {
  struct Place {
    Extent extent;
    const TensorArgument* argument;
  };
  std::array<Place, kMostArguments> places;
  std::size_t count = 0;
  for (const TensorArgument& argument : arguments) {
    const Extent extent = extent_of(argument.view);
    if (extent.end == extent.begin) continue;
    // Each argument is compared with the arguments before it, so each pair is checked once.
    for (std::size_t i = 0; i < count; ++i) {
      const TensorArgument& before = *places[i].argument;
      if (!extent.intersects(places[i].extent) || !(before.written || argument.written)) continue;
      FLASHPLAN_RETURN_IF_ERROR(before.written ? check_gaps(before, argument)
                                               : check_gaps(argument, before));
    }
    places[count++] = {extent, &argument};
  }
  return {};
}

TensorView bytes_view(void* data, std::size_t size, Device device) noexcept {
  TensorView view;
  view.data = data;
  view.dtype = DType::kFloat8E4M3;  // any dtype of one byte would do
  view.device = device;
  view.rank = 1;
  view.shape[0] = static_cast<int64_t>(size);
  view.stride[0] = 1;
  return view;
}

}  // namespace flashplan
