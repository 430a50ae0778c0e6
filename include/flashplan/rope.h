// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding.
#pragma once

#include <array>
#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// How the frequencies of a model are changed for longer contexts.
enum class RopeScaling : int32_t {
  kLinear = 0,  // divides all frequencies by `scale`
  kLlama3,      // divides those with wavelengths near original_length or above (Llama 3.1)
  kYarn,        // divides those with few rotations in original_length (Peng et al., 2023)
};

/// Pair i of the rotary_dim / 2 pairs of dims turns by position * theta^(-2 i / rotary_dim)
/// radians; `scaling` changes these frequencies.
struct Rope {
  double theta = 10000.0;    // > 1
  double scale = 1.0;        // >= 1e-6
  int32_t rotary_dim = 0;    // even, <= 512: only the first dims of a head turn; 0: all of them
  bool interleaved = false;  // pairs are dims (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2)
  RopeScaling scaling = RopeScaling::kLinear;
  double original_length = 8192;  // positions that the model was first trained on; > 0
  // kLlama3: frequencies with wavelengths above original_length / low_freq_factor positions are
  // divided by `scale`, those with wavelengths below original_length / high_freq_factor are not;
  // low_freq_factor < high_freq_factor.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  // kYarn: frequencies of fewer than beta_slow rotations in original_length positions are divided
  // by `scale`, those of more than beta_fast are not; beta_slow < beta_fast.
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  // With kYarn: whether the dim numbers at which there are beta_fast and beta_slow rotations, which
  // are fractions, are rounded to integers, the first one down and the second one up.
  bool truncate = true;
  /// With kYarn or given frequencies: multiplies cosines and sines; a normal float32 > 0. 0 stands
  /// for 1 + ln(scale) / 10 with kYarn and scale > 1, else for 1.
  double attention_factor = 0.0;
  /// Frequencies of the caller, as LongRoPE needs, in radians per position: a number from 0 to 1e6
  /// for each of the rotary_dim / 2 pairs. They replace theta, scale and scaling. num_frequencies
  /// is 0 if none are given.
  int32_t num_frequencies = 0;
  std::array<double, 256> frequencies = {};
};

/// What apply_rope() divides q and k by when it writes 8-bit floats. Normal floats > 0.
struct RopeScales {
  float q_scale = 1.0F;
  float k_scale = 1.0F;
  /// [1] or [num_kv_heads] float32, on the device of q, or empty: factors by which q_scale and
  /// k_scale are multiplied, one for all kv heads or one for each. With several q_scales
  /// num_kv_heads divides num_qo_heads: neighbouring heads of q belong to one kv head. Not checked
  /// on a GPU.
  TensorView q_scales, k_scales;
};

/// Rotates q [tokens, num_qo_heads, head_dim] and k [tokens, num_kv_heads, head_dim] (float32,
/// float16 or bfloat16, one dtype, any strides) by `positions` [tokens] int32 or int64, in float32.
/// Results are shaped like q and k. They have the dtype of q, and may be q and k; or both are
/// float8_e4m3fn or float8_e5m2, with the bits that quantize_fp8() gives for the rotated q and k
/// with `scales`. Angles are accurate to 1e-4 radians for positions from -2^40 to 2^40 and
/// frequencies up to 1. Other positions are refused on the CPU. On CUDA they are not checked, and
/// are rotated by wrong angles.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
///   kInvalidArgument, kInvalidType  an argument is malformed, or a result shares memory with
///                                   another argument; nothing was written
///   kCudaError                      the launch failed
FLASHPLAN_API Status apply_rope(const TensorView& q, const TensorView& k,
                                const TensorView& positions, const Rope& rope,
                                const TensorView& out_q, const TensorView& out_k,
                                Stream stream = nullptr, const RopeScales& scales = {}) noexcept;

/// apply_rope() with the cosines and sines of the caller: row `position` of `cos_sin_cache`
/// [positions, rotary_dim] float32 has the cosine of each of the rotary_dim / 2 pairs, then the
/// sine of each. rotary_dim is even and at most 512; `interleaved` is that of Rope. Positions
/// outside of the table are refused on the CPU; on CUDA their tokens are not rotated.
FLASHPLAN_API Status apply_rope(const TensorView& q, const TensorView& k,
                                const TensorView& positions, const TensorView& cos_sin_cache,
                                bool interleaved, const TensorView& out_q, const TensorView& out_k,
                                Stream stream = nullptr, const RopeScales& scales = {}) noexcept;

}  // namespace flashplan
