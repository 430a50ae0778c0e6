/* SPDX-License-Identifier: Apache-2.0 */
/* A serving step in C: new keys go to pages, attention runs over them, and the same attention over
 * two halves of the keys is merged. Compared with a plain loop. */
#include <flashplan/flashplan_c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kDim = 4, kPageSize = 2, kNumKeys = 8, kNumPages = 4 };

static int check(flashplan_status status, const char* what, const char* message) {
  if (status == FLASHPLAN_OK) return 1;
  printf("%s failed, %s: %s\n", what, flashplan_status_name(status), message);
  return 0;
}

static flashplan_tensor tensor(void* data, int32_t dtype, int32_t rank, int64_t a, int64_t b,
                               int64_t c, int64_t d) {
  const int64_t shape[] = {a, b, c, d};
  flashplan_tensor result;
  flashplan_tensor_init(&result, sizeof result, data, dtype, rank, shape);
  return result;
}

/* Attention of one query over `num_keys` keys, in double. */
static void attend(const float* q, const float* k, const float* v, int num_keys, double* o) {
  double sum = 0.0;
  int j, d;
  for (d = 0; d < kDim; ++d) o[d] = 0.0;
  for (j = 0; j < num_keys; ++j) {
    double logit = 0.0, weight;
    for (d = 0; d < kDim; ++d) logit += (double)q[d] * (double)k[j * kDim + d];
    weight = exp(logit / sqrt((double)kDim));
    sum += weight;
    for (d = 0; d < kDim; ++d) o[d] += weight * (double)v[j * kDim + d];
  }
  for (d = 0; d < kDim; ++d) o[d] /= sum;
}

static int is_close(const float* o, const double* expected, const char* what) {
  int d;
  for (d = 0; d < kDim; ++d) {
    if (fabs((double)o[d] - expected[d]) <= 1e-5) continue;
    printf("%s[%d]: expected %g, got %g\n", what, d, expected[d], (double)o[d]);
    return 0;
  }
  return 1;
}

/* A plan of one query and one head, float32, and its workspace. */
struct engine {
  flashplan_plan* plan;
  unsigned char* memory;
  void* workspace;
  size_t workspace_bytes;
};

static int make_engine(struct engine* engine, int32_t page_size) {
  char message[FLASHPLAN_MESSAGE_SIZE];
  flashplan_options options;
  size_t offset;
  flashplan_options_init(&options, sizeof options);
  options.num_qo_heads = options.num_kv_heads = 1;
  options.head_dim_qk = options.head_dim_vo = kDim;
  options.q_dtype = options.kv_dtype = options.o_dtype = FLASHPLAN_FLOAT32;
  options.page_size = page_size;
  options.max_batch_size = options.max_qo_tokens = 2;
  if (!check(flashplan_plan_create(&options, &engine->plan, message), "create", message)) return 0;
  engine->workspace_bytes = flashplan_plan_workspace_bytes(engine->plan);
  engine->memory = malloc(engine->workspace_bytes + FLASHPLAN_WORKSPACE_ALIGNMENT);
  if (engine->memory == NULL) return 0;
  offset = (size_t)(uintptr_t)engine->memory % FLASHPLAN_WORKSPACE_ALIGNMENT;
  engine->workspace = engine->memory + (FLASHPLAN_WORKSPACE_ALIGNMENT - offset);
  return 1;
}

static void destroy_engine(struct engine* engine) {
  flashplan_plan_destroy(engine->plan);
  free(engine->memory);
}

static int plan_one(struct engine* engine, int32_t kv_len) {
  static const int32_t qo_indptr[] = {0, 1};
  char message[FLASHPLAN_MESSAGE_SIZE];
  flashplan_batch batch;
  flashplan_batch_init(&batch, sizeof batch);
  batch.qo_indptr = qo_indptr;
  batch.kv_lens = &kv_len;
  batch.batch_size = 1;
  return check(flashplan_plan_plan(engine->plan, &batch, NULL, message), "plan", message);
}

static int run(struct engine* engine, const flashplan_tensor* q, const flashplan_tensor* k,
               const flashplan_tensor* v, const flashplan_tensor* block_table,
               const flashplan_tensor* out, const flashplan_tensor* lse) {
  char message[FLASHPLAN_MESSAGE_SIZE];
  flashplan_attention_tensors tensors;
  flashplan_attention_tensors_init(&tensors, sizeof tensors);
  tensors.q = q;
  tensors.k = k;
  tensors.v = v;
  tensors.block_table = block_table;
  tensors.out = out;
  tensors.lse = lse;
  tensors.workspace = engine->workspace;
  tensors.workspace_bytes = engine->workspace_bytes;
  return check(flashplan_plan_run(engine->plan, &tensors, NULL, message), "run", message);
}

