// SPDX-License-Identifier: Apache-2.0
// What the calls of operators have in common: their stream, their tensors, the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include "flashplan/status.h"
#include "gil.h"
#include "stream.h"
#include "tensor.h"

namespace flashplan {

/// uint16 memory is bfloat16: frameworks without that dtype store it so.
inline constexpr DType kStoredIn16Bits = DType::kBFloat16;

/// The stream of a call without a Plan: by the tensor that says where it works.
CallStream stream_beside(const char* name, nb::handle tensor, nb::handle stream);

/// A call of an operator: tensors are imported one after the other, then the operator runs.
class OperatorCall {
 public:
  /// `name`, `tensor`: the tensor that says where the call works.
  OperatorCall(const char* name, nb::handle tensor, nb::handle stream)
      : stream_(stream_beside(name, given(name, tensor), stream)) {}

  CallStream& stream() { return stream_; }

  // Arguments must outlive the call.
  TensorArg input(const char* name, nb::handle tensor, TensorKind kind = TensorKind::kFloat) {
    return {name, given(name, tensor), kind, stream_, &kStoredIn16Bits};
  }
  /// None gives an empty view.
  TensorArg optional_input(const char* name, nb::handle tensor,
                           TensorKind kind = TensorKind::kFloat) {
    return {name, tensor, kind, stream_, &kStoredIn16Bits};
  }
  TensorArg output(const char* name, nb::handle tensor, const DType& stored_as = kStoredIn16Bits) {
    return {name, given(name, tensor), TensorKind::kFloat, stream_, &stored_as, Access::kWrite};
  }
  TensorArg int_output(const char* name, nb::handle tensor) {
    return {name, tensor, TensorKind::kInt32, stream_, nullptr, Access::kWrite};
  }

  /// Calls `op(stream)` without the GIL, and raises what it returns.
  template <class Op>
  void run(const Op& op) {
    Status status;
    {
      const GilRelease released;
      status = op(stream_.handle);
    }
    check(status);
    stream_.finish();
  }

 private:
  /// Raises TypeError for None.
  static nb::handle given(const char* name, nb::handle tensor);

  CallStream stream_;
};

}  // namespace flashplan
