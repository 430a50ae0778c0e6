// SPDX-License-Identifier: Apache-2.0
// Speculative decoding: verifies drafts of a small model by probabilities of the large one.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/sampling.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// Drafts of a batch: chains of n tokens, or trees of n nodes. All tensors on one device.
struct Drafts {
  TensorView tokens;  // [batch, n <= 512] int32 or int64; -1: no draft
  /// [batch, n, vocab] of target_probs' dtype: row i is the distribution that draft i was drawn
  /// from. Empty: draft i was not drawn but looked up, as n-grams are; its distribution is 1 for
  /// its own token and 0 for the others.
  TensorView draft_probs;
  /// [batch, n + 1, vocab] float32, float16 or bfloat16: row 0 is the large model's distribution
  /// before all drafts, row i + 1 that after draft i.
  TensorView target_probs;
  /// [n] or [batch, n] int32, or empty: for each draft the index of the draft that it follows,
  /// which is smaller, or -1 for a first draft. Empty: draft i follows draft i - 1. Drafts that
  /// were drawn, and follow the same draft, must have been drawn independently of each other.
  TensorView parents;
};

struct VerifyOptions {
  /// As in SampleOptions. The random numbers differ from those of sample().
  int64_t seed = 0;
  TensorView seeds;  // [batch] or [1] int64
  int64_t offset = 0;
  TensorView offsets;  // [batch] or [1] int64
};

struct VerifyOutputs {
  /// [batch, n + 1] int32: the accepted drafts, one token that the large model draws, then -1.
  TensorView tokens;
  TensorView num_accepted;  // [batch] int32: drafts among the tokens
  TensorView nodes;         // [batch, n] int32: indices of these drafts, then -1; or empty
  TensorView status;        // [batch] int32: SampleError; or empty
};

/// Accepts drafts so that the tokens are distributed exactly as the large model's (Leviathan et
/// al., 2023; trees as in SpecInfer, Miao et al., 2024). Let p be the large model's distribution. A
/// draft x, drawn from the distribution q, is accepted with probability min(1, p(x) / q(x)). If it
/// is not accepted, p becomes max(p - q, 0), normalised, and the next draft with the same parent is
/// tried. If there is none, a token is drawn from p. Probabilities are used as they are given, so
/// the rounding of 16-bit ones affects the result. The same arguments give the same tokens on every
/// device, in any batch.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
/// A request with an error gets tokens and nodes of -1, and accepts no draft; on the CPU such a
/// call is refused. A row of probabilities is checked only if a draw needs the whole row.
///   kInvalidArgument, kInvalidType  a tensor is malformed, or a request has an error, or outputs
///                                   share memory with another argument; nothing was written
///   kOutOfMemory                    on the CPU there is no memory for the results of the batch
///   kCudaError                      the launch failed
FLASHPLAN_API Status speculative_verify(const Drafts& drafts, const VerifyOptions& options,
                                        const VerifyOutputs& outputs,
                                        Stream stream = nullptr) noexcept;

}  // namespace flashplan
