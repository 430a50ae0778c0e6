/* SPDX-License-Identifier: Apache-2.0 */
/* What a serving step in C does beside attention: a norm, a gated activation, new keys that are
 * rotated on their way to slots of the cache, and from logits to tokens. Each result is compared
 * with a plain loop. */
#include <flashplan/flashplan_c_ops.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { kDim = 4, kVocab = 8, kPageSize = 2, kNumPages = 2 };

static char message[FLASHPLAN_MESSAGE_SIZE];

static int check(flashplan_status status, const char* what) {
  if (status == FLASHPLAN_OK) return 1;
  printf("%s failed, %s: %s\n", what, flashplan_status_name(status), message);
  return 0;
}

static int expect(int condition, const char* what) {
  if (!condition) printf("%s: wrong result\n", what);
  return condition;
}

static int is_close(const float* actual, const double* expected, int size, const char* what) {
  int i;
  for (i = 0; i < size; ++i) {
    if (fabs((double)actual[i] - expected[i]) <= 1e-5) continue;
    printf("%s[%d]: expected %g, got %g\n", what, i, expected[i], (double)actual[i]);
    return 0;
  }
  return 1;
}

static flashplan_tensor tensor(void* data, int32_t dtype, int32_t rank, int64_t a, int64_t b,
                               int64_t c, int64_t d) {
  const int64_t shape[] = {a, b, c, d};
  flashplan_tensor result;
  flashplan_tensor_init(&result, sizeof result, data, dtype, rank, shape);
  return result;
}

/* rmsnorm, add_rmsnorm, layernorm and an activation of one row. */
static int norms(void) {
  float x_data[kDim] = {1.0F, -2.0F, 3.0F, 0.5F}, residual_data[kDim] = {0};
  float weight_data[kDim] = {1.0F, 2.0F, 0.5F, -1.0F}, out_data[kDim];
  const flashplan_tensor x = tensor(x_data, FLASHPLAN_FLOAT32, 2, 1, kDim, 0, 0);
  const flashplan_tensor residual = tensor(residual_data, FLASHPLAN_FLOAT32, 2, 1, kDim, 0, 0);
  const flashplan_tensor weight = tensor(weight_data, FLASHPLAN_FLOAT32, 1, kDim, 0, 0, 0);
  const flashplan_tensor out = tensor(out_data, FLASHPLAN_FLOAT32, 2, 1, kDim, 0, 0);
  const flashplan_tensor half = tensor(out_data, FLASHPLAN_FLOAT32, 2, 1, kDim / 2, 0, 0);
  double squares = 0.0, mean = 0.0, variance = 0.0, rms[kDim], layer[kDim], gated[kDim / 2];
  int i;
  for (i = 0; i < kDim; ++i) {
    squares += (double)x_data[i] * (double)x_data[i] / kDim;
    mean += (double)x_data[i] / kDim;
  }
  for (i = 0; i < kDim; ++i) variance += pow((double)x_data[i] - mean, 2.0) / kDim;
  for (i = 0; i < kDim; ++i) {
    rms[i] = (double)x_data[i] / sqrt(squares + 1e-6) * (double)weight_data[i];
    layer[i] = ((double)x_data[i] - mean) / sqrt(variance + 1e-5) * (double)weight_data[i];
  }
  for (i = 0; i < kDim / 2; ++i) {
    const double gate = (double)x_data[i];
    gated[i] = gate / (1.0 + exp(-gate)) * (double)x_data[kDim / 2 + i] / 2.0;
  }
  if (!check(flashplan_rmsnorm(&x, &weight, &out, 1e-6F, 0, NULL, message), "rmsnorm")) return 0;
  if (!is_close(out_data, rms, kDim, "rmsnorm")) return 0;
  if (!check(flashplan_layernorm(&x, &weight, NULL, &out, 1e-5F, NULL, message), "layernorm")) {
    return 0;
  }
  if (!is_close(out_data, layer, kDim, "layernorm")) return 0;
  if (!check(flashplan_gated_activation(FLASHPLAN_SILU, &x, &half, 2.0F, NULL, message), "silu")) {
    return 0;
  }
  if (!is_close(out_data, gated, kDim / 2, "silu")) return 0;
  if (!check(flashplan_add_rmsnorm(&x, &residual, &weight, 1e-6F, 0, NULL, message), "add")) {
    return 0;
  }
  return is_close(x_data, rms, kDim, "add_rmsnorm");
}

