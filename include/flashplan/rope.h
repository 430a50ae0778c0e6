// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// How the frequencies of a model are changed for longer contexts.
enum class RopeScaling : int32_t {
  kLinear = 0,  // all are divided by `scale`
  kLlama3,      // those of wavelengths near original_length and above it (Llama 3.1)
  kYarn,        // those of few rotations in original_length (Peng et al., 2023)
};

/// Pair i of rotary_dim / 2 turns by position * theta^(-2 i / rotary_dim) radians, as scaled.
struct Rope {
  double theta = 10000.0;    // > 1
  double scale = 1.0;        // > 0
  int32_t rotary_dim = 0;    // even, <= 512: the first dims of a head, the rest is kept; 0: all
  bool interleaved = false;  // pairs are dims (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2)
  RopeScaling scaling = RopeScaling::kLinear;
  double original_length = 8192;  // positions that the model was first trained on; > 0
  double low_freq_factor = 1.0;   // kLlama3: wavelengths above original_length / it are scaled
  double high_freq_factor =
      4.0;                  // kLlama3: those below original_length / it are not; > the low one
  double beta_fast = 32.0;  // kYarn: dims of more rotations are not scaled
  double beta_slow = 1.0;   // kYarn: dims of fewer rotations are scaled; < beta_fast
  double attention_factor = 0.0;  // kYarn: of cos and sin; 0: 1 + ln(scale) / 10 where scale > 1
};

/// Rotates q [tokens, num_qo_heads, head_dim] and k [tokens, num_kv_heads, head_dim] (float32,
/// float16 or bfloat16, one dtype, any strides) by `positions` [tokens] int32 or int64, in float32.
/// Results are shaped like q and k, and may be q and k.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
///   kInvalidArgument, kInvalidType  an argument is malformed, or a result shares memory with
///                                   another argument; nothing was written
///   kCudaError                      the launch failed
FLASHPLAN_API Status apply_rope(const TensorView& q, const TensorView& k,
                                const TensorView& positions, const Rope& rope,
                                const TensorView& out_q, const TensorView& out_k,
                                Stream stream = nullptr) noexcept;

}  // namespace flashplan
