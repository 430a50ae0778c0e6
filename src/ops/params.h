// SPDX-License-Identifier: Apache-2.0
// The parameters of the operators that work on rows, for the CPU and CUDA alike.
#pragma once

#include <cstdint>

#include "abi/head_scales.h"
#include "abi/host_device.h"
#include "abi/kv_view.h"
#include "abi/rope_turns.h"
#include "flashplan/activation.h"
#include "flashplan/quantize.h"
#include "flashplan/tensor.h"
#include "ops/rows.h"

namespace flashplan {

/// Parameters of rmsnorm(), add_rmsnorm() and layernorm().
struct NormParams {
  Rows x;
  Rows residual;                         // if given: x is added to it, and the sum is normalised
  Rows out;                              // may be x
  const void* weight = nullptr;          // [row_size]; null: nothing is multiplied
  const void* bias = nullptr;            // [row_size]; null: no bias is added
  const float* scales = nullptr;         // [1]: `scale` is multiplied by it; null: by 1
  DType dtype = DType::kFloat32;         // dtype of x and residual
  DType weight_dtype = DType::kFloat32;  // dtype of weight and bias: that of x, or float32
  DType out_dtype = DType::kFloat32;     // dtype of x, or an 8-bit float
  int32_t num_rows = 0;
  int32_t row_size = 0;
  float eps = 0.0F;
  float scale = 1.0F;          // divides the result
  float weight_offset = 0.0F;  // added to each weight
  bool centered = false;       // layernorm: the mean is subtracted
  bool pdl = false;            // programmatic dependent launch
};

/// Parameters of gated_activation(): out = activation(x[:row_size]) * x[row_size:] / scale.
struct ActivationParams {
  Rows x;  // each row has 2 * row_size elements
  Rows out;
  Activation activation = Activation::kSilu;
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  int32_t num_rows = 0;
  int32_t row_size = 0;
  float scale = 1.0F;
  bool pdl = false;  // programmatic dependent launch
};

/// Parameters of gather_rows(): out[i] = x[indices[i]].
struct GatherParams {
  const char* x = nullptr;  // num_x_rows rows
  int64_t x_stride = 0;     // bytes from one row of x to the next
  char* out = nullptr;      // num_rows rows
  int64_t out_stride = 0;   // bytes from one row of out to the next
  const void* indices = nullptr;
  int64_t row_bytes = 0;
  bool has_wide_indices = false;  // indices are int64, else int32
  int32_t item_bytes = 0;         // bytes of an element
  int32_t num_x_rows = 0;
  int32_t num_rows = 0;

  FLASHPLAN_HOST_DEVICE int64_t index(int32_t row) const {
    return has_wide_indices ? static_cast<const int64_t*>(indices)[row]
                            : static_cast<const int32_t*>(indices)[row];
  }
  FLASHPLAN_HOST_DEVICE bool is_inside(int64_t index) const {
    return index >= 0 && index < num_x_rows;
  }
};

/// A tensor [tokens, heads, head_dim], such as q or k, that is read (`from`), and the tensor of
/// results (`to`). Strides are in bytes.
struct RopeSide {
  const char* from = nullptr;
  int64_t from_token_stride = 0;
  int64_t from_head_stride = 0;
  char* to = nullptr;  // may be `from`
  int64_t to_token_stride = 0;
  int64_t to_head_stride = 0;
  int32_t num_heads = 0;
  // For 8-bit results: stored = value / (scale * the scale of the kv head).
  float scale = 1.0F;
  HeadScales scales;
  int32_t group_size = 1;  // query heads of a kv head

  FLASHPLAN_HOST_DEVICE float scale_of(int32_t head) const {
    return scale * scales.of(head / group_size);
  }
};

/// Parameters of quantize_fp8().
struct QuantizeParams {
  RopeSide heads;
  float* scale = nullptr;  // [num_scales]
  int32_t num_scales = 1;  // 1 for all heads, or one for each head
  ScaleSource source = ScaleSource::kValues;
  float number = 1.0F;
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat8E4M3;
  int32_t num_rows = 0;  // number of tokens
  int32_t head_dim = 0;