/* Two keys of one head: apply_rope, then to slots; and the same in one call, to a page. */
static int rotations(void) {
  float q_data[2 * kDim], k_data[2 * kDim], turned_q[2 * kDim], turned_k[2 * kDim];
  float slots_cache[kNumPages * kPageSize * kDim], pages_cache[kNumPages * kPageSize * kDim];
  float values_cache[kNumPages * kPageSize * kDim];
  int32_t positions_data[] = {0, 1}, indptr_data[] = {0, 2}, kv_lens_data[] = {2},
          page_data[] = {1};
  int64_t slots_data[] = {2, 3}; /* page 1 */
  double expected[2 * kDim];
  const flashplan_tensor q = tensor(q_data, FLASHPLAN_FLOAT32, 3, 2, 1, kDim, 0);
  const flashplan_tensor k = tensor(k_data, FLASHPLAN_FLOAT32, 3, 2, 1, kDim, 0);
  const flashplan_tensor out_q = tensor(turned_q, FLASHPLAN_FLOAT32, 3, 2, 1, kDim, 0);
  const flashplan_tensor out_k = tensor(turned_k, FLASHPLAN_FLOAT32, 3, 2, 1, kDim, 0);
  const flashplan_tensor by_slot =
      tensor(slots_cache, FLASHPLAN_FLOAT32, 4, kNumPages, kPageSize, 1, kDim);
  const flashplan_tensor by_page =
      tensor(pages_cache, FLASHPLAN_FLOAT32, 4, kNumPages, kPageSize, 1, kDim);
  const flashplan_tensor values =
      tensor(values_cache, FLASHPLAN_FLOAT32, 4, kNumPages, kPageSize, 1, kDim);
  const flashplan_tensor positions = tensor(positions_data, FLASHPLAN_INT32, 1, 2, 0, 0, 0);
  const flashplan_tensor slots = tensor(slots_data, FLASHPLAN_INT64, 1, 2, 0, 0, 0);
  const flashplan_tensor indptr = tensor(indptr_data, FLASHPLAN_INT32, 1, 2, 0, 0, 0);
  const flashplan_tensor kv_lens = tensor(kv_lens_data, FLASHPLAN_INT32, 1, 1, 0, 0, 0);
  const flashplan_tensor table = tensor(page_data, FLASHPLAN_INT32, 2, 1, 1, 0, 0);
  flashplan_append_tensors to_slots, to_pages;
  flashplan_rope rope;
  int token, i;
  for (i = 0; i < 2 * kDim; ++i) q_data[i] = (float)sin(i + 1.0);
  for (i = 0; i < 2 * kDim; ++i) k_data[i] = (float)cos(i + 1.0);
  flashplan_rope_init(&rope, sizeof rope);
  rope.theta = 100.0;
  for (token = 0; token < 2; ++token) {
    for (i = 0; i < kDim / 2; ++i) {
      const double angle = token * pow(100.0, -2.0 * i / kDim);
      const double a = (double)q_data[token * kDim + i];
      const double b = (double)q_data[token * kDim + i + kDim / 2];
      expected[token * kDim + i] = a * cos(angle) - b * sin(angle);
      expected[token * kDim + i + kDim / 2] = b * cos(angle) + a * sin(angle);
    }
  }
  if (!check(flashplan_apply_rope(&q, &k, &positions, &rope, &out_q, &out_k, NULL, message),
             "apply_rope")) {
    return 0;
  }
  if (!is_close(turned_q, expected, 2 * kDim, "apply_rope")) return 0;

  flashplan_append_tensors_init(&to_slots, sizeof to_slots);
  to_slots.k = &out_k;
  to_slots.v = &q;
  to_slots.k_cache = &by_slot;
  to_slots.v_cache = &values;
  to_slots.slot_mapping = &slots;
  if (!check(flashplan_append_paged_kv(&to_slots, NULL, message), "append")) return 0;
  flashplan_append_tensors_init(&to_pages, sizeof to_pages);
  to_pages.k = &k;
  to_pages.v = &q;
  to_pages.k_cache = &by_page;
  to_pages.v_cache = &values;
  to_pages.indptr = &indptr;
  to_pages.kv_lens = &kv_lens;
  to_pages.block_table = &table;
  if (!check(flashplan_rope_append_paged_kv(&q, &to_pages, &rope, &out_q, NULL, message),
             "rope_append")) {
    return 0;
  }
  return expect(memcmp(slots_cache + 2 * kDim, turned_k, sizeof turned_k) == 0, "slots") &&
         expect(memcmp(pages_cache + 2 * kDim, turned_k, sizeof turned_k) == 0, "pages") &&
         is_close(turned_q, expected, 2 * kDim, "rope_append");
}

