// SPDX-License-Identifier: Apache-2.0
// The attention of this library for C, and for every language that can call C. C99; needs no CUDA
// header. What the calls compute, and the shapes that tensors have, is written in plan.h,
// kv_cache.h, merge.h and prefixes.h, where functions and fields have the same names.
//
//   char message[FLASHPLAN_MESSAGE_SIZE];
//   flashplan_options options;
//   flashplan_options_init(&options, sizeof options);
//   options.num_qo_heads = 32;
//   ...
//   flashplan_plan* plan = NULL;
//   if (flashplan_plan_create(&options, &plan, message) != FLASHPLAN_OK) puts(message);
//
// - Status: a call that can fail returns a status. Nothing throws, prints, aborts or exits, and a
//   call that failed has written nothing to the caller's tensors.
// - Messages: `message` is NULL, or the caller's memory of FLASHPLAN_MESSAGE_SIZE bytes. Each call
//   writes there what went wrong, as `<argument>: expected <what>, got <what>`, or an empty text.
//   Nothing is kept between calls, so any thread may call at any time.
// - Structs: each begins with its size, which its init function writes, so that later versions of
//   this library can add fields. A program that was compiled with an older header gives smaller
//   structs; the fields that it does not know have their defaults. A struct that is larger than the
//   library expects is accepted if all bytes that it does not know are 0.
// - Memory: the library keeps no pointer that it is given, except a plan's stream on a GPU (see
//   flashplan_plan_plan). The workspace, which is nearly all of the memory, is the caller's.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "flashplan/export.h"

