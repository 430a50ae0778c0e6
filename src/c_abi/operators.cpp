// SPDX-License-Identifier: Apache-2.0
// The functions of flashplan_c_ops.h, except those in quantize.cpp: each one reads the caller's
// structs and calls the C++ library.
#include "c_abi/read_structs.h"
#include "c_abi/report.h"
#include "c_abi/structs.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c_ops.h"

namespace flashplan::c_abi {
namespace {

static_assert(is_same(FLASHPLAN_SILU, Activation::kSilu) &&
              is_same(FLASHPLAN_GELU, Activation::kGelu) &&
              is_same(FLASHPLAN_GELU_TANH, Activation::kGeluTanh));
static_assert(is_same(FLASHPLAN_SAMPLE_OK, SampleError::kNone) &&
              is_same(FLASHPLAN_SAMPLE_TEMPERATURE, SampleError::kTemperature) &&
              is_same(FLASHPLAN_SAMPLE_TOP_K, SampleError::kTopK) &&
              is_same(FLASHPLAN_SAMPLE_TOP_P, SampleError::kTopP) &&
              is_same(FLASHPLAN_SAMPLE_MIN_P, SampleError::kMinP) &&
              is_same(FLASHPLAN_SAMPLE_NOT_A_NUMBER, SampleError::kNotANumber) &&
              is_same(FLASHPLAN_SAMPLE_NO_TOKEN, SampleError::kNoToken) &&
              is_same(FLASHPLAN_SAMPLE_PROBABILITIES, SampleError::kProbabilities) &&
              is_same(FLASHPLAN_SAMPLE_DRAFT, SampleError::kDraft) &&
              is_same(FLASHPLAN_SAMPLE_ROW, SampleError::kRow));

flashplan_penalty_tensors default_penalty_tensors() noexcept {
  flashplan_penalty_tensors t = {};
  t.repetition = PenaltyOptions().repetition;
  return t;
}

flashplan_sample_tensors default_sample_tensors() noexcept {
  const SampleOptions defaults;
  flashplan_sample_tensors t = {};
  t.temperature = defaults.temperature;
  t.top_k = defaults.top_k;
  t.top_p = defaults.top_p;
  return t;
}

RmsNormOptions rms_norm_options(float eps, int32_t gemma) noexcept {
  RmsNormOptions options;
  options.eps = eps;
  options.gemma = gemma != 0;
  return options;
}

Status normalise(const flashplan_tensor* x, const flashplan_tensor* weight,
                 const flashplan_tensor* out, const RmsNormOptions& options,
                 Stream stream) noexcept {
  TensorView x_view, weight_view, out_view;
  FLASHPLAN_RETURN_IF_ERROR(
      read_tensors({{"x", x, &x_view}, {"weight", weight, &weight_view}, {"out", out, &out_view}}));
  return rmsnorm(x_view, weight_view, out_view, options, stream);
}

Status add_and_normalise(const flashplan_tensor* x, const flashplan_tensor* residual,
                         const flashplan_tensor* weight, const RmsNormOptions& options,
                         Stream stream) noexcept {
  TensorView x_view, residual_view, weight_view;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"x", x, &x_view},
                                          {"residual", residual, &residual_view},
                                          {"weight", weight, &weight_view}}));
  return add_rmsnorm(x_view, residual_view, weight_view, options, stream);
}

Status normalise_centered(const flashplan_tensor* x, const flashplan_tensor* weight,
                          const flashplan_tensor* bias, const flashplan_tensor* out, float eps,
                          Stream stream) noexcept {
  TensorView x_view, weight_view, bias_view, out_view;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"x", x, &x_view},
                                          {"weight", weight, &weight_view},
                                          {"bias", bias, &bias_view},
                                          {"out", out, &out_view}}));
  return layernorm(x_view, weight_view, bias_view, out_view, {eps}, stream);
}

Status activate(int32_t activation, const flashplan_tensor* x, const flashplan_tensor* out,
                float scale, Stream stream) noexcept {
  TensorView x_view, out_view;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"x", x, &x_view}, {"out", out, &out_view}}));
  return gated_activation(static_cast<Activation>(activation), x_view, out_view, scale, stream);
}