/* Penalties, softmax, the most likely token, a drawn one, and a draft. */
static int tokens(void) {
  float logits_data[kVocab], probs_data[2 * kVocab], logprob = 1.0F;
  int32_t history_data[] = {3}, lens_data[] = {1}, id = -1, status_data = -1;
  int32_t draft_data[] = {2}, verified[2] = {0, 0}, num_accepted = -1;
  double sum = 0.0, expected[kVocab];
  const flashplan_tensor logits = tensor(logits_data, FLASHPLAN_FLOAT32, 2, 1, kVocab, 0, 0);
  const flashplan_tensor probs = tensor(probs_data, FLASHPLAN_FLOAT32, 2, 1, kVocab, 0, 0);
  const flashplan_tensor history = tensor(history_data, FLASHPLAN_INT32, 2, 1, 1, 0, 0);
  const flashplan_tensor lens = tensor(lens_data, FLASHPLAN_INT32, 1, 1, 0, 0, 0);
  const flashplan_tensor ids = tensor(&id, FLASHPLAN_INT32, 1, 1, 0, 0, 0);
  const flashplan_tensor logprobs = tensor(&logprob, FLASHPLAN_FLOAT32, 1, 1, 0, 0, 0);
  const flashplan_tensor status = tensor(&status_data, FLASHPLAN_INT32, 1, 1, 0, 0, 0);
  const flashplan_tensor drafts = tensor(draft_data, FLASHPLAN_INT32, 2, 1, 1, 0, 0);
  const flashplan_tensor of_draft = tensor(probs_data, FLASHPLAN_FLOAT32, 3, 1, 1, kVocab, 0);
  const flashplan_tensor of_target = tensor(probs_data, FLASHPLAN_FLOAT32, 3, 1, 2, kVocab, 0);
  const flashplan_tensor out = tensor(verified, FLASHPLAN_INT32, 2, 1, 2, 0, 0);
  const flashplan_tensor accepted = tensor(&num_accepted, FLASHPLAN_INT32, 1, 1, 0, 0, 0);
  flashplan_penalty_tensors penalty;
  flashplan_sample_tensors sample;
  flashplan_verify_tensors verify;
  int i;
  for (i = 0; i < kVocab; ++i) logits_data[i] = (float)(i == 3 ? 2.0 : 0.25 * i);
  flashplan_penalty_tensors_init(&penalty, sizeof penalty);
  penalty.logits = &logits;
  penalty.history = &history;
  penalty.history_lens = &lens;
  penalty.presence = 2.0F;
  if (!check(flashplan_apply_penalties(&penalty, NULL, message), "penalties")) return 0;
  if (!expect(fabs((double)logits_data[3]) < 1e-6, "penalties")) return 0;

  flashplan_sample_tensors_init(&sample, sizeof sample);
  sample.logits = &logits;
  sample.out = &ids;
  sample.logprobs = &logprobs;
  sample.status = &status;
  sample.temperature = 0.0F;
  if (!check(flashplan_sample(&sample, NULL, message), "argmax")) return 0;
  if (!expect(id == kVocab - 1 && status_data == FLASHPLAN_SAMPLE_OK, "argmax")) return 0;
  sample.temperature = 1.0F;
  sample.top_k = 1;
  if (!check(flashplan_sample(&sample, NULL, message), "top-k")) return 0;
  if (!expect(id == kVocab - 1 && fabs((double)logprob) < 1e-6, "top-k")) return 0;
  sample.top_p = 2.0F;
  if (!expect(flashplan_sample(&sample, NULL, message) == FLASHPLAN_INVALID_ARGUMENT &&
                  strncmp(message, "top_p: expected ", 16) == 0,
              "a wrong top_p")) {
    return 0;
  }

  if (!check(flashplan_softmax(&logits, 0.5F, NULL, &probs, NULL, message), "softmax")) return 0;
  for (i = 0; i < kVocab; ++i) sum += exp((double)logits_data[i] / 0.5);
  for (i = 0; i < kVocab; ++i) expected[i] = exp((double)logits_data[i] / 0.5) / sum;
  if (!is_close(probs_data, expected, kVocab, "softmax")) return 0;

  /* A draft from the target's own distribution is always accepted. */
  for (i = 0; i < kVocab; ++i) probs_data[kVocab + i] = i == 5 ? 1.0F : 0.0F;
  flashplan_verify_tensors_init(&verify, sizeof verify);
  verify.draft_tokens = &drafts;
  verify.draft_probs = &of_draft;
  verify.target_probs = &of_target;
  verify.out = &out;
  verify.num_accepted = &accepted;
  if (!check(flashplan_speculative_verify(&verify, NULL, message), "verify")) return 0;
  return expect(num_accepted == 1 && verified[0] == 2 && verified[1] == 5, "verify");
}

int main(void) { return norms() && rotations() && tokens() ? 0 : 1; }
