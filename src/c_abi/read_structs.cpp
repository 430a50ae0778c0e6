// SPDX-License-Identifier: Apache-2.0
#include "c_abi/read_structs.h"

#include <algorithm>

#include "c_abi/structs.h"
#include "common/error.h"
#include "flashplan/flashplan.h"

namespace flashplan::c_abi {
namespace {

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

}  // namespace

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

Status read_append_tensors(const flashplan_append_tensors* given, AppendTensors* tensors) noexcept {
  flashplan_append_tensors t;
  FLASHPLAN_RETURN_IF_ERROR(read("tensors", given, default_append_tensors(), &t));
  FLASHPLAN_RETURN_IF_ERROR(check_reserved("tensors", t.reserved));
  FLASHPLAN_RETURN_IF_ERROR(
      read_tensors({{"k", t.k, &tensors->k},
                    {"v", t.v, &tensors->v},
                    {"k_cache", t.k_cache, &tensors->k_cache},
                    {"v_cache", t.v_cache, &tensors->v_cache},
                    {"indptr", t.indptr, &tensors->indptr},
                    {"kv_lens", t.kv_lens, &tensors->kv_lens},
                    {"block_table", t.block_table, &tensors->block_table},
                    {"page_indptr", t.page_indptr, &tensors->page_indptr},
                    {"page_indices", t.page_indices, &tensors->page_indices},
                    {"slot_mapping", t.slot_mapping, &tensors->slot_mapping}}));
  tensors->layout = static_cast<KvLayout>(t.kv_layout);
  tensors->k_scale = t.k_scale;
  tensors->v_scale = t.v_scale;
  return {};
}

}  // namespace flashplan::c_abi