static int append(const flashplan_tensor* k, const flashplan_tensor* v,
                  const flashplan_tensor* k_cache, const flashplan_tensor* v_cache,
                  const flashplan_tensor* block_table) {
  int32_t indptr_data[] = {0, kNumKeys};
  int32_t kv_lens_data[] = {kNumKeys};
  const flashplan_tensor indptr = tensor(indptr_data, FLASHPLAN_INT32, 1, 2, 0, 0, 0);
  const flashplan_tensor kv_lens = tensor(kv_lens_data, FLASHPLAN_INT32, 1, 1, 0, 0, 0);
  char message[FLASHPLAN_MESSAGE_SIZE];
  flashplan_append_tensors tensors;
  flashplan_append_tensors_init(&tensors, sizeof tensors);
  tensors.k = k;
  tensors.v = v;
  tensors.k_cache = k_cache;
  tensors.v_cache = v_cache;
  tensors.indptr = &indptr;
  tensors.kv_lens = &kv_lens;
  tensors.block_table = block_table;
  return check(flashplan_append_paged_kv(&tensors, NULL, message), "append", message);
}

/* Attention over the pages, then over the two halves of the ragged keys, merged. */
static int run_both(struct engine* paged, struct engine* ragged) {
  float q_data[kDim], k_data[kNumKeys * kDim], v_data[kNumKeys * kDim];
  float k_pages[kNumPages * kPageSize * kDim], v_pages[kNumPages * kPageSize * kDim];
  float o_data[3][kDim], lse_data[3];
  int32_t table_data[] = {2, 0, 3, 1};
  double expected[kDim];
  flashplan_tensor o[3], lse[3];
  const flashplan_tensor* states_o[] = {&o[0], &o[1]};
  const flashplan_tensor* states_lse[] = {&lse[0], &lse[1]};
  const flashplan_tensor q = tensor(q_data, FLASHPLAN_FLOAT32, 3, 1, 1, kDim, 0);
  const flashplan_tensor k = tensor(k_data, FLASHPLAN_FLOAT32, 3, kNumKeys, 1, kDim, 0);
  const flashplan_tensor v = tensor(v_data, FLASHPLAN_FLOAT32, 3, kNumKeys, 1, kDim, 0);
  const flashplan_tensor k_cache =
      tensor(k_pages, FLASHPLAN_FLOAT32, 4, kNumPages, kPageSize, 1, kDim);
  const flashplan_tensor v_cache =
      tensor(v_pages, FLASHPLAN_FLOAT32, 4, kNumPages, kPageSize, 1, kDim);
  const flashplan_tensor table = tensor(table_data, FLASHPLAN_INT32, 2, 1, kNumPages, 0, 0);
  char message[FLASHPLAN_MESSAGE_SIZE];
  int i;
  for (i = 0; i < kDim; ++i) q_data[i] = (float)sin(i + 1.0);
  for (i = 0; i < kNumKeys * kDim; ++i) k_data[i] = (float)sin(1.7 * i);
  for (i = 0; i < kNumKeys * kDim; ++i) v_data[i] = (float)cos(2.3 * i);
  for (i = 0; i < 3; ++i) {
    o[i] = tensor(o_data[i], FLASHPLAN_FLOAT32, 3, 1, 1, kDim, 0);
    lse[i] = tensor(&lse_data[i], FLASHPLAN_FLOAT32, 2, 1, 1, 0, 0);
  }
  attend(q_data, k_data, v_data, kNumKeys, expected);

  if (!append(&k, &v, &k_cache, &v_cache, &table)) return 0;
  if (!plan_one(paged, kNumKeys) || !run(paged, &q, &k_cache, &v_cache, &table, &o[0], NULL)) {
    return 0;
  }
  if (!is_close(o_data[0], expected, "paged")) return 0;

  if (!plan_one(ragged, kNumKeys / 2)) return 0;
  for (i = 0; i < 2; ++i) {
    flashplan_tensor half_k = k, half_v = v;
    half_k.data = k_data + i * kNumKeys / 2 * kDim;
    half_v.data = v_data + i * kNumKeys / 2 * kDim;
    half_k.shape[0] = half_v.shape[0] = kNumKeys / 2;
    if (!run(ragged, &q, &half_k, &half_v, NULL, &o[i], &lse[i])) return 0;
  }
  if (!check(flashplan_merge_states(states_o, states_lse, 2, &o[2], &lse[2], NULL, message),
             "merge", message)) {
    return 0;
  }
  return is_close(o_data[2], expected, "merged");
}

/* A bad length comes back as a status with a message. */
static int refuses(struct engine* engine) {
  const int32_t qo_indptr[] = {0, 1};
  const int32_t kv_lens[] = {-1};
  char message[FLASHPLAN_MESSAGE_SIZE];
  flashplan_batch batch;
  flashplan_batch_init(&batch, sizeof batch);
  batch.qo_indptr = qo_indptr;
  batch.kv_lens = kv_lens;
  batch.batch_size = 1;
  if (flashplan_plan_plan(engine->plan, &batch, NULL, message) != FLASHPLAN_INVALID_ARGUMENT ||
      strcmp(message, "kv_lens[0]: expected >= 0, got -1") != 0) {
    printf("a negative length: got '%s'\n", message);
    return 0;
  }
  return 1;
}

int main(void) {
  struct engine paged = {NULL, NULL, NULL, 0}, ragged = {NULL, NULL, NULL, 0};
  const int ok = make_engine(&paged, kPageSize) && make_engine(&ragged, 0) &&
                 run_both(&paged, &ragged) && refuses(&paged);
  if (ok) printf("flashplan %s: %s\n", flashplan_version(), flashplan_plan_kernel_name(paged.plan));
  destroy_engine(&paged);
  destroy_engine(&ragged);
  return ok ? 0 : 1;
}