Status gather(const flashplan_tensor* x, const flashplan_tensor* indices,
              const flashplan_tensor* out, Stream stream) noexcept {
  TensorView x_view, indices_view, out_view;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors(
      {{"x", x, &x_view}, {"indices", indices, &indices_view}, {"out", out, &out_view}}));
  return gather_rows(x_view, indices_view, out_view, stream);
}

Status rotate(const flashplan_tensor* q, const flashplan_tensor* k,
              const flashplan_tensor* positions, const flashplan_rope* given,
              const flashplan_tensor* out_q, const flashplan_tensor* out_k,
              Stream stream) noexcept {
  Rope rope;
  FLASHPLAN_RETURN_IF_ERROR(read_rope(given, &rope));
  TensorView q_view, k_view, positions_view, out_q_view, out_k_view;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"q", q, &q_view},
                                          {"k", k, &k_view},
                                          {"positions", positions, &positions_view},
                                          {"out_q", out_q, &out_q_view},
                                          {"out_k", out_k, &out_k_view}}));
  return apply_rope(q_view, k_view, positions_view, rope, out_q_view, out_k_view, stream);
}

Status rotate_by_table(const flashplan_tensor* q, const flashplan_tensor* k,
                       const flashplan_tensor* positions, const flashplan_tensor* table,
                       int32_t interleaved, const flashplan_tensor* out_q,
                       const flashplan_tensor* out_k, Stream stream) noexcept {
  TensorView q_view, k_view, positions_view, table_view, out_q_view, out_k_view;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"q", q, &q_view},
                                          {"k", k, &k_view},
                                          {"positions", positions, &positions_view},
                                          {"cos_sin_cache", table, &table_view},
                                          {"out_q", out_q, &out_q_view},
                                          {"out_k", out_k, &out_k_view}}));
  return apply_rope(q_view, k_view, positions_view, table_view, interleaved != 0, out_q_view,
                    out_k_view, stream);
}

Status rotate_and_append(const flashplan_tensor* q, const flashplan_append_tensors* given,
                         const flashplan_rope* given_rope, const flashplan_tensor* out_q,
                         Stream stream) noexcept {
  AppendTensors tensors;
  FLASHPLAN_RETURN_IF_ERROR(read_append_tensors(given, &tensors));
  Rope rope;
  FLASHPLAN_RETURN_IF_ERROR(read_rope(given_rope, &rope));
  TensorView q_view, out_q_view;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"q", q, &q_view}, {"out_q", out_q, &out_q_view}}));
  return rope_append_paged_kv(q_view, tensors, rope, out_q_view, stream);
}

Status take_softmax(const flashplan_tensor* logits, float temperature,
                    const flashplan_tensor* temperatures, const flashplan_tensor* out,
                    Stream stream) noexcept {
  TensorView logits_view, temperatures_view, out_view;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"logits", logits, &logits_view},
                                          {"temperature", temperatures, &temperatures_view},
                                          {"out", out, &out_view}}));
  return softmax(logits_view, temperature, temperatures_view, out_view, stream);
}

flashplan_mla_append_tensors default_mla_append_tensors() noexcept {
  const MlaAppendTensors defaults;
  flashplan_mla_append_tensors t = {};
  t.scale = defaults.scale;
  t.eps = defaults.eps;
  return t;
}

flashplan_mla_gather_tensors default_mla_gather_tensors() noexcept {
  flashplan_mla_gather_tensors t = {};
  t.scale = MlaGatherTensors().scale;
  return t;
}

Status append_keys(const flashplan_mla_append_tensors* given, const flashplan_rope* turns,
                   Stream stream) noexcept {
  flashplan_mla_append_tensors t;
  FLASHPLAN_RETURN_IF_ERROR(read("tensors", given, default_mla_append_tensors(), &t));
  Rope rope;
  if (turns != nullptr) FLASHPLAN_RETURN_IF_ERROR(read_rope(turns, &rope));
  MlaAppendTensors tensors;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"kv_c", t.kv_c, &tensors.kv_c},
                                          {"k_pe", t.k_pe, &tensors.k_pe},
                                          {"cache", t.cache, &tensors.cache.latent},
                                          {"cache_tail", t.cache_tail, &tensors.cache.tail},
                                          {"slot_mapping", t.slot_mapping, &tensors.slot_mapping},
                                          {"norm_weight", t.norm_weight, &tensors.norm_weight},
                                          {"positions", t.positions, &tensors.positions},
                                          {"q_pe", t.q_pe, &tensors.q_pe}}));
  tensors.scale = t.scale;
  tensors.eps = t.eps;
  return append_mla(tensors, turns != nullptr ? &rope : nullptr, stream);
}