  FLASHPLAN_HOST_DEVICE float* scale_of(int32_t head) const {
    return scale + (num_scales > 1 ? head : 0);
  }
  /// The scale of heads whose largest finite magnitude is `amax`; 0 if amax is 0. It grows with
  /// amax, so threads may compute the scales of parts of a tensor; the largest one is that of the
  /// whole tensor.
  FLASHPLAN_HOST_DEVICE float scale_for(float amax) const {
    constexpr float kLeast = 1.17549435e-38F;  // the smallest normal number
    const float found = amax / (out_dtype == DType::kFloat8E4M3 ? 448.0F : 57344.0F);
    return amax > 0.0F && found < kLeast ? kLeast : found;
  }
};

struct RopeParams : RopeTurns {
  RopeSide sides[2];  // q, k
  const void* positions = nullptr;
  bool has_wide_positions = false;  // positions are int64, else int32
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;  // equal to `dtype`, or an 8-bit float
  int32_t num_rows = 0;               // number of tokens
  int32_t head_dim = 0;
  /// [table_rows, rotary_dim] cosines of all pairs at a position, then their sines; null: `turns`
  /// has the rotations.
  const float* table = nullptr;
  int64_t table_stride = 0;  // elements from one row of the table to the next
  int64_t table_rows = 0;

  FLASHPLAN_HOST_DEVICE double position(int32_t token) const {
    return has_wide_positions ? static_cast<double>(static_cast<const int64_t*>(positions)[token])
                              : static_cast<double>(static_cast<const int32_t*>(positions)[token]);
  }
  /// The cosines and sines at the position of a token; null outside of the table.
  FLASHPLAN_HOST_DEVICE const float* table_row(int32_t token) const {
    const int64_t row = has_wide_positions ? static_cast<const int64_t*>(positions)[token]
                                           : static_cast<const int32_t*>(positions)[token];
    return row >= 0 && row < table_rows ? table + row * table_stride : nullptr;
  }
};

/// Where new tokens are written in a paged cache, given in one of three ways: by the lengths of the
/// requests (at their ends), by a request and a position for each token, or by a slot for each
/// token. Tokens whose page is not in the cache are skipped.
struct TokenPlaces {
  const int32_t* indptr = nullptr;
  const int32_t* kv_lens = nullptr;
  PageTable pages;
  /// Given instead of indptr, kv_lens and page ids: for each token its slot, which is
  /// page * page_size + row in page, or -1 if the token is skipped.
  const int64_t* slots = nullptr;
  /// Given instead of indptr and kv_lens: the request of each token, -1 for none, and its position.
  const int32_t* requests = nullptr;
  const int32_t* positions = nullptr;
  int32_t batch_size = 0;

  FLASHPLAN_HOST_DEVICE bool by_lengths() const { return slots == nullptr && requests == nullptr; }
};

/// k or v of new tokens, and the cache they go to. Strides are in bytes.
struct AppendSide {
  const char* rows = nullptr;
  int64_t token_stride = 0;
  int64_t row_head_stride = 0;
  char* cache = nullptr;
  int64_t page_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
  int32_t num_heads = 0;  // 0 if the tensor has no elements
  int32_t head_dim = 0;
  float scale = 1.0F;  // stored = value / (scale * the scale of the head)
  HeadScales scales;
  bool verbatim = false;  // elements are copied without conversion, so NaN keeps its bits
  DType dtype = DType::kFloat32;
  DType cache_dtype = DType::kFloat32;

  FLASHPLAN_HOST_DEVICE float scale_of(int32_t head) const { return scale * scales.of(head); }
};

struct AppendParams {
  AppendSide sides[2];  // k, v
  TokenPlaces places;
  int32_t num_rows = 0;  // tokens; on a GPU an upper bound of their number: the rows of k and v
};

/// Parameters of rope_append_paged_kv(): k and v have one dtype, and so have their caches.
struct RopeAppendParams {
  RopeParams rope;  // sides[0] is q; sides[1] and `positions` are not set
  AppendParams append;
  int32_t num_rows = 0;  // equal to append.num_rows
  bool pdl = false;      // programmatic dependent launch
};

/// A number for each request, or one for all where `each` is null.
template <class Number>
struct Parameter {
  Number all;
  const Number* each;

  FLASHPLAN_HOST_DEVICE Number of(int32_t row) const { return each == nullptr ? all : each[row]; }
};

/// The random numbers of requests are those of Philox at (seed, offset, stream).
struct RandomParams {
  Parameter<int64_t> seed{};
  Parameter<int64_t> offset{};
  bool has_one_seed = false;  // seed.each has one entry, for all requests
  bool has_one_offset = false;

