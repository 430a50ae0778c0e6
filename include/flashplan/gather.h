// SPDX-License-Identifier: Apache-2.0
// Gathers rows of a tensor.
#pragma once

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// Computes out[i] = x[indices[i]]: the embeddings of tokens, or the last token of each request.
/// x [rows, n] and out [count, n] have one dtype, any but kFp8DsMla, and rows at any stride;
/// indices [count] is int32 or int64.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
/// Indices are not checked there: rows of `out` whose index is outside of x become 0.
///   kInvalidArgument, kInvalidType  a tensor is malformed, or on the CPU an index is outside of x,
///                                   or `out` shares memory with another argument; nothing was
///                                   written
///   kCudaError                      the launch failed
FLASHPLAN_API Status gather_rows(const TensorView& x, const TensorView& indices,
                                 const TensorView& out, Stream stream = nullptr) noexcept;

}  // namespace flashplan
