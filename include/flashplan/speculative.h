// SPDX-License-Identifier: Apache-2.0
// From drafts of a small model to tokens of the large one.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/sampling.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// Drafts of a batch: chains of n tokens, or trees of n nodes. All tensors on one device.
struct Drafts {
  TensorView tokens;  // [batch, n <= 512] int32 or int64; -1: there is no such draft
  /// [batch, n, vocab] float32, float16 or bfloat16: row i is the distribution that draft i was
  /// drawn from.
  TensorView draft_probs;
  /// [batch, n + 1, vocab] of the same dtype: row 0 is the large model's distribution before all
  /// drafts, row i + 1 that after draft i.
  TensorView target_probs;
  /// [n] or [batch, n] int32, or empty: the draft that each draft follows, a smaller index, or -1
  /// for those that come first. Empty: draft i follows draft i - 1. Drafts that follow the same one
  /// must have been drawn independently of each other.
  TensorView parents;
};

struct VerifyOptions {
  /// As in SampleOptions. The random numbers are none that sample() uses.
  int64_t seed = 0;
  TensorView seeds;  // [batch] int64
  int64_t offset = 0;
  TensorView offsets;  // [batch] int64
};

struct VerifyOutputs {
  /// [batch, n + 1] int32: the drafts that are accepted, one of the large model's own, then -1.
  TensorView tokens;
  TensorView num_accepted;  // [batch] int32: drafts among the tokens
  TensorView nodes;         // [batch, n] int32: indices of these drafts, then -1; or empty
  TensorView status;        // [batch] int32: SampleError; or empty
};

/// Accepts drafts so that the tokens are distributed exactly as the large model's (Leviathan et
/// al., 2023; trees as in SpecInfer, Miao et al., 2024). A draft x of distribution q is accepted
/// with probability min(1, p(x) / q(x)); if it is not, p becomes max(p - q, 0), normalised, and the
/// next draft of the same parent has its turn. Where none is left, a token is drawn from p.
/// Probabilities are taken as they are: that those of 16 bits are rounded shows in the result. The
/// same arguments give the same tokens on every device, in any batch.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
/// Requests with an error get tokens and nodes of -1, and accept nothing. On the CPU they are
/// refused. Rows of probabilities that no draw needs as a whole are not checked.
///   kInvalidArgument, kInvalidType  a tensor is malformed, or a request has an error, or outputs
///                                   share memory with another argument; nothing was written
///   kOutOfMemory                    on the CPU, for the results of a batch
///   kCudaError                      the launch failed
FLASHPLAN_API Status speculative_verify(const Drafts& drafts, const VerifyOptions& options,
                                        const VerifyOutputs& outputs,
                                        Stream stream = nullptr) noexcept;

}  // namespace flashplan
