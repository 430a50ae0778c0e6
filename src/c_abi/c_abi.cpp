// SPDX-License-Identifier: Apache-2.0
// flashplan_c.h: each call turns the caller's structs into those of the C++ library and calls it.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>

#include "c_abi/structs.h"
#include "common/error.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c.h"

struct flashplan_plan {
  flashplan::Plan plan;
};

namespace flashplan::c_abi {
namespace {

constexpr bool is_same(int c, auto code) { return c == static_cast<int>(code); }
static_assert(is_same(FLASHPLAN_OK, StatusCode::kOk) &&
              is_same(FLASHPLAN_INVALID_ARGUMENT, StatusCode::kInvalidArgument) &&
              is_same(FLASHPLAN_INVALID_TYPE, StatusCode::kInvalidType) &&
              is_same(FLASHPLAN_UNSUPPORTED, StatusCode::kUnsupported) &&
              is_same(FLASHPLAN_NOT_READY, StatusCode::kNotReady) &&
              is_same(FLASHPLAN_OUT_OF_MEMORY, StatusCode::kOutOfMemory) &&
              is_same(FLASHPLAN_CUDA_ERROR, StatusCode::kCudaError));
static_assert(is_same(FLASHPLAN_FLOAT32, DType::kFloat32) &&
              is_same(FLASHPLAN_FLOAT16, DType::kFloat16) &&
              is_same(FLASHPLAN_BFLOAT16, DType::kBFloat16) &&
              is_same(FLASHPLAN_FLOAT8_E4M3FN, DType::kFloat8E4M3) &&
              is_same(FLASHPLAN_FLOAT8_E5M2, DType::kFloat8E5M2) &&
              is_same(FLASHPLAN_INT32, DType::kInt32) && is_same(FLASHPLAN_INT64, DType::kInt64) &&
              is_same(FLASHPLAN_UINT32, DType::kUInt32));
static_assert(is_same(FLASHPLAN_CPU, DeviceType::kCpu) &&
              is_same(FLASHPLAN_CUDA, DeviceType::kCuda) &&
              is_same(FLASHPLAN_NHD, KvLayout::kNHD) && is_same(FLASHPLAN_HND, KvLayout::kHND));
static_assert(FLASHPLAN_MAX_RANK == kMaxRank &&
              FLASHPLAN_WORKSPACE_ALIGNMENT == kWorkspaceAlignment &&
              FLASHPLAN_MESSAGE_SIZE >= sizeof(Status::message));

flashplan_status report(const Status& status, char* message) noexcept {
  if (message != nullptr) {
    std::snprintf(message, FLASHPLAN_MESSAGE_SIZE, "%s", status.ok() ? "" : status.message);
  }
  return static_cast<flashplan_status>(status.code);
}

/// As snprintf does.
std::size_t write_text(const std::string& source, char* text, std::size_t size) noexcept {
  if (text != nullptr && size > 0) {
    const std::size_t length = std::min(source.size(), size - 1);
    std::memcpy(text, source.data(), length);
    text[length] = '\0';
  }
  return source.size();
}

Status null_argument(const char* name) noexcept {
  return error(StatusCode::kInvalidArgument, "%s: expected a pointer, got null", name);
}

// What init functions write, and what a struct that is too old for a field has in it.
flashplan_options default_options() noexcept {
  const AttentionOptions defaults;
  flashplan_options o = {};
  o.kv_layout = static_cast<int32_t>(defaults.kv_layout);
  o.q_dtype = static_cast<int32_t>(defaults.q_dtype);
  o.kv_dtype = static_cast<int32_t>(defaults.kv_dtype);
  o.o_dtype = static_cast<int32_t>(defaults.o_dtype);
  o.causal = defaults.causal ? 1 : 0;
  o.window_left = defaults.window_left;
  o.max_batch_size = defaults.max_batch_size;
  o.max_qo_tokens = defaults.max_qo_tokens;
  return o;
}

flashplan_attention_tensors default_attention_tensors() noexcept {
  flashplan_attention_tensors t = {};
  t.k_scale = t.v_scale = 1.0F;
  return t;
}

flashplan_append_tensors default_append_tensors() noexcept {
  flashplan_append_tensors t = {};
  t.k_scale = t.v_scale = 1.0F;
  return t;
}

Status check_reserved(const char* name, int32_t reserved) noexcept {
  if (reserved == 0) return {};
  return error(StatusCode::kInvalidArgument, "%s.reserved: expected 0, got %d", name, reserved);
}

/// A tensor that may be missing, and where it goes.
struct TensorField {
  const char* name;
  const flashplan_tensor* given;
  TensorView* view;
};

Status read_tensor(const TensorField& field) noexcept {
  if (field.given == nullptr) return {};
  flashplan_tensor t;
  FLASHPLAN_RETURN_IF_ERROR(read(field.name, field.given, flashplan_tensor{}, &t));
  FLASHPLAN_RETURN_IF_ERROR(check_reserved(field.name, t.reserved));
  if (t.rank == 0) {
    return error(StatusCode::kInvalidArgument, "%s.rank: expected >= 1 (null: not given), got 0",
                 field.name);
  }
  TensorView& view = *field.view;
  view.data = t.data;
  view.dtype = static_cast<DType>(t.dtype);
  view.device = {static_cast<DeviceType>(t.device_type), t.device_index};
  view.rank = t.rank;
  std::copy_n(t.shape, kMaxRank, view.shape);
  std::copy_n(t.stride, kMaxRank, view.stride);
  view.read_only = t.read_only != 0;
  return {};
}

Status read_tensors(std::initializer_list<TensorField> fields) noexcept {
  for (const TensorField& field : fields) FLASHPLAN_RETURN_IF_ERROR(read_tensor(field));
  return {};
}

Status read_options(const flashplan_options* given, AttentionOptions* options) noexcept {
  flashplan_options o;
  FLASHPLAN_RETURN_IF_ERROR(read("options", given, default_options(), &o));
  options->num_qo_heads = o.num_qo_heads;
  options->num_kv_heads = o.num_kv_heads;
  options->head_dim_qk = o.head_dim_qk;
  options->head_dim_vo = o.head_dim_vo;
  options->page_size = o.page_size;
  options->kv_layout = static_cast<KvLayout>(o.kv_layout);
  options->q_dtype = static_cast<DType>(o.q_dtype);
  options->kv_dtype = static_cast<DType>(o.kv_dtype);
  options->o_dtype = static_cast<DType>(o.o_dtype);
  options->causal = o.causal != 0;
  options->window_left = o.window_left;
  options->custom_mask = o.custom_mask != 0;
  if (o.softmax_scale != 0.0F) options->softmax_scale = o.softmax_scale;
  options->softcap = o.softcap;
  options->max_batch_size = o.max_batch_size;
  options->max_qo_tokens = o.max_qo_tokens;
  options->device = {static_cast<DeviceType>(o.device_type), o.device_index};
  options->num_ctas = o.num_ctas;
  if (o.workspace_bytes > 0) options->workspace_bytes = o.workspace_bytes;
  options->batch_invariant = o.batch_invariant != 0;
  return {};
}

Status read_batch(const flashplan_batch* given, Batch* batch) noexcept {
  flashplan_batch b;
  FLASHPLAN_RETURN_IF_ERROR(read("batch", given, flashplan_batch{}, &b));
  batch->qo_indptr = b.qo_indptr;
  batch->kv_lens = b.kv_lens;
  batch->kv_indptr = b.kv_indptr;
  batch->batch_size = b.batch_size;
  batch->shared_prefixes = b.shared_prefixes;
  batch->num_shared_prefixes = b.num_shared_prefixes;
  batch->mask_begin = b.mask_begin;
  return {};
}

Status create(const flashplan_options* given, flashplan_plan** plan) noexcept {
  if (plan == nullptr) return null_argument("plan");
  *plan = nullptr;
  AttentionOptions options;
  FLASHPLAN_RETURN_IF_ERROR(read_options(given, &options));
  std::unique_ptr<flashplan_plan> created(new (std::nothrow) flashplan_plan);
  if (!created) {
    return error(StatusCode::kOutOfMemory, "plan: expected %zu bytes on the host, got none",
                 sizeof(flashplan_plan));
  }
  FLASHPLAN_RETURN_IF_ERROR(Plan::create(options, &created->plan));
  *plan = created.release();
  return {};
}

Status count_workspace(const flashplan_options* given, std::size_t* bytes) noexcept {
  if (bytes == nullptr) return null_argument("bytes");
  AttentionOptions options;
  FLASHPLAN_RETURN_IF_ERROR(read_options(given, &options));
  return workspace_bytes(options, bytes);
}

Status make_plan(flashplan_plan* plan, const flashplan_batch* given, Stream stream) noexcept {
  if (plan == nullptr) return null_argument("plan");
  Batch batch;
  FLASHPLAN_RETURN_IF_ERROR(read_batch(given, &batch));
  return plan->plan.plan(batch, stream);
}

Status run(flashplan_plan* plan, const flashplan_attention_tensors* given, Stream stream) noexcept {
  if (plan == nullptr) return null_argument("plan");
  flashplan_attention_tensors t;
  FLASHPLAN_RETURN_IF_ERROR(read("tensors", given, default_attention_tensors(), &t));
  AttentionTensors tensors;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"q", t.q, &tensors.q},
                                          {"k", t.k, &tensors.k},
                                          {"v", t.v, &tensors.v},
                                          {"block_table", t.block_table, &tensors.block_table},
                                          {"page_indptr", t.page_indptr, &tensors.page_indptr},
                                          {"page_indices", t.page_indices, &tensors.page_indices},
                                          {"kv_lens", t.kv_lens, &tensors.kv_lens},
                                          {"mask", t.mask, &tensors.mask},
                                          {"sinks", t.sinks, &tensors.sinks},
                                          {"k_scale", t.k_scales, &tensors.k_scales},
                                          {"v_scale", t.v_scales, &tensors.v_scales},
                                          {"out", t.out, &tensors.o},
                                          {"lse", t.lse, &tensors.lse}}));
  tensors.k_scale = t.k_scale;
  tensors.v_scale = t.v_scale;
  tensors.workspace = t.workspace;
  tensors.workspace_bytes = t.workspace_bytes;
  return plan->plan.run(tensors, stream);
}

