// SPDX-License-Identifier: Apache-2.0
// Penalties for tokens that have occurred before.
#pragma once

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// A parameter is one number for all requests, or a float32 tensor [batch] with a number for each.
struct PenaltyOptions {
  float repetition = 1.0F;  // finite, > 0: divides positive logits, multiplies others
  TensorView repetitions;
  float presence = 0.0F;  // finite: subtracted once
  TensorView presences;
  float frequency = 0.0F;  // finite: subtracted for each time that the token occurred
  TensorView frequencies;
};

/// Changes the logits of the tokens that a request's history has, in place and in this order:
/// repetition, frequency, presence, in float32. `logits` [batch, vocab] is float32, float16 or
/// bfloat16, rows at any stride; `history` [batch, max_len] is int32 or int64, and the first
/// history_lens[r] entries of row r are the tokens of request r; history_lens [batch] is int32. The
/// same arguments give the same bits on every device.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
/// Tokens outside of the vocabulary are skipped, lengths outside of [0, max_len] count as the
/// nearest one inside, and a request with a parameter out of range stays as it is.
///   kInvalidArgument, kInvalidType  a tensor is malformed, or shares memory with logits, or on
///                                   the CPU a value is out of range; nothing was written
///   kOutOfMemory                    on the CPU there is no memory to count the tokens in
///   kCudaError                      the launch failed
FLASHPLAN_API Status apply_penalties(const TensorView& logits, const TensorView& history,
                                     const TensorView& history_lens, const PenaltyOptions& options,
                                     Stream stream = nullptr) noexcept;

}  // namespace flashplan
