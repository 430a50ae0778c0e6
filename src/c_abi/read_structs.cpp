// SPDX-License-Identifier: Apache-2.0
#include "c_abi/read_structs.h"

#include <algorithm>

#include "abi/params.h"
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
              is_same(FLASHPLAN_UINT32, DType::kUInt32) &&
              is_same(FLASHPLAN_FP8_DS_MLA, DType::kFp8DsMla));
static_assert(is_same(FLASHPLAN_CPU, DeviceType::kCpu) &&
              is_same(FLASHPLAN_CUDA, DeviceType::kCuda) &&
              is_same(FLASHPLAN_NHD, KvLayout::kNHD) && is_same(FLASHPLAN_HND, KvLayout::kHND));
static_assert(is_same(FLASHPLAN_ALL_KERNELS, KernelGroup::kAll) &&
              is_same(FLASHPLAN_GENERAL_KERNELS, KernelGroup::kGeneral) &&
              is_same(FLASHPLAN_HOPPER_KERNELS, KernelGroup::kHopper));
static_assert(is_same(FLASHPLAN_ROPE_LINEAR, RopeScaling::kLinear) &&
              is_same(FLASHPLAN_ROPE_LLAMA3, RopeScaling::kLlama3) &&
              is_same(FLASHPLAN_ROPE_YARN, RopeScaling::kYarn));
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
  t.q_scale = t.k_scale = t.v_scale = 1.0F;
  return t;
}

flashplan_append_tensors default_append_tensors() noexcept {
  flashplan_append_tensors t = {};
  t.k_scale = t.v_scale = 1.0F;
  return t;
}

flashplan_rope default_rope() noexcept {
  const Rope defaults;
  flashplan_rope r = {};
  r.theta = defaults.theta;
  r.scale = defaults.scale;
  r.original_length = defaults.original_length;
  r.low_freq_factor = defaults.low_freq_factor;
  r.high_freq_factor = defaults.high_freq_factor;
  r.beta_fast = defaults.beta_fast;
  r.beta_slow = defaults.beta_slow;
  r.truncate = defaults.truncate ? 1 : 0;
  return r;
}

flashplan_variant_description default_description() noexcept {
  flashplan_variant_description d = {};
  d.softmax = VariantDescription().softmax ? 1 : 0;
  return d;
}

Status check_reserved(const char* name, int32_t reserved) noexcept {
  if (reserved == 0) return {};
  return error(StatusCode::kInvalidArgument, "%s.reserved: expected 0, got %d", name, reserved);
}

Status read_tensors(std::initializer_list<TensorField> fields) noexcept {
  for (const TensorField& field : fields) FLASHPLAN_RETURN_IF_ERROR(read_tensor(field));
  return {};
}

Status read_rope(const flashplan_rope* given, Rope* rope) noexcept {
  flashplan_rope r;
  FLASHPLAN_RETURN_IF_ERROR(read("rope", given, default_rope(), &r));
  FLASHPLAN_RETURN_IF_ERROR(check_reserved("rope", r.reserved));
  rope->theta = r.theta;
  rope->scale = r.scale;
  rope->rotary_dim = r.rotary_dim;
  rope->interleaved = r.interleaved != 0;
  rope->scaling = static_cast<RopeScaling>(r.scaling);
  rope->original_length = r.original_length;
  rope->low_freq_factor = r.low_freq_factor;
  rope->high_freq_factor = r.high_freq_factor;
  rope->beta_fast = r.beta_fast;
  rope->beta_slow = r.beta_slow;
  rope->attention_factor = r.attention_factor;
  const auto most = static_cast<int32_t>(rope->frequencies.size());
  if (r.num_frequencies < 0 || r.num_frequencies > most) {
    return error(StatusCode::kInvalidArgument,
                 "rope.num_frequencies: expected a number in [0, %d], got %d", most,
                 r.num_frequencies);
  }
  if (r.num_frequencies > 0 && r.frequencies == nullptr) {
    return error(StatusCode::kInvalidArgument, "rope.frequencies: expected a pointer, got NULL");
  }
  std::copy_n(r.frequencies, r.num_frequencies, rope->frequencies.begin());
  rope->num_frequencies = r.num_frequencies;
  rope->truncate = r.truncate != 0;
  return {};
}

Status read_variant(const flashplan_variant_description* given, Variant* variant) noexcept {
  flashplan_variant_description d;
  FLASHPLAN_RETURN_IF_ERROR(read("description", given, default_description(), &d));
  FLASHPLAN_RETURN_IF_ERROR(check_reserved("description", d.reserved));
  // If a count is negative, or larger than the array below, nothing is copied, because
  // Variant::create() refuses such a count before it reads the list. A null list stays null.
  const auto has_list = [](const void* list, int32_t count, int32_t most) {
    return list != nullptr && count <= most;
  };
  VariantTensor tensors[kMaxVariantTensors];
  const bool has_tensors = has_list(d.tensors, d.num_tensors, kMaxVariantTensors);
  for (int32_t i = 0; has_tensors && i < d.num_tensors; ++i) {
    FLASHPLAN_RETURN_IF_ERROR(check_reserved("tensors", d.tensors[i].reserved));
    tensors[i] = {d.tensors[i].name, static_cast<DType>(d.tensors[i].dtype)};
  }
  VariantScalar scalars[kMaxVariantScalars];
  const bool has_scalars = has_list(d.scalars, d.num_scalars, kMaxVariantScalars);
  for (int32_t i = 0; has_scalars && i < d.num_scalars; ++i) {
    FLASHPLAN_RETURN_IF_ERROR(check_reserved("scalars", d.scalars[i].reserved));
    scalars[i] = {d.scalars[i].name, d.scalars[i].value};
  }
  VariantDescription description;
  description.name = d.name;
  description.query = d.query;
  description.key = d.key;
  description.value = d.value;
  description.output = d.output;
  description.logits = d.logits;
  description.mask = d.mask;
  description.softmax = d.softmax != 0;
  description.tensors = d.tensors != nullptr ? tensors : nullptr;
  description.num_tensors = d.num_tensors;
  description.scalars = d.scalars != nullptr ? scalars : nullptr;
  description.num_scalars = d.num_scalars;
  return Variant::create(description, variant);
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
  options->lse_base2 = o.lse_base2 != 0;
  options->kernels = static_cast<KernelGroup>(o.kernels);
  options->shared_kv = o.shared_kv != 0;
  options->topk = o.topk;
  if (o.variant != nullptr) options->variant = o.variant->variant;
  return o.rope != nullptr ? read_rope(o.rope, &options->rope.emplace()) : Status();
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
  batch->key_ranges = b.key_ranges;
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
                    {"slot_mapping", t.slot_mapping, &tensors->slot_mapping},
                    {"batch_indices", t.batch_indices, &tensors->batch_indices},
                    {"positions", t.positions, &tensors->positions},
                    {"k_scale", t.k_scales, &tensors->k_scales},
                    {"v_scale", t.v_scales, &tensors->v_scales}}));
  tensors->layout = static_cast<KvLayout>(t.kv_layout);
  tensors->k_scale = t.k_scale;
  tensors->v_scale = t.v_scale;
  return {};
}

}  // namespace flashplan::c_abi