Status append(const flashplan_append_tensors* given, Stream stream) noexcept {
  flashplan_append_tensors t;
  FLASHPLAN_RETURN_IF_ERROR(read("tensors", given, default_append_tensors(), &t));
  FLASHPLAN_RETURN_IF_ERROR(check_reserved("tensors", t.reserved));
  AppendTensors tensors;
  FLASHPLAN_RETURN_IF_ERROR(
      read_tensors({{"k", t.k, &tensors.k},
                    {"v", t.v, &tensors.v},
                    {"k_cache", t.k_cache, &tensors.k_cache},
                    {"v_cache", t.v_cache, &tensors.v_cache},
                    {"indptr", t.indptr, &tensors.indptr},
                    {"kv_lens", t.kv_lens, &tensors.kv_lens},
                    {"block_table", t.block_table, &tensors.block_table},
                    {"page_indptr", t.page_indptr, &tensors.page_indptr},
                    {"page_indices", t.page_indices, &tensors.page_indices},
                    {"slot_mapping", t.slot_mapping, &tensors.slot_mapping}}));
  tensors.layout = static_cast<KvLayout>(t.kv_layout);
  tensors.k_scale = t.k_scale;
  tensors.v_scale = t.v_scale;
  return append_paged_kv(tensors, stream);
}