Status gather_keys(const flashplan_mla_gather_tensors* given, Stream stream) noexcept {
  flashplan_mla_gather_tensors t;
  FLASHPLAN_RETURN_IF_ERROR(read("tensors", given, default_mla_gather_tensors(), &t));
  FLASHPLAN_RETURN_IF_ERROR(check_reserved("tensors", t.reserved));
  MlaGatherTensors tensors;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"cache", t.cache, &tensors.cache.latent},
                                          {"cache_tail", t.cache_tail, &tensors.cache.tail},
                                          {"block_table", t.block_table, &tensors.block_table},
                                          {"kv_indptr", t.kv_indptr, &tensors.kv_indptr},
                                          {"starts", t.starts, &tensors.starts},
                                          {"out", t.out, &tensors.out},
                                          {"out_tail", t.out_tail, &tensors.out_tail}}));
  tensors.scale = t.scale;
  return gather_mla(tensors, stream);
}

Status penalise(const flashplan_penalty_tensors* given, Stream stream) noexcept {
  flashplan_penalty_tensors t;
  FLASHPLAN_RETURN_IF_ERROR(read("tensors", given, default_penalty_tensors(), &t));
  FLASHPLAN_RETURN_IF_ERROR(check_reserved("tensors", t.reserved));
  TensorView logits, history, history_lens;
  PenaltyOptions options;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"logits", t.logits, &logits},
                                          {"history", t.history, &history},
                                          {"history_lens", t.history_lens, &history_lens},
                                          {"repetition", t.repetitions, &options.repetitions},
                                          {"presence", t.presences, &options.presences},
                                          {"frequency", t.frequencies, &options.frequencies}}));
  options.repetition = t.repetition;
  options.presence = t.presence;
  options.frequency = t.frequency;
  return apply_penalties(logits, history, history_lens, options, stream);
}

/// What a flashplan_sample_tensors holds, as arguments of sample() and filtered_probs().
struct Sampling {
  TensorView logits;
  SampleOptions options;
  SampleOutputs outputs;
};

Status read_sampling(const flashplan_sample_tensors* given, Sampling* sampling) noexcept {
  flashplan_sample_tensors t;
  FLASHPLAN_RETURN_IF_ERROR(read("tensors", given, default_sample_tensors(), &t));
  FLASHPLAN_RETURN_IF_ERROR(check_reserved("tensors", t.reserved));
  SampleOptions& options = sampling->options;
  SampleOutputs& outputs = sampling->outputs;
  options.temperature = t.temperature;
  options.top_k = t.top_k;
  options.top_p = t.top_p;
  options.min_p = t.min_p;
  options.seed = t.seed;
  options.offset = t.offset;
  options.from_probs = t.from_probs != 0;
  options.joint = t.joint != 0;
  outputs.logprobs_of = t.raw_logprobs != 0 ? LogprobsOf::kRaw : LogprobsOf::kFiltered;
  return read_tensors({{"logits", t.logits, &sampling->logits},
                       {"out", t.out, &outputs.ids},
                       {"logprobs", t.logprobs, &outputs.logprobs},
                       {"status", t.status, &outputs.status},
                       {"temperature", t.temperatures, &options.temperatures},
                       {"top_k", t.top_ks, &options.top_ks},
                       {"top_p", t.top_ps, &options.top_ps},
                       {"min_p", t.min_ps, &options.min_ps},
                       {"seed", t.seeds, &options.seeds},
                       {"offset", t.offsets, &options.offsets},
                       {"logit_bias", t.logit_bias, &options.logit_bias},
                       {"rows", t.rows, &options.rows},
                       {"top_ids", t.top_ids, &outputs.top_ids},
                       {"top_logprobs", t.top_logprobs, &outputs.top_logprobs}});
}