  FLASHPLAN_HOST_DEVICE int64_t seed_of(int32_t row) const {
    return seed.of(has_one_seed ? 0 : row);
  }
  FLASHPLAN_HOST_DEVICE int64_t offset_of(int32_t row) const {
    return offset.of(has_one_offset ? 0 : row);
  }
  FLASHPLAN_HOST_DEVICE uint32_t stream(int32_t row) const {
    return seed.each == nullptr || has_one_seed ? static_cast<uint32_t>(row) : 0U;
  }
};

struct SampleParams : RandomParams {
  const char* logits = nullptr;  // [num_logit_rows, vocab]
  int64_t row_stride = 0;        // bytes from one row of the logits to the next
  const float* bias = nullptr;   // added to the logits; null: no bias
  int64_t bias_stride = 0;       // elements from one row's bias to the next; 0: one bias for all
  const void* rows = nullptr;    // [num_rows] row of logits of request i; null: row i
  DType dtype = DType::kFloat32;
  bool has_wide_rows = false;  // `rows` has int64, else int32
  bool from_probs = false;
  bool joint = false;  // top-p also counts the mass that other filters drop
  int32_t num_logit_rows = 0;
  int32_t num_rows = 0;  // number of requests
  int32_t vocab = 0;
  Parameter<float> temperature{};
  Parameter<int32_t> top_k{};
  Parameter<float> top_p{};
  Parameter<float> min_p{};
  int32_t* ids = nullptr;
  float* logprobs = nullptr;  // null: not wanted
  int32_t* status = nullptr;  // null: not wanted

  /// The entry of `rows` for a request.
  FLASHPLAN_HOST_DEVICE int64_t given_row(int32_t row) const {
    return has_wide_rows ? static_cast<const int64_t*>(rows)[row]
                         : static_cast<const int32_t*>(rows)[row];
  }
  /// The row of the logits that a request draws from; -1 if the request's entry of `rows` is
  /// outside of the logits.
  FLASHPLAN_HOST_DEVICE int32_t logits_row(int32_t row) const {
    if (rows == nullptr) return row;
    const int64_t given = given_row(row);
    return given >= 0 && given < num_logit_rows ? static_cast<int32_t>(given) : -1;
  }
};

/// The largest number of likeliest tokens that sample() lists.
constexpr int32_t kMaxTopLogprobs = 256;

/// Parameters of filtered_probs() and top_k_mask(), which write a row for each row of the logits.
/// Without `out` they are the parameters of list_logprobs(), which runs after sample(): it writes
/// the log-probabilities of the tokens in `ids`, and the likeliest tokens with their
/// log-probabilities.
struct FilterParams : SampleParams {
  char* out = nullptr;     // [num_rows, vocab], or null
  int64_t out_stride = 0;  // bytes from one row of out to the next
  // true: writes logits, or -inf where they are dropped; false: writes probabilities.
  bool is_mask = false;
  int32_t num_top = 0;
  int32_t* top_ids = nullptr;      // [num_rows, num_top]
  float* top_logprobs = nullptr;   // [num_rows, num_top]
  int64_t top_id_stride = 0;       // elements from one row of top_ids to the next
  int64_t top_logprob_stride = 0;  // elements from one row of top_logprobs to the next

  FLASHPLAN_HOST_DEVICE int32_t* top_ids_of(int32_t row) const {
    return top_ids + row * top_id_stride;
  }
  FLASHPLAN_HOST_DEVICE float* top_logprobs_of(int32_t row) const {
    return top_logprobs + row * top_logprob_stride;
  }
};

/// The most drafts of a request.
constexpr int32_t kMaxDrafts = 512;

/// Parameters of speculative_verify().
struct VerifyParams : RandomParams {
  const void* tokens = nullptr;       // [num_rows, num_drafts]
  int64_t token_stride = 0;           // elements from one request to the next
  bool has_wide_tokens = false;       // tokens are int64, else int32
  const int32_t* parents = nullptr;   // null: draft i follows draft i - 1
  int64_t parent_stride = 0;          // elements from one request to the next; 0: one tree for all
  const char* draft_probs = nullptr;  // null: drafts were looked up, not drawn
  int64_t draft_request_stride = 0;   // bytes from one request to the next
  int64_t draft_row_stride = 0;
  const char* target_probs = nullptr;
  int64_t target_request_stride = 0;
  int64_t target_row_stride = 0;
  DType dtype = DType::kFloat32;
  int32_t num_rows = 0;
  int32_t num_drafts = 0;
  int32_t vocab = 0;
  int32_t* out = nullptr;  // [num_rows, num_drafts + 1]
  int64_t out_stride = 0;  // elements from one row to the next
  int32_t* num_accepted = nullptr;
  int32_t* nodes = nullptr;   // [num_rows, num_drafts]; null: not wanted
  int64_t node_stride = 0;    // elements from one row of nodes to the next
  int32_t* status = nullptr;  // null: not wanted