Status merge(const flashplan_tensor* const* o, const flashplan_tensor* const* lse,
             int32_t num_states, const flashplan_tensor* out, const flashplan_tensor* out_lse,
             Stream stream) noexcept {
  if (o == nullptr) return null_argument("o");
  if (lse == nullptr) return null_argument("lse");
  if (num_states < 1) {
    return error(StatusCode::kInvalidArgument, "num_states: expected >= 1, got %d", num_states);
  }
  constexpr int32_t kFew = 8;
  AttentionState few[kFew];
  std::unique_ptr<AttentionState[]> many;
  AttentionState* states = few;
  if (num_states > kFew) {
    many.reset(new (std::nothrow) AttentionState[static_cast<std::size_t>(num_states)]);
    if (!many) {
      return error(StatusCode::kOutOfMemory, "num_states: expected memory for %d states, got none",
                   num_states);
    }
    states = many.get();
  }
  for (int32_t i = 0; i < num_states; ++i) {
    char o_name[24], lse_name[24];
    std::snprintf(o_name, sizeof(o_name), "o[%d]", i);
    std::snprintf(lse_name, sizeof(lse_name), "lse[%d]", i);
    FLASHPLAN_RETURN_IF_ERROR(
        read_tensors({{o_name, o[i], &states[i].o}, {lse_name, lse[i], &states[i].lse}}));
  }
  AttentionState merged;
  FLASHPLAN_RETURN_IF_ERROR(
      read_tensors({{"out", out, &merged.o}, {"out_lse", out_lse, &merged.lse}}));
  return merge_states(states, num_states, merged, stream);
}

