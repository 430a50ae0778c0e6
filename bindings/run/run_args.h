// SPDX-License-Identifier: Apache-2.0
// The arguments of a run of a Plan, as Python objects and as views.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/run/variant_args.h"
#include "bindings/tensors/producer.h"
#include "bindings/tensors/scale_arg.h"
#include "bindings/tensors/stream.h"
#include "bindings/tensors/tensor.h"
#include "flashplan/plan.h"

namespace flashplan {

/// The arguments of Attention.run(), but for the stream.
struct RunObjects {
  nb::handle q, k, v;  // v: None with shared_kv
  nb::handle q_tail, k_tail;
  nb::handle block_table, page_indptr, page_indices;
  nb::handle kv_lens, mask, sinks;
  nb::handle out, lse;
  nb::handle k_scale, v_scale;
  nb::handle pdl;
  nb::handle variant_arguments;
};

/// Imports the arguments of a run. The views are valid as long as this and the objects live.
class RunArgs {
 public:
  /// Raises TypeError or ValueError naming the argument.
  RunArgs(const AttentionOptions& options, const RunObjects& objects, nb::handle stream);
  RunArgs(const RunArgs&) = delete;
  RunArgs& operator=(const RunArgs&) = delete;

  /// All but the workspace.
  AttentionTensors& tensors() noexcept { return tensors_; }
  /// The stream that the tensors were imported on.
  const CallStream& call() const noexcept { return call_; }
  /// The framework of q.
  const Producer& producer() const noexcept { return producer_; }

 private:
  // Scalars are converted before any tensor is imported: the conversion may run Python code, and
  // that code could change a tensor. So these members come first.
  VariantArgs variant_args_;
  ScaleArg k_scale_, v_scale_;
  bool pdl_;

  Producer producer_;
  CallStream call_;
  TensorArg q_, k_, v_;
  TensorArg q_tail_, k_tail_;
  TensorArg block_table_, page_indptr_, page_indices_;
  TensorArg kv_lens_, mask_, sinks_;
  TensorArg k_scales_, v_scales_;
  TensorArg out_, lse_;
  AttentionTensors tensors_;
};

}  // namespace flashplan