#ifdef __cplusplus
#define FLASHPLAN_NOEXCEPT noexcept
extern "C" {
#else
#define FLASHPLAN_NOEXCEPT
#endif

// The driver's stream type: a cudaStream_t or a CUstream. NULL is the legacy default stream. On the
// CPU streams are ignored.
typedef struct CUstream_st* flashplan_stream;

enum {
  FLASHPLAN_MESSAGE_SIZE = 256,        // bytes, the final NUL included
  FLASHPLAN_MAX_RANK = 4,              // dimensions of a tensor
  FLASHPLAN_WORKSPACE_ALIGNMENT = 256  // bytes
};

typedef int32_t flashplan_status;
enum {
  FLASHPLAN_OK = 0,
  FLASHPLAN_INVALID_ARGUMENT = 1,  // a wrong value or shape
  FLASHPLAN_INVALID_TYPE = 2,      // a wrong dtype or device, or a tensor that may not be written
  FLASHPLAN_UNSUPPORTED = 3,       // valid, but this build or this device has no kernel for it
  FLASHPLAN_NOT_READY = 4,         // run before plan, plan on a stream that is being captured, or
                                   // one plan or workspace used by two threads
  FLASHPLAN_OUT_OF_MEMORY = 5,     // an allocation failed, on the host or on a GPU
  FLASHPLAN_CUDA_ERROR = 6         // a CUDA call failed; the context may be lost
};

// flashplan_tensor.dtype
enum {
  FLASHPLAN_FLOAT32 = 0,
  FLASHPLAN_FLOAT16 = 1,
  FLASHPLAN_BFLOAT16 = 2,
  FLASHPLAN_FLOAT8_E4M3FN = 3,
  FLASHPLAN_FLOAT8_E5M2 = 4,
  FLASHPLAN_INT32 = 5,
  FLASHPLAN_INT64 = 6,
  FLASHPLAN_UINT32 = 7,
  FLASHPLAN_FP8_DS_MLA = 8
};

// flashplan_tensor.device_type
enum { FLASHPLAN_CPU = 0, FLASHPLAN_CUDA = 1 };

// flashplan_options.kv_layout: the order of dimensions inside a page of the cache.
enum { FLASHPLAN_NHD = 0, FLASHPLAN_HND = 1 };

// flashplan_options.kernels: which kernels a plan may choose from; see KernelGroup in plan.h.
enum { FLASHPLAN_ALL_KERNELS = 0, FLASHPLAN_GENERAL_KERNELS = 1, FLASHPLAN_HOPPER_KERNELS = 2 };

// The name of a status, such as "FLASHPLAN_INVALID_TYPE"; "unknown" for any other number.
FLASHPLAN_API const char* flashplan_status_name(flashplan_status status) FLASHPLAN_NOEXCEPT;

// The version of the library that is loaded, such as "0.1.0".
FLASHPLAN_API const char* flashplan_version(void) FLASHPLAN_NOEXCEPT;

// A strided view of the caller's memory. Calls take pointers to it; NULL is an argument that is not
// given. On a GPU the memory must exist until the stream has done the work.
typedef struct flashplan_tensor {
  size_t struct_size;
  void* data;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t rank;
  int64_t shape[FLASHPLAN_MAX_RANK];
  int64_t stride[FLASHPLAN_MAX_RANK];  // in elements; the last must be 1
  int32_t read_only;                   // not 0: refused where the call would write
  int32_t reserved;                    // 0
} flashplan_tensor;

// Makes a row-major tensor without gaps on the CPU. A rank beyond FLASHPLAN_MAX_RANK gives a tensor
// that every call refuses. shape: [rank]
FLASHPLAN_API void flashplan_tensor_init(flashplan_tensor* tensor, size_t struct_size, void* data,
                                         int32_t dtype, int32_t rank,
                                         const int64_t* shape) FLASHPLAN_NOEXCEPT;

// A tensor and a scalar that the bodies of a variant read by name: VariantTensor and VariantScalar
// of variant.h.
typedef struct flashplan_variant_tensor {
  const char* name;
  int32_t dtype;
  int32_t reserved;  // 0
} flashplan_variant_tensor;
typedef struct flashplan_variant_scalar {
  const char* name;
  float value;       // for runs that give no scalars
  int32_t reserved;  // 0
} flashplan_variant_scalar;

// VariantDescription of variant.h, which says what bodies are and which names are allowed.
typedef struct flashplan_variant_description {
  size_t struct_size;
  const char* name;
  const char* query;  // the bodies; NULL: this part of attention does not change
  const char* key;
  const char* value;
  const char* output;
  const char* logits;
  const char* mask;
  const flashplan_variant_tensor* tensors;  // [num_tensors]
  const flashplan_variant_scalar* scalars;  // [num_scalars]
  int32_t num_tensors;
  int32_t num_scalars;
  int32_t softmax;   // 0 or 1
  int32_t reserved;  // 0
} flashplan_variant_description;

// Sets softmax to 1 and everything else to NULL or 0.
FLASHPLAN_API void flashplan_variant_description_init(flashplan_variant_description* description,
                                                      size_t struct_size) FLASHPLAN_NOEXCEPT;

// Variant of variant.h: a user-defined attention.
typedef struct flashplan_variant flashplan_variant;

// Writes a new variant to `variant`, or NULL after an error. The caller destroys it. It holds
// copies of all texts and lists. Each call of flashplan_plan_create with it compiles it, or takes
// the compiled code from the cache.
FLASHPLAN_API flashplan_status
flashplan_variant_create(const flashplan_variant_description* description,
                         flashplan_variant** variant, char* message) FLASHPLAN_NOEXCEPT;

// Frees the variant; NULL is ignored. Plans that were created with it keep what they need.
FLASHPLAN_API void flashplan_variant_destroy(flashplan_variant* variant) FLASHPLAN_NOEXCEPT;

// Writes what the compiler said when the variant did not compile, as flashplan_plan_describe writes
// its text; "" for NULL.
FLASHPLAN_API size_t flashplan_variant_compile_log(const flashplan_variant* variant, char* text,
                                                   size_t size) FLASHPLAN_NOEXCEPT;

struct flashplan_rope;  // defined in flashplan_c_ops.h

// AttentionOptions of plan.h, which gives the defaults. Heads and head dims have none.
typedef struct flashplan_options {
  size_t struct_size;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int32_t page_size;  // 0: k and v are ragged tensors
  int32_t kv_layout;
  int32_t q_dtype;
  int32_t kv_dtype;
  int32_t o_dtype;
  int32_t causal;  // 0 or 1, as are custom_mask, batch_invariant and lse_base2
  int32_t window_left;
  int32_t custom_mask;
  float softmax_scale;  // 0: 1 / sqrt(head_dim_qk); needed with shared_kv
  float softcap;
  int32_t max_batch_size;
  int32_t max_qo_tokens;
  int32_t device_type;
  int32_t device_index;
  int32_t num_ctas;
  int32_t batch_invariant;
  size_t workspace_bytes;             // 0: as many as the bounds ask for
  const struct flashplan_rope* rope;  // or NULL: no rotation
  const flashplan_variant* variant;   // or NULL
  int32_t lse_base2;                  // lse is a logarithm to base 2, not the natural one
  int32_t kernels;                    // FLASHPLAN_*_KERNELS
  int32_t shared_kv;                  // 0 or 1
  int32_t topk;                       // 0: queries see the keys of their requests
} flashplan_options;

// Sets the defaults, and heads and head dims to 0.
FLASHPLAN_API void flashplan_options_init(flashplan_options* options,
                                          size_t struct_size) FLASHPLAN_NOEXCEPT;

// Whether there is a kernel for the options: FLASHPLAN_OK or FLASHPLAN_UNSUPPORTED, and then the
// message says what is missing. Other errors are those of flashplan_plan_create.
FLASHPLAN_API flashplan_status flashplan_is_supported(const flashplan_options* options,
                                                      char* message) FLASHPLAN_NOEXCEPT;

// Writes how many bytes of workspace the bounds ask for; options->workspace_bytes is ignored.
FLASHPLAN_API flashplan_status flashplan_workspace_bytes(const flashplan_options* options,
                                                         size_t* bytes,
                                                         char* message) FLASHPLAN_NOEXCEPT;

// A plan: options, the kernels for them, and the schedule of the last step. Use it from one thread
// at a time; different plans are independent.
typedef struct flashplan_plan flashplan_plan;

// Writes a new plan to `plan`, or NULL after an error. The caller destroys it.
FLASHPLAN_API flashplan_status flashplan_plan_create(const flashplan_options* options,
                                                     flashplan_plan** plan,
                                                     char* message) FLASHPLAN_NOEXCEPT;

// Frees the plan; NULL is ignored. On a GPU it waits until the plan's runs have ended.
FLASHPLAN_API void flashplan_plan_destroy(flashplan_plan* plan) FLASHPLAN_NOEXCEPT;

// Lengths of one step, in host memory: Batch of plan.h.
typedef struct flashplan_batch {
  size_t struct_size;
  const int32_t* qo_indptr;        // [batch_size + 1]
  const int32_t* kv_lens;          // [batch_size]
  const int32_t* kv_indptr;        // [batch_size + 1], or NULL
  const int32_t* shared_prefixes;  // [num_shared_prefixes, 3], or NULL
  const int32_t* mask_begin;       // [batch_size], or NULL
  int32_t batch_size;
  int32_t num_shared_prefixes;
  const int32_t* key_ranges;  // [qo_indptr[batch_size], 2], or NULL
} flashplan_batch;

// Sets all lists to NULL and all sizes to 0.
FLASHPLAN_API void flashplan_batch_init(flashplan_batch* batch,
                                        size_t struct_size) FLASHPLAN_NOEXCEPT;

// Plan::plan: schedules one step. No allocation. On a GPU the schedule is copied there on `stream`,
// which must exist until the next call on another one, or until the plan is destroyed.
FLASHPLAN_API flashplan_status flashplan_plan_plan(flashplan_plan* plan,
                                                   const flashplan_batch* batch,
                                                   flashplan_stream stream,
                                                   char* message) FLASHPLAN_NOEXCEPT;

// Arguments of one attention layer: AttentionTensors of plan.h.
typedef struct flashplan_attention_tensors {
  size_t struct_size;
  const flashplan_tensor* q;
  const flashplan_tensor* k;
  const flashplan_tensor* v;  // NULL with shared_kv
  const flashplan_tensor* block_table;
  const flashplan_tensor* page_indptr;
  const flashplan_tensor* page_indices;
  const flashplan_tensor* kv_lens;
  const flashplan_tensor* mask;
  const flashplan_tensor* out;  // written
  const flashplan_tensor* lse;  // written, or NULL
  float k_scale;
  float v_scale;
  // >= flashplan_plan_workspace_bytes, aligned to FLASHPLAN_WORKSPACE_ALIGNMENT, on the device.
  void* workspace;
  size_t workspace_bytes;
  const flashplan_tensor* sinks;                   // or NULL
  const flashplan_tensor* k_scales;                // or NULL
  const flashplan_tensor* v_scales;                // or NULL
  const flashplan_tensor* const* variant_tensors;  // [num_variant_tensors]
  const float* variant_scalars;                    // [num_variant_scalars], or NULL
  int32_t num_variant_tensors;
  int32_t num_variant_scalars;
  int32_t pdl;                           // != 0: programmatic dependent launch
  int32_t reserved;                      // 0
  const flashplan_tensor* q_tail;        // or NULL
  const flashplan_tensor* k_tail;        // or NULL
  const flashplan_tensor* topk_indices;  // or NULL
  const flashplan_tensor* topk_lens;     // or NULL
  const flashplan_tensor* q_scales;      // or NULL
  float q_scale;
  int32_t reserved2;  // 0
} flashplan_attention_tensors;

// Sets scales to 1 and everything else to NULL or 0.
FLASHPLAN_API void flashplan_attention_tensors_init(flashplan_attention_tensors* tensors,
                                                    size_t struct_size) FLASHPLAN_NOEXCEPT;

// Plan::run: the planned attention. On the CPU it returns when it is done; on a GPU it is one
// launch on `stream`, or on Hopper two for some batches, without allocation or synchronisation. It
// may be captured into a graph. The plan and the workspace must then live as long as the graph.
FLASHPLAN_API flashplan_status flashplan_plan_run(flashplan_plan* plan,
                                                  const flashplan_attention_tensors* tensors,
                                                  flashplan_stream stream,
                                                  char* message) FLASHPLAN_NOEXCEPT;

// Index tensors on the plan's device or in host memory: DeviceData of plan.h.
typedef struct flashplan_device_data {
  size_t struct_size;
  const flashplan_tensor* block_table;
  const flashplan_tensor* page_indptr;
  const flashplan_tensor* page_indices;
  const flashplan_tensor* kv_lens;
  const flashplan_tensor* slot_mapping;
  int64_t num_pages;
} flashplan_device_data;

// Sets everything to NULL or 0.
FLASHPLAN_API void flashplan_device_data_init(flashplan_device_data* data,
                                              size_t struct_size) FLASHPLAN_NOEXCEPT;

// Plan::check_device_data, for debugging: waits for `stream`, and checks the values of the tensors
// against the last flashplan_plan_plan, as calls on the CPU do.
FLASHPLAN_API flashplan_status flashplan_plan_check_device_data(const flashplan_plan* plan,
                                                                const flashplan_device_data* data,
                                                                flashplan_stream stream,
                                                                char* message) FLASHPLAN_NOEXCEPT;

// Bytes of workspace that flashplan_plan_run needs, the same for every batch; 0 for NULL.
FLASHPLAN_API size_t flashplan_plan_workspace_bytes(const flashplan_plan* plan) FLASHPLAN_NOEXCEPT;

// The kernel that flashplan_plan_run executes, such as "sm90_bf16_d128"; of two kernels, the one
// for requests of many query rows. The text belongs to the plan; "" for NULL.
FLASHPLAN_API const char* flashplan_plan_kernel_name(const flashplan_plan* plan) FLASHPLAN_NOEXCEPT;

// The next two functions write a text for people, as snprintf does: up to `size` bytes to `text`,
// the final NUL included, and they return how long the whole text is without it. `text` may be NULL
// if `size` is 0. The first describes the schedule, the second says what was built and what it runs
// on.
FLASHPLAN_API size_t flashplan_plan_describe(const flashplan_plan* plan, char* text,
                                             size_t size) FLASHPLAN_NOEXCEPT;
FLASHPLAN_API size_t flashplan_show_config(char* text, size_t size) FLASHPLAN_NOEXCEPT;

// New tokens of a batch and the cache they go to: AppendTensors of kv_cache.h.
typedef struct flashplan_append_tensors {
  size_t struct_size;
  const flashplan_tensor* k;
  const flashplan_tensor* v;
  const flashplan_tensor* k_cache;  // written
  const flashplan_tensor* v_cache;  // written
  const flashplan_tensor* indptr;
  const flashplan_tensor* kv_lens;
  const flashplan_tensor* block_table;
  const flashplan_tensor* page_indptr;
  const flashplan_tensor* page_indices;
  const flashplan_tensor* slot_mapping;  // instead of indptr, kv_lens and the page table
  float k_scale;
  float v_scale;
  int32_t kv_layout;
  int32_t reserved;                  // 0
  const flashplan_tensor* k_scales;  // or NULL
  const flashplan_tensor* v_scales;  // or NULL
  // Given instead of indptr and kv_lens.
  const flashplan_tensor* batch_indices;
  const flashplan_tensor* positions;
} flashplan_append_tensors;

// Sets scales to 1 and everything else to NULL or 0.
FLASHPLAN_API void flashplan_append_tensors_init(flashplan_append_tensors* tensors,
                                                 size_t struct_size) FLASHPLAN_NOEXCEPT;

// Writes new keys and values into their pages, or to their slots: append_paged_kv of kv_cache.h. On
// a GPU it is asynchronous on `stream`, and may be captured into a graph.
FLASHPLAN_API flashplan_status flashplan_append_paged_kv(const flashplan_append_tensors* tensors,
                                                         flashplan_stream stream,
                                                         char* message) FLASHPLAN_NOEXCEPT;

// Merges attention states over disjoint keys. o, lse: [num_states] pointers to tensors; out and
// out_lse are written. More than 8 states take an allocation on the host.
FLASHPLAN_API flashplan_status flashplan_merge_states(
    const flashplan_tensor* const* o, const flashplan_tensor* const* lse, int32_t num_states,
    const flashplan_tensor* out, const flashplan_tensor* out_lse, flashplan_stream stream,
    char* message) FLASHPLAN_NOEXCEPT;

// Merges as flashplan_merge_states does, but reads and writes every lse as a logarithm to base 2.
FLASHPLAN_API flashplan_status flashplan_merge_states_base2(
    const flashplan_tensor* const* o, const flashplan_tensor* const* lse, int32_t num_states,
    const flashplan_tensor* out, const flashplan_tensor* out_lse, flashplan_stream stream,
    char* message) FLASHPLAN_NOEXCEPT;

// Finds the prefixes that requests share, in a page table in host memory, which is given as
// block_table or as page_indptr and page_indices. groups: room for batch_size - 1 rows of three;
// num_groups: how many were written.
FLASHPLAN_API flashplan_status flashplan_find_shared_prefixes(
    const flashplan_batch* batch, int32_t page_size, const flashplan_tensor* block_table,
    const flashplan_tensor* page_indptr, const flashplan_tensor* page_indices, int32_t* groups,
    int32_t* num_groups, char* message) FLASHPLAN_NOEXCEPT;

// Sets, or returns, how many threads the CPU engine uses, the caller's included; see runtime.h.
FLASHPLAN_API flashplan_status flashplan_set_num_threads(int32_t num_threads,
                                                         char* message) FLASHPLAN_NOEXCEPT;
FLASHPLAN_API int32_t flashplan_num_threads(void) FLASHPLAN_NOEXCEPT;

#ifdef __cplusplus
}
#endif