Status find_prefixes(const flashplan_batch* given, int32_t page_size,
                     const flashplan_tensor* block_table, const flashplan_tensor* page_indptr,
                     const flashplan_tensor* page_indices, int32_t* groups,
                     int32_t* num_groups) noexcept {
  if (groups == nullptr) return null_argument("groups");
  if (num_groups == nullptr) return null_argument("num_groups");
  Batch batch;
  FLASHPLAN_RETURN_IF_ERROR(read_batch(given, &batch));
  HostPageTable table;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"block_table", block_table, &table.block_table},
                                          {"page_indptr", page_indptr, &table.page_indptr},
                                          {"page_indices", page_indices, &table.page_indices}}));
  return find_shared_prefixes(batch, page_size, table, groups, num_groups);
}

}  // namespace
}  // namespace flashplan::c_abi

using namespace flashplan;

const char* flashplan_status_name(flashplan_status status) noexcept {
  switch (status) {
    case FLASHPLAN_OK: return "FLASHPLAN_OK";
    case FLASHPLAN_INVALID_ARGUMENT: return "FLASHPLAN_INVALID_ARGUMENT";
    case FLASHPLAN_INVALID_TYPE: return "FLASHPLAN_INVALID_TYPE";
    case FLASHPLAN_UNSUPPORTED: return "FLASHPLAN_UNSUPPORTED";
    case FLASHPLAN_NOT_READY: return "FLASHPLAN_NOT_READY";
    case FLASHPLAN_OUT_OF_MEMORY: return "FLASHPLAN_OUT_OF_MEMORY";
    case FLASHPLAN_CUDA_ERROR: return "FLASHPLAN_CUDA_ERROR";
    default: return "unknown";
  }
}

const char* flashplan_version() noexcept { return version(); }

void flashplan_tensor_init(flashplan_tensor* tensor, size_t struct_size, void* data, int32_t dtype,
                           int32_t rank, const int64_t* shape) noexcept {
  flashplan_tensor t = {};
  t.data = data;
  t.dtype = dtype;
  t.rank = rank;
  const int32_t num_dims = shape == nullptr || rank > kMaxRank ? 0 : rank;
  uint64_t stride = 1;  // which may wrap
  for (int32_t d = num_dims - 1; d >= 0; --d) {
    t.shape[d] = shape[d];
    t.stride[d] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(shape[d]);
  }
  c_abi::write(t, tensor, struct_size);
}