  FLASHPLAN_HOST_DEVICE int64_t token(int32_t row, int32_t draft) const {
    const int64_t index = row * token_stride + draft;
    return has_wide_tokens ? static_cast<const int64_t*>(tokens)[index]
                           : static_cast<const int32_t*>(tokens)[index];
  }
  FLASHPLAN_HOST_DEVICE int32_t parent(int32_t row, int32_t draft) const {
    return parents == nullptr ? draft - 1 : parents[row * parent_stride + draft];
  }
  /// The distribution that a draft was drawn from; null if the draft was looked up, so that its
  /// token has the probability 1.
  FLASHPLAN_HOST_DEVICE const char* draft_row(int32_t row, int32_t draft) const {
    if (draft_probs == nullptr) return nullptr;
    return draft_probs + row * draft_request_stride + draft * draft_row_stride;
  }
  /// The large model's distribution after a draft, or before all drafts if `draft` is -1.
  FLASHPLAN_HOST_DEVICE const char* target_row(int32_t row, int32_t draft) const {
    return target_probs + row * target_request_stride + (draft + 1) * target_row_stride;
  }
  /// Whether the draft's token is outside of [-1, vocab), or its parent does not come before it.
  FLASHPLAN_HOST_DEVICE bool is_wrong(int32_t row, int32_t draft) const {
    const int64_t id = token(row, draft);
    const int32_t before = parent(row, draft);
    return id < -1 || id >= vocab || before < -1 || before >= draft;
  }
};

/// The penalties of one request, for tokens that have occurred.
struct Penalties {
  float repetition;
  float presence;
  float frequency;

  FLASHPLAN_HOST_DEVICE static bool is_finite(float x) {
    constexpr float kMost = 3.40282347e38F;
    return x >= -kMost && x <= kMost;
  }
  FLASHPLAN_HOST_DEVICE bool are_valid() const {
    return is_finite(repetition) && repetition > 0.0F && is_finite(presence) &&
           is_finite(frequency);
  }
};

/// Parameters of apply_penalties().
struct PenaltyParams {
  char* logits = nullptr;         // [num_rows, vocab]
  int64_t row_stride = 0;         // bytes from one row of logits to the next
  const void* history = nullptr;  // [num_rows, max_len]
  int64_t history_stride = 0;     // elements from one row of history to the next
  const int32_t* history_lens = nullptr;
  Parameter<float> repetition{};
  Parameter<float> presence{};
  Parameter<float> frequency{};
  DType dtype = DType::kFloat32;
  bool has_wide_history = false;  // history has int64, else int32
  int32_t num_rows = 0;
  int32_t vocab = 0;
  int32_t max_len = 0;

  FLASHPLAN_HOST_DEVICE int64_t token(int32_t row, int32_t i) const {
    const int64_t index = row * history_stride + i;
    return has_wide_history ? static_cast<const int64_t*>(history)[index]
                            : static_cast<const int32_t*>(history)[index];
  }
  FLASHPLAN_HOST_DEVICE Penalties penalties_of(int32_t row) const {
    return {repetition.of(row), presence.of(row), frequency.of(row)};
  }
};

struct SoftmaxParams {
  const char* logits = nullptr;  // [num_rows, vocab]
  int64_t row_stride = 0;        // bytes from one row of logits to the next
  char* out = nullptr;
  int64_t out_stride = 0;  // bytes from one row of out to the next
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  int32_t num_rows = 0;
  int32_t vocab = 0;
  Parameter<float> temperature{};
};

}  // namespace flashplan
