// SPDX-License-Identifier: Apache-2.0
// What an engine calls beside attention, for C: norms, activations, rotary embedding, and sampling.
// The rules of flashplan_c.h for statuses, messages, structs and memory hold here. Each function
// calls a C++ function of the same name, whose header (norm.h, rope.h, sampling.h, ...) says what
// it computes, which shapes and dtypes its tensors must have, and which errors it returns.
//
// A tensor argument must not be NULL unless its comment says so. On a GPU each call launches one
// kernel on `stream`, or a few where the C++ header says so, allocates nothing, does not
// synchronise, and may be captured into a graph. On the CPU a call returns when its results are
// written.
#pragma once

#include "flashplan/flashplan_c.h"

#ifdef __cplusplus
extern "C" {
#endif

// Computes out = x / sqrt(mean(x^2) + eps) * weight. weight may be NULL, and `out` may be x. If
// gemma is not 0, it multiplies by 1 + weight.
FLASHPLAN_API flashplan_status flashplan_rmsnorm(const flashplan_tensor* x,
                                                 const flashplan_tensor* weight,
                                                 const flashplan_tensor* out, float eps,
                                                 int32_t gemma, flashplan_stream stream,
                                                 char* message) FLASHPLAN_NOEXCEPT;

// Adds x to residual, then writes rmsnorm(residual) to x. If weight is NULL, nothing is multiplied
// by it.
FLASHPLAN_API flashplan_status flashplan_add_rmsnorm(const flashplan_tensor* x,
                                                     const flashplan_tensor* residual,
                                                     const flashplan_tensor* weight, float eps,
                                                     int32_t gemma, flashplan_stream stream,
                                                     char* message) FLASHPLAN_NOEXCEPT;

// Computes out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. weight and bias may be
// NULL, and out may be x.
FLASHPLAN_API flashplan_status flashplan_layernorm(const flashplan_tensor* x,
                                                   const flashplan_tensor* weight,
                                                   const flashplan_tensor* bias,
                                                   const flashplan_tensor* out, float eps,
                                                   flashplan_stream stream,
                                                   char* message) FLASHPLAN_NOEXCEPT;

// `activation` of flashplan_gated_activation
enum { FLASHPLAN_SILU = 0, FLASHPLAN_GELU = 1, FLASHPLAN_GELU_TANH = 2 };

// Computes out = activation(x[..., :d]) * x[..., d:] / scale.
FLASHPLAN_API flashplan_status flashplan_gated_activation(int32_t activation,
                                                          const flashplan_tensor* x,
                                                          const flashplan_tensor* out, float scale,
                                                          flashplan_stream stream,
                                                          char* message) FLASHPLAN_NOEXCEPT;

// Computes out[i] = x[indices[i]].
FLASHPLAN_API flashplan_status flashplan_gather_rows(const flashplan_tensor* x,
                                                     const flashplan_tensor* indices,
                                                     const flashplan_tensor* out,
                                                     flashplan_stream stream,
                                                     char* message) FLASHPLAN_NOEXCEPT;

// flashplan_rope.scaling
enum { FLASHPLAN_ROPE_LINEAR = 0, FLASHPLAN_ROPE_LLAMA3 = 1, FLASHPLAN_ROPE_YARN = 2 };

// A rotation: Rope of rope.h, which gives the defaults.
typedef struct flashplan_rope {
  size_t struct_size;
  double theta;
  double scale;
  int32_t rotary_dim;   // 0: all dims of a head
  int32_t interleaved;  // 0 or 1
  int32_t scaling;
  int32_t reserved;  // 0
  double original_length;
  double low_freq_factor;
  double high_freq_factor;
  double beta_fast;
  double beta_slow;
  double attention_factor;
  const double* frequencies;  // or NULL
  int32_t num_frequencies;
  int32_t truncate;  // 0 or 1
} flashplan_rope;

// Sets the defaults of rope.h.
FLASHPLAN_API void flashplan_rope_init(flashplan_rope* rope, size_t struct_size) FLASHPLAN_NOEXCEPT;

// Rotates q and k by their positions, at most +-2^40, and writes the results to out_q and out_k,
// which may be q and k themselves.
FLASHPLAN_API flashplan_status flashplan_apply_rope(
    const flashplan_tensor* q, const flashplan_tensor* k, const flashplan_tensor* positions,
    const flashplan_rope* rope, const flashplan_tensor* out_q, const flashplan_tensor* out_k,
    flashplan_stream stream, char* message) FLASHPLAN_NOEXCEPT;

// Rotates as flashplan_apply_rope does, by a table instead of a flashplan_rope: row i of
// cos_sin_cache, [rows, rotary_dim] float32, has the cosines and then the sines of position i.
// interleaved is 0 or 1.
FLASHPLAN_API flashplan_status flashplan_apply_rope_table(
    const flashplan_tensor* q, const flashplan_tensor* k, const flashplan_tensor* positions,
    const flashplan_tensor* cos_sin_cache, int32_t interleaved, const flashplan_tensor* out_q,
    const flashplan_tensor* out_k, flashplan_stream stream, char* message) FLASHPLAN_NOEXCEPT;

// What flashplan_apply_rope_scaled rotates: RopeScales of rope.h and the tensors of apply_rope.
typedef struct flashplan_rope_tensors {
  size_t struct_size;
  const flashplan_tensor* q;
  const flashplan_tensor* k;
  const flashplan_tensor* positions;
  const flashplan_tensor* cos_sin_cache;  // or NULL
  const flashplan_tensor* out_q;          // written
  const flashplan_tensor* out_k;          // written
  const flashplan_tensor* q_scales;       // or NULL
  const flashplan_tensor* k_scales;       // or NULL
  float q_scale;
  float k_scale;
  int32_t interleaved;  // of cos_sin_cache: 0 or 1
  int32_t reserved;     // 0
} flashplan_rope_tensors;

// Sets scales to 1 and everything else to NULL or 0.
FLASHPLAN_API void flashplan_rope_tensors_init(flashplan_rope_tensors* tensors,
                                               size_t struct_size) FLASHPLAN_NOEXCEPT;

// Rotates as flashplan_apply_rope does, and divides 8-bit results by scales. rope is NULL if there
// is a cos_sin_cache.
FLASHPLAN_API flashplan_status flashplan_apply_rope_scaled(const flashplan_rope_tensors* tensors,
                                                           const flashplan_rope* rope,
                                                           flashplan_stream stream,
                                                           char* message) FLASHPLAN_NOEXCEPT;

// `source` of flashplan_quantize_fp8
enum {
  FLASHPLAN_SCALE_OF_VALUES = 0,
  FLASHPLAN_SCALE_OF_NUMBER = 1,
  FLASHPLAN_SCALE_OF_TENSOR = 2
};

// Computes out = x / scale, in an 8-bit float dtype. scale, float32 [1] or [heads], is written
// unless source is FLASHPLAN_SCALE_OF_TENSOR.
FLASHPLAN_API flashplan_status flashplan_quantize_fp8(const flashplan_tensor* x,
                                                      const flashplan_tensor* out,
                                                      const flashplan_tensor* scale, int32_t source,
                                                      float number, flashplan_stream stream,
                                                      char* message) FLASHPLAN_NOEXCEPT;

// Does what flashplan_apply_rope and flashplan_append_paged_kv do, at once. out_q is written, and
// may be q. slot_mapping, batch_indices and positions of `tensors` must be NULL.
FLASHPLAN_API flashplan_status flashplan_rope_append_paged_kv(
    const flashplan_tensor* q, const flashplan_append_tensors* tensors, const flashplan_rope* rope,
    const flashplan_tensor* out_q, flashplan_stream stream, char* message) FLASHPLAN_NOEXCEPT;

// New tokens of multi-head latent attention and the cache they go to: MlaAppendTensors of mla.h.
typedef struct flashplan_mla_append_tensors {
  size_t struct_size;
  const flashplan_tensor* kv_c;
  const flashplan_tensor* k_pe;        // or NULL
  const flashplan_tensor* cache;       // written
  const flashplan_tensor* cache_tail;  // written, or NULL
  const flashplan_tensor* slot_mapping;
  const flashplan_tensor* norm_weight;  // or NULL
  const flashplan_tensor* positions;    // NULL without a rotation
  const flashplan_tensor* q_pe;         // written, or NULL
  float scale;
  float eps;
} flashplan_mla_append_tensors;

// Sets scale and eps to their defaults in mla.h, and all tensors to NULL.
FLASHPLAN_API void flashplan_mla_append_tensors_init(flashplan_mla_append_tensors* tensors,
                                                     size_t struct_size) FLASHPLAN_NOEXCEPT;

// Writes the latent and rotary dims of new tokens to the cache, after normalising, rotating and
// narrowing them as the arguments say. Without rope (NULL) nothing is rotated.
FLASHPLAN_API flashplan_status flashplan_append_mla(const flashplan_mla_append_tensors* tensors,
                                                    const flashplan_rope* rope,
                                                    flashplan_stream stream,
                                                    char* message) FLASHPLAN_NOEXCEPT;

// Ranges of cached tokens and where they go: MlaGatherTensors of mla.h.
typedef struct flashplan_mla_gather_tensors {
  size_t struct_size;
  const flashplan_tensor* cache;
  const flashplan_tensor* cache_tail;  // or NULL
  const flashplan_tensor* block_table;
  const flashplan_tensor* kv_indptr;
  const flashplan_tensor* starts;    // or NULL
  const flashplan_tensor* out;       // written
  const flashplan_tensor* out_tail;  // written, or NULL
  float scale;
  int32_t reserved;  // 0
} flashplan_mla_gather_tensors;

// Sets scale to 1 and everything else to NULL or 0.
FLASHPLAN_API void flashplan_mla_gather_tensors_init(flashplan_mla_gather_tensors* tensors,
                                                     size_t struct_size) FLASHPLAN_NOEXCEPT;

// Copies the keys of tokens out of their pages, and widens them.
FLASHPLAN_API flashplan_status flashplan_gather_mla(const flashplan_mla_gather_tensors* tensors,
                                                    flashplan_stream stream,
                                                    char* message) FLASHPLAN_NOEXCEPT;

// Computes out = softmax(logits / temperature). temperatures is NULL, or has a number for each
// request instead of `temperature`. `out` may be logits.
FLASHPLAN_API flashplan_status flashplan_softmax(const flashplan_tensor* logits, float temperature,
                                                 const flashplan_tensor* temperatures,
                                                 const flashplan_tensor* out,
                                                 flashplan_stream stream,
                                                 char* message) FLASHPLAN_NOEXCEPT;

// Arguments of flashplan_apply_penalties(). Each penalty is given as one number for all requests,
// or as a tensor with one number per request; a tensor that is not NULL replaces the number.
typedef struct flashplan_penalty_tensors {
  size_t struct_size;
  const flashplan_tensor* logits;  // written
  const flashplan_tensor* history;
  const flashplan_tensor* history_lens;
  const flashplan_tensor* repetitions;
  const flashplan_tensor* presences;
  const flashplan_tensor* frequencies;
  float repetition;
  float presence;
  float frequency;
  int32_t reserved;  // 0
} flashplan_penalty_tensors;

// Sets `repetition` to 1 and everything else to NULL or 0, which changes no logit.
FLASHPLAN_API void flashplan_penalty_tensors_init(flashplan_penalty_tensors* tensors,
                                                  size_t struct_size) FLASHPLAN_NOEXCEPT;

FLASHPLAN_API flashplan_status flashplan_apply_penalties(const flashplan_penalty_tensors* tensors,
                                                         flashplan_stream stream,
                                                         char* message) FLASHPLAN_NOEXCEPT;

// What a call writes to `status` for each request: SampleError of sampling.h.
enum {
  FLASHPLAN_SAMPLE_OK = 0,
  FLASHPLAN_SAMPLE_TEMPERATURE = 1,    // not finite, or < 0
  FLASHPLAN_SAMPLE_TOP_K = 2,          // < 1
  FLASHPLAN_SAMPLE_TOP_P = 3,          // outside (0, 1]
  FLASHPLAN_SAMPLE_MIN_P = 4,          // outside [0, 1]
  FLASHPLAN_SAMPLE_NOT_A_NUMBER = 5,   // a NaN, or +inf among logits
  FLASHPLAN_SAMPLE_NO_TOKEN = 6,       // all logits -inf
  FLASHPLAN_SAMPLE_PROBABILITIES = 7,  // not a distribution
  FLASHPLAN_SAMPLE_DRAFT = 8,          // the id is no token, or the parent is not an earlier draft
  FLASHPLAN_SAMPLE_ROW = 9             // an entry of `rows` is outside of the logits
};

// Arguments of flashplan_sample(): SampleOptions and SampleOutputs of sampling.h. A parameter's
// tensor, unless it is NULL, replaces the number for all requests.
typedef struct flashplan_sample_tensors {
  size_t struct_size;
  const flashplan_tensor* logits;
  const flashplan_tensor* out;       // written: ids
  const flashplan_tensor* logprobs;  // written, or NULL
  const flashplan_tensor* status;    // written, or NULL
  const flashplan_tensor* temperatures;
  const flashplan_tensor* top_ks;
  const flashplan_tensor* top_ps;
  const flashplan_tensor* min_ps;
  const flashplan_tensor* seeds;
  const flashplan_tensor* offsets;
  const flashplan_tensor* logit_bias;  // or NULL
  int64_t seed;
  int64_t offset;
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
  int32_t from_probs;            // 0 or 1: `logits` are probabilities
  int32_t joint;                 // 0 or 1: all filters look at the whole row
  const flashplan_tensor* rows;  // of the logits, one for each request; or NULL
  // The likeliest tokens of each request and their log-probabilities: written, or both NULL.
  const flashplan_tensor* top_ids;
  const flashplan_tensor* top_logprobs;
  int32_t raw_logprobs;  // 0 or 1: log-probabilities are those of the logits, before all options
  int32_t reserved;      // 0
} flashplan_sample_tensors;

// Sets temperature 1, no filter, seed and offset 0, and everything else to NULL or 0.
FLASHPLAN_API void flashplan_sample_tensors_init(flashplan_sample_tensors* tensors,
                                                 size_t struct_size) FLASHPLAN_NOEXCEPT;

FLASHPLAN_API flashplan_status flashplan_sample(const flashplan_sample_tensors* tensors,
                                                flashplan_stream stream,
                                                char* message) FLASHPLAN_NOEXCEPT;

// Writes to out [batch, vocab] float32 the distribution that flashplan_sample() draws from: see
// filtered_probs() in sampling.h. Outputs other than out and status, and rows, must be NULL.
FLASHPLAN_API flashplan_status flashplan_filtered_probs(const flashplan_sample_tensors* tensors,
                                                        flashplan_stream stream,
                                                        char* message) FLASHPLAN_NOEXCEPT;

// Copies the top_k largest logits to out; the others become -infinity. top_ks is NULL, or has a
// number for each request instead of `top_k`. `out` may be logits.
FLASHPLAN_API flashplan_status flashplan_top_k_mask(const flashplan_tensor* logits, int32_t top_k,
                                                    const flashplan_tensor* top_ks,
                                                    const flashplan_tensor* out,
                                                    flashplan_stream stream,
                                                    char* message) FLASHPLAN_NOEXCEPT;

// Arguments of flashplan_speculative_verify(): Drafts, VerifyOptions and VerifyOutputs of
// speculative.h. `seeds` and `offsets`, unless they are NULL, replace the numbers for all requests.
typedef struct flashplan_verify_tensors {
  size_t struct_size;
  const flashplan_tensor* draft_tokens;
  const flashplan_tensor* draft_probs;  // NULL: drafts were looked up
  const flashplan_tensor* target_probs;
  const flashplan_tensor* draft_parents;  // NULL: chains
  const flashplan_tensor* seeds;
  const flashplan_tensor* offsets;
  const flashplan_tensor* out;           // written: tokens
  const flashplan_tensor* num_accepted;  // written
  const flashplan_tensor* nodes;         // written, or NULL
  const flashplan_tensor* status;        // written, or NULL
  int64_t seed;
  int64_t offset;
} flashplan_verify_tensors;

// Sets everything to NULL or 0.
FLASHPLAN_API void flashplan_verify_tensors_init(flashplan_verify_tensors* tensors,
                                                 size_t struct_size) FLASHPLAN_NOEXCEPT;

FLASHPLAN_API flashplan_status flashplan_speculative_verify(const flashplan_verify_tensors* tensors,
                                                            flashplan_stream stream,
                                                            char* message) FLASHPLAN_NOEXCEPT;

#ifdef __cplusplus
}
#endif