void flashplan_options_init(flashplan_options* options, size_t struct_size) noexcept {
  c_abi::write(c_abi::default_options(), options, struct_size);
}

flashplan_status flashplan_is_supported(const flashplan_options* options, char* message) noexcept {
  AttentionOptions wanted;
  Status status = c_abi::read_options(options, &wanted);
  if (status.ok()) status = is_supported(wanted);
  return c_abi::report(status, message);
}

flashplan_status flashplan_workspace_bytes(const flashplan_options* options, size_t* bytes,
                                           char* message) noexcept {
  return c_abi::report(c_abi::count_workspace(options, bytes), message);
}

flashplan_status flashplan_plan_create(const flashplan_options* options, flashplan_plan** plan,
                                       char* message) noexcept {
  return c_abi::report(c_abi::create(options, plan), message);
}

void flashplan_plan_destroy(flashplan_plan* plan) noexcept { delete plan; }

void flashplan_batch_init(flashplan_batch* batch, size_t struct_size) noexcept {
  c_abi::write({}, batch, struct_size);
}

flashplan_status flashplan_plan_plan(flashplan_plan* plan, const flashplan_batch* batch,
                                     flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::make_plan(plan, batch, stream), message);
}

void flashplan_attention_tensors_init(flashplan_attention_tensors* tensors,
                                      size_t struct_size) noexcept {
  c_abi::write(c_abi::default_attention_tensors(), tensors, struct_size);
}

flashplan_status flashplan_plan_run(flashplan_plan* plan,
                                    const flashplan_attention_tensors* tensors,
                                    flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::run(plan, tensors, stream), message);
}

size_t flashplan_plan_workspace_bytes(const flashplan_plan* plan) noexcept {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes();
}

const char* flashplan_plan_kernel_name(const flashplan_plan* plan) noexcept {
  return plan == nullptr ? "" : plan->plan.kernel_name();
}

size_t flashplan_plan_describe(const flashplan_plan* plan, char* text, size_t size) noexcept {
  return c_abi::write_text(plan == nullptr ? std::string() : plan->plan.describe(), text, size);
}

size_t flashplan_show_config(char* text, size_t size) noexcept {
  return c_abi::write_text(show_config(), text, size);
}

void flashplan_append_tensors_init(flashplan_append_tensors* tensors, size_t struct_size) noexcept {
  c_abi::write(c_abi::default_append_tensors(), tensors, struct_size);
}

flashplan_status flashplan_append_paged_kv(const flashplan_append_tensors* tensors,
                                           flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::append(tensors, stream), message);
}

flashplan_status flashplan_merge_states(const flashplan_tensor* const* o,
                                        const flashplan_tensor* const* lse, int32_t num_states,
                                        const flashplan_tensor* out,
                                        const flashplan_tensor* out_lse, flashplan_stream stream,
                                        char* message) noexcept {
  return c_abi::report(c_abi::merge(o, lse, num_states, out, out_lse, stream), message);
}

flashplan_status flashplan_find_shared_prefixes(const flashplan_batch* batch, int32_t page_size,
                                                const flashplan_tensor* block_table,
                                                const flashplan_tensor* page_indptr,
                                                const flashplan_tensor* page_indices,
                                                int32_t* groups, int32_t* num_groups,
                                                char* message) noexcept {
  return c_abi::report(c_abi::find_prefixes(batch, page_size, block_table, page_indptr,
                                            page_indices, groups, num_groups),
                       message);
}

flashplan_status flashplan_set_num_threads(int32_t num_threads, char* message) noexcept {
  return c_abi::report(set_num_threads(num_threads), message);
}

int32_t flashplan_num_threads() noexcept { return num_threads(); }
