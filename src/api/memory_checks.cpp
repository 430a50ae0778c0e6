// SPDX-License-Identifier: Apache-2.0
#include "api/memory_checks.h"

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

/// False if an address of the view is not representable. Needs elements.
bool find_extent(const TensorView& view, Extent* extent) {
  const int64_t item = item_size(view.dtype);
  int64_t low = 0;  // of the elements' addresses, from `data`
  int64_t high = item;
  bool overflows = false;
  for (int32_t d = 0; d < view.rank; ++d) {
    if (view.shape[d] == 1) continue;  // its stride may be anything
    int64_t reach = 0;
    overflows |= __builtin_mul_overflow(view.shape[d] - 1, view.stride[d], &reach);
    overflows |= __builtin_mul_overflow(reach, item, &reach);
    int64_t& bound = reach < 0 ? low : high;
    overflows |= __builtin_add_overflow(bound, reach, &bound);
  }
  const auto data = reinterpret_cast<uintptr_t>(view.data);
  overflows |= __builtin_add_overflow(data, low, &extent->begin);
  overflows |= __builtin_add_overflow(data, high, &extent->end);
  return !overflows;
}

Extent extent_of(const TensorView& view) {
  Extent extent;
  find_extent(view, &extent);
  return extent;
}

/// A dimension in whose steps elements share memory, or -1. In order of their strides, each must
/// step over all that the smaller ones span. (Strides that interleave otherwise are refused too.)
int32_t shared_dim(const TensorView& view) {
  struct Step {
    int64_t stride;
    int32_t dim;
  };
  // By stride. The usual order, the last dimension first, needs no moves.
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

/// Bytes that the elements of a view span modulo `period`, or 0 if they can be anywhere in it.
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

/// Whether the elements of two views take turns with a period: modulo it, one's lie before the
/// other's.
bool alternate(const TensorView& a, const TensorView& b, int64_t period) {
  const int64_t span_a = span_modulo(a, period);
  const int64_t span_b = span_modulo(b, period);
  if (span_a == 0 || span_b == 0) return false;
  const auto distance = reinterpret_cast<uintptr_t>(b.data) - reinterpret_cast<uintptr_t>(a.data);
  auto offset = static_cast<int64_t>(distance) % period;
  if (offset < 0) offset += period;
  return span_a <= offset && offset + span_b <= period;
}

/// Of views whose extents intersect.
bool lie_in_gaps(const TensorView& a, const TensorView& b) {
  for (const TensorView* view : {&a, &b}) {
    for (int32_t d = 0; d < view->rank; ++d) {
      const int64_t period = view->stride[d] * item_size(view->dtype);
      if (view->shape[d] > 1 && period > 0 && alternate(a, b, period)) return true;
    }
  }
  return false;
}

bool has_memory(const TensorView& view) { return !view.empty() && has_elements(view); }

Status check_apart(const TensorArgument& written, const Extent& written_extent,
                   const TensorArgument& other, const Extent& other_extent) {
  if (!written_extent.intersects(other_extent) || lie_in_gaps(written.view, other.view)) return {};
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

Status check_memory(const TensorArgument& argument) noexcept {
  const TensorView& view = argument.view;
  for (int32_t d = 0; d < view.rank; ++d) {
    if (view.shape[d] >= 0) continue;
    return error(StatusCode::kInvalidArgument, "%s: expected sizes >= 0, got %lld in dim %d",
                 argument.name, static_cast<long long>(view.shape[d]), d);
  }
  if (argument.written && view.read_only) {
    return error(StatusCode::kInvalidType, "%s: expected a writable tensor, got a read-only one",
                 argument.name);
  }
  if (!has_elements(view)) return {};
  if (view.data == nullptr) {
    return error(StatusCode::kInvalidArgument,
                 "%s: expected a tensor with storage, got a null pointer (a meta or fake tensor?)",
                 argument.name);
  }
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(item_size(view.dtype)) != 0) {
    return error(StatusCode::kInvalidArgument,
                 "%s: expected a pointer aligned to %lld bytes, got %p", argument.name,
                 static_cast<long long>(item_size(view.dtype)), view.data);
  }
  Extent extent;
  if (!find_extent(view, &extent)) {
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
  if (!has_memory(written.view) || !has_memory(other.view)) return {};
  return check_apart(written, extent_of(written.view), other, extent_of(other.view));
}

Status check_apart(std::span<const TensorArgument> arguments) noexcept {
  constexpr std::size_t kMostArguments = 12;
  std::array<Extent, kMostArguments> extents;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    // An empty extent intersects none.
    if (has_memory(arguments[i].view)) extents[i] = extent_of(arguments[i].view);
  }
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].written) continue;
    for (std::size_t j = 0; j < arguments.size(); ++j) {
      // A pair of written arguments is looked at once.
      if (j == i || (j < i && arguments[j].written)) continue;
      FLASHPLAN_RETURN_IF_ERROR(check_apart(arguments[i], extents[i], arguments[j], extents[j]));
    }
  }
  return {};
}

TensorView bytes_view(void* data, std::size_t size, Device device) noexcept {
  TensorView view;
  view.data = data;
  view.dtype = DType::kFloat8E4M3;  // any dtype of one byte
  view.device = device;
  view.rank = 1;
  view.shape[0] = static_cast<int64_t>(size);
  view.stride[0] = 1;
  return view;
}

}  // namespace flashplan
