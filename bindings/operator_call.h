// SPDX-License-Identifier: Apache-2.0
// The steps that all operators take in Python: find the stream, import the tensors, release the GIL
// and run.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/gil.h"
#include "bindings/tensors/stream.h"
#include "bindings/tensors/tensor.h"
#include "flashplan/status.h"

namespace flashplan {

/// The stream of a call that has no Plan: `stream`, or the current stream of the framework and
/// device of `tensor`. `name`: the name of the tensor, for messages.
CallStream stream_beside(const char* name, nb::handle tensor, nb::handle stream);

/// One call of an operator from Python. The binding first converts each tensor argument to a
/// TensorArg by one of the functions below, and then calls run(). It keeps the TensorArgs until
/// run() returns, because they hold the tensors' memory.
class OperatorCall {
 public:
  /// The operator runs on the device of `tensor`, and on `stream`, or if that is None on the
  /// current stream of the framework of `tensor`. `name`: the name of the tensor, for messages.
  OperatorCall(const char* name, nb::handle tensor, nb::handle stream)
      : stream_(stream_beside(name, given(name, tensor), stream)) {}

  CallStream& stream() { return stream_; }

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
  /// None gives an empty view.
  TensorArg optional_output(const char* name, nb::handle tensor) {
    return {name, tensor, TensorKind::kFloat, stream_, &kStoredIn16Bits, Access::kWrite};
  }
  TensorArg int_output(const char* name, nb::handle tensor) {
    return {name, tensor, TensorKind::kInt32, stream_, nullptr, Access::kWrite};
  }

  /// Calls `op(stream)` without the GIL. Raises an exception if `op` returns an error.
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

/// Raises TypeError if `stored`, the dtype that the caller gave as the argument `name`, is not the
/// dtype of `tensor`, which was given as the argument `of`.
void check_stored(const char* name, DType stored, const char* of, const TensorArg& tensor);

}  // namespace flashplan