Status draw(const flashplan_sample_tensors* given, Stream stream) noexcept {
  Sampling s;
  FLASHPLAN_RETURN_IF_ERROR(read_sampling(given, &s));
  return sample(s.logits, s.options, s.outputs, stream);
}

Status filter(const flashplan_sample_tensors* given, Stream stream) noexcept {
  Sampling s;
  FLASHPLAN_RETURN_IF_ERROR(read_sampling(given, &s));
  const struct {
    const char* name;
    const TensorView& view;
  } others[] = {{"logprobs", s.outputs.logprobs},
                {"top_ids", s.outputs.top_ids},
                {"top_logprobs", s.outputs.top_logprobs}};
  for (const auto& [name, view] : others) {
    if (view.empty()) continue;
    return error(StatusCode::kInvalidArgument, "%s: expected NULL, got a tensor", name);
  }
  return filtered_probs(s.logits, s.options, s.outputs.ids, s.outputs.status, stream);
}

Status mask(const flashplan_tensor* logits, int32_t top_k, const flashplan_tensor* top_ks,
            const flashplan_tensor* out, Stream stream) noexcept {
  TensorView logits_view, top_ks_view, out_view;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"logits", logits, &logits_view},
                                          {"top_k", top_ks, &top_ks_view},
                                          {"out", out, &out_view}}));
  return top_k_mask(logits_view, top_k, top_ks_view, out_view, stream);
}

Status verify(const flashplan_verify_tensors* given, Stream stream) noexcept {
  flashplan_verify_tensors t;
  FLASHPLAN_RETURN_IF_ERROR(read("tensors", given, flashplan_verify_tensors{}, &t));
  Drafts drafts;
  VerifyOptions options;
  VerifyOutputs outputs;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"draft_tokens", t.draft_tokens, &drafts.tokens},
                                          {"draft_probs", t.draft_probs, &drafts.draft_probs},
                                          {"target_probs", t.target_probs, &drafts.target_probs},
                                          {"draft_parents", t.draft_parents, &drafts.parents},
                                          {"seed", t.seeds, &options.seeds},
                                          {"offset", t.offsets, &options.offsets},
                                          {"out", t.out, &outputs.tokens},
                                          {"num_accepted", t.num_accepted, &outputs.num_accepted},
                                          {"nodes", t.nodes, &outputs.nodes},
                                          {"status", t.status, &outputs.status}}));
  options.seed = t.seed;
  options.offset = t.offset;
  return speculative_verify(drafts, options, outputs, stream);
}

}  // namespace
}  // namespace flashplan::c_abi

using namespace flashplan;

flashplan_status flashplan_rmsnorm(const flashplan_tensor* x, const flashplan_tensor* weight,
                                   const flashplan_tensor* out, float eps, int32_t gemma,
                                   flashplan_stream stream, char* message) noexcept {
  return c_abi::report(
      c_abi::normalise(x, weight, out, c_abi::rms_norm_options(eps, gemma), stream), message);
}

flashplan_status flashplan_add_rmsnorm(const flashplan_tensor* x, const flashplan_tensor* residual,
                                       const flashplan_tensor* weight, float eps, int32_t gemma,
                                       flashplan_stream stream, char* message) noexcept {
  return c_abi::report(
      c_abi::add_and_normalise(x, residual, weight, c_abi::rms_norm_options(eps, gemma), stream),
      message);
}

flashplan_status flashplan_layernorm(const flashplan_tensor* x, const flashplan_tensor* weight,
                                     const flashplan_tensor* bias, const flashplan_tensor* out,
                                     float eps, flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::normalise_centered(x, weight, bias, out, eps, stream), message);
}

flashplan_status flashplan_gated_activation(int32_t activation, const flashplan_tensor* x,
                                            const flashplan_tensor* out, float scale,
                                            flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::activate(activation, x, out, scale, stream), message);
}

flashplan_status flashplan_gather_rows(const flashplan_tensor* x, const flashplan_tensor* indices,
                                       const flashplan_tensor* out, flashplan_stream stream,
                                       char* message) noexcept {
  return c_abi::report(c_abi::gather(x, indices, out, stream), message);
}

