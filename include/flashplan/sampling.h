// SPDX-License-Identifier: Apache-2.0
// Sampling: draws tokens from logits, and filters logits.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// What is wrong with a row of logits and its parameters.
enum class SampleError : int32_t {
  kNone = 0,
  kTemperature,    // not finite, or < 0
  kTopK,           // < 1
  kTopP,           // outside (0, 1]
  kMinP,           // outside [0, 1]
  kNotANumber,     // a NaN, or +inf among logits
  kNoToken,        // all logits -inf
  kProbabilities,  // from_probs: one is negative or above 1, or their sum is not within 1 % of 1
  kDraft,          // speculative_verify(): an id is no token, or a parent is no earlier draft
  kRow,            // an entry of SampleOptions::rows is outside of the logits
};

/// How tokens are drawn. A parameter is one number for all requests, or a tensor [batch] with a
/// number for each. Filters apply in this order: temperature, top-k, softmax, min-p, top-p. Each
/// one sees the renormalised distribution that the one before left; `joint` changes that. Of equal
/// logits, those with smaller ids are kept first.
struct SampleOptions {
  float temperature = 1.0F;   // >= 0; 0: takes the largest logit, and ignores the other parameters
  TensorView temperatures;    // float32
  int32_t top_k = INT32_MAX;  // >= 1: keeps the top_k largest logits
  TensorView top_ks;          // int32
  float top_p = 1.0F;  // in (0, 1]: keeps the fewest largest probabilities with a sum >= top_p
  TensorView top_ps;   // float32
  float min_p = 0.0F;  // in [0, 1]: keeps probabilities >= min_p * the largest one
  TensorView min_ps;   // float32
  /// Random numbers are those of Philox at (seed, offset, stream). With one seed for all, request i
  /// has stream i. With a seed for each, all requests have stream 0, so that a request's place in
  /// the batch does not matter.
  int64_t seed = 0;
  TensorView seeds;    // int64 [batch], or [1]: one seed for all, in memory of the device
  int64_t offset = 0;  // give each token of a request another offset
  TensorView offsets;  // int64 [batch] or [1]
  /// `logits` holds probabilities. The temperature must then be 1 or 0 for all requests, and there
  /// must be no logit_bias.
  bool from_probs = false;
  TensorView logit_bias;  // float32 [vocab] or of logits' shape, added to the logits; or empty
  /// All filters look at the distribution of the whole row, and a token is kept if each keeps it:
  /// top-p then counts what top-k and min-p drop, too.
  bool joint = false;
  /// [batch] int32 or int64: request i draws from row rows[i] of the logits, which may have any
  /// number of rows. Empty: from row i.
  TensorView rows;
};

/// Which distribution log-probabilities are taken from.
enum class LogprobsOf : int32_t {
  kFiltered = 0,  // the one that tokens are drawn from
  kRaw,           // the one of the input, without temperature, bias and filters
};

struct SampleOutputs {
  TensorView ids;       // [batch] int32
  TensorView logprobs;  // [batch] float32: logarithm of the token's probability; or empty
  TensorView status;    // [batch] int32: SampleError; or empty
  LogprobsOf logprobs_of = LogprobsOf::kFiltered;
  /// [batch, n] int32 and float32, 1 <= n <= min(vocab, 256), or empty: the n likeliest tokens, the
  /// likeliest first and equal ones by id, and their log-probabilities. Where fewer tokens have a
  /// probability above 0, ids are -1 and log-probabilities -infinity at the end.
  TensorView top_ids{};
  TensorView top_logprobs{};
};

/// Draws a token for each request, from its row of logits [batch, vocab] (float32, float16 or
/// bfloat16; rows may have any stride). Weights are integers. With filters, the largest logit of
/// the row weighs 2^30, the other weights are rounded to nearest, and a token is drawn with exactly
/// the probability weight / sum of the weights. Without filters, the row is divided into blocks of
/// 768 ids: one random number draws a block by its share of the row, and another one an id of the
/// block by its weight there, which is 2^27 for the block's largest logit. The same inputs give the
/// same ids on every device, in any batch.
///
/// On CUDA: one launch on `stream`, or two with raw log-probabilities or the likeliest tokens, no
/// allocation, no synchronisation; may be captured in a graph. Rows with an error get the id -1 and
/// a logprob of NaN, also in the lists of the likeliest tokens. On the CPU a call with such a row
/// is refused:
///   kInvalidArgument, kInvalidType  a tensor is malformed, or a row has an error, or outputs share
///                                   memory with another argument; nothing was written
///   kOutOfMemory                    on the CPU there is no memory for the results of the batch
///   kCudaError                      the launch failed
FLASHPLAN_API Status sample(const TensorView& logits, const SampleOptions& options,
                            const SampleOutputs& outputs, Stream stream = nullptr) noexcept;

/// Writes to out [batch, vocab] float32 the distribution that sample() draws from with these
/// options: the probabilities of the tokens that the filters keep, and 0 for the others. Weights
/// are rounded as in sample(), so the sum of a row differs from 1 by at most vocab * 2^-31. If the
/// input is logits, a probability below 2^-32 of the largest one may become 0. With from_probs and
/// top_k or top_p this renormalises probabilities. `options.rows` must be empty; seeds and offsets
/// are not used. `out` may be the logits themselves, if they are float32. `status` [batch] int32
/// gets a SampleError, or is empty.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
/// Rows with an error become NaN. On the CPU a call with such a row is refused:
///   kInvalidArgument, kInvalidType  a tensor is malformed, or a row has an error, or outputs share
///                                   memory with another argument; nothing was written
///   kOutOfMemory                    on the CPU there is no memory for the results of the batch
///   kCudaError                      the launch failed
FLASHPLAN_API Status filtered_probs(const TensorView& logits, const SampleOptions& options,
                                    const TensorView& out, const TensorView& status = {},
                                    Stream stream = nullptr) noexcept;

/// Copies logits [batch, vocab] to out, which has their dtype and shape; the logits that top-k
/// drops become -infinity. top_k is a number >= 1 for all requests, or `top_ks` [batch] int32 has
/// one for each. Of equal logits, those with smaller ids are kept first. `out` may be the logits. A
/// row has an error if it has NaN or +inf, nothing but -inf, or a top_k below 1. Launches, rows
/// with an error and returned errors are as in filtered_probs().
FLASHPLAN_API Status top_k_mask(const TensorView& logits, int32_t top_k, const TensorView& top_ks,
                                const TensorView& out, Stream stream = nullptr) noexcept;

/// Computes out = softmax(logits / temperature) of each row of [batch, vocab]. out is float32 or
/// has logits' dtype, and may be logits. The temperature is a finite number > 0, or one for each
/// request in `temperatures` [batch] float32. A row with NaN or +inf, or with nothing but -inf,
/// becomes NaN. A logit gets the probability 0 if its difference from the row's largest one
/// overflows float32, as for -3e38 and 3e38.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
///   kInvalidArgument, kInvalidType  a tensor is malformed, or out shares memory with another
///                                   argument; nothing was written
///   kCudaError                      the launch failed
FLASHPLAN_API Status softmax(const TensorView& logits, float temperature,
                             const TensorView& temperatures, const TensorView& out,
                             Stream stream = nullptr) noexcept;

}  // namespace flashplan