void flashplan_rope_init(flashplan_rope* rope, size_t struct_size) noexcept {
  c_abi::write(c_abi::default_rope(), rope, struct_size);
}

flashplan_status flashplan_apply_rope(const flashplan_tensor* q, const flashplan_tensor* k,
                                      const flashplan_tensor* positions, const flashplan_rope* rope,
                                      const flashplan_tensor* out_q, const flashplan_tensor* out_k,
                                      flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::rotate(q, k, positions, rope, out_q, out_k, stream), message);
}

flashplan_status flashplan_apply_rope_table(const flashplan_tensor* q, const flashplan_tensor* k,
                                            const flashplan_tensor* positions,
                                            const flashplan_tensor* cos_sin_cache,
                                            int32_t interleaved, const flashplan_tensor* out_q,
                                            const flashplan_tensor* out_k, flashplan_stream stream,
                                            char* message) noexcept {
  return c_abi::report(
      c_abi::rotate_by_table(q, k, positions, cos_sin_cache, interleaved, out_q, out_k, stream),
      message);
}

flashplan_status flashplan_rope_append_paged_kv(const flashplan_tensor* q,
                                                const flashplan_append_tensors* tensors,
                                                const flashplan_rope* rope,
                                                const flashplan_tensor* out_q,
                                                flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::rotate_and_append(q, tensors, rope, out_q, stream), message);
}

flashplan_status flashplan_softmax(const flashplan_tensor* logits, float temperature,
                                   const flashplan_tensor* temperatures,
                                   const flashplan_tensor* out, flashplan_stream stream,
                                   char* message) noexcept {
  return c_abi::report(c_abi::take_softmax(logits, temperature, temperatures, out, stream),
                       message);
}

void flashplan_mla_append_tensors_init(flashplan_mla_append_tensors* tensors,
                                       size_t struct_size) noexcept {
  c_abi::write(c_abi::default_mla_append_tensors(), tensors, struct_size);
}

flashplan_status flashplan_append_mla(const flashplan_mla_append_tensors* tensors,
                                      const flashplan_rope* rope, flashplan_stream stream,
                                      char* message) noexcept {
  return c_abi::report(c_abi::append_keys(tensors, rope, stream), message);
}

void flashplan_mla_gather_tensors_init(flashplan_mla_gather_tensors* tensors,
                                       size_t struct_size) noexcept {
  c_abi::write(c_abi::default_mla_gather_tensors(), tensors, struct_size);
}

flashplan_status flashplan_gather_mla(const flashplan_mla_gather_tensors* tensors,
                                      flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::gather_keys(tensors, stream), message);
}

void flashplan_penalty_tensors_init(flashplan_penalty_tensors* tensors,
                                    size_t struct_size) noexcept {
  c_abi::write(c_abi::default_penalty_tensors(), tensors, struct_size);
}

flashplan_status flashplan_apply_penalties(const flashplan_penalty_tensors* tensors,
                                           flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::penalise(tensors, stream), message);
}

void flashplan_sample_tensors_init(flashplan_sample_tensors* tensors, size_t struct_size) noexcept {
  c_abi::write(c_abi::default_sample_tensors(), tensors, struct_size);
}

flashplan_status flashplan_sample(const flashplan_sample_tensors* tensors, flashplan_stream stream,
                                  char* message) noexcept {
  return c_abi::report(c_abi::draw(tensors, stream), message);
}

flashplan_status flashplan_filtered_probs(const flashplan_sample_tensors* tensors,
                                          flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::filter(tensors, stream), message);
}

flashplan_status flashplan_top_k_mask(const flashplan_tensor* logits, int32_t top_k,
                                      const flashplan_tensor* top_ks, const flashplan_tensor* out,
                                      flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::mask(logits, top_k, top_ks, out, stream), message);
}

void flashplan_verify_tensors_init(flashplan_verify_tensors* tensors, size_t struct_size) noexcept {
  c_abi::write({}, tensors, struct_size);
}

flashplan_status flashplan_speculative_verify(const flashplan_verify_tensors* tensors,
                                              flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::verify(tensors, stream), message);
}
