// SPDX-License-Identifier: Apache-2.0
// The functions of flashplan_c.h: each one reads the caller's structs and calls the C++ library.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "abi/params.h"
#include "c_abi/read_structs.h"
#include "c_abi/report.h"
#include "c_abi/structs.h"
#include "common/error.h"
#include "common/run_tensors.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c.h"

struct flashplan_plan {
  flashplan::Plan plan;
};

namespace flashplan::c_abi {
namespace {

/// Copies `source` to `text`, which has `size` bytes, with a final NUL. What does not fit is cut
/// off. Returns the length of `source`, as snprintf() does.
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

Status create(const flashplan_variant_description* given, flashplan_variant** variant) noexcept {
  if (variant == nullptr) return null_argument("variant");
  *variant = nullptr;
  std::unique_ptr<flashplan_variant> created(new (std::nothrow) flashplan_variant);
  if (!created) {
    return error(StatusCode::kOutOfMemory, "variant: expected %zu bytes on the host, got none",
                 sizeof(flashplan_variant));
  }
  FLASHPLAN_RETURN_IF_ERROR(read_variant(given, &created->variant));
  *variant = created.release();
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
  FLASHPLAN_RETURN_IF_ERROR(check_reserved("tensors", t.reserved));
  FLASHPLAN_RETURN_IF_ERROR(check_reserved("tensors", t.reserved2));
  AttentionTensors tensors;
  for (const RunTensor& tensor : kRunTensors) {
    FLASHPLAN_RETURN_IF_ERROR(
        read_tensors({{tensor.name, t.*tensor.c_tensor, &(tensors.*tensor.view)}}));
  }
  TensorView variant_tensors[kMaxVariantTensors];
  const int32_t count = t.num_variant_tensors;
  if (count < 0 || count > kMaxVariantTensors || (count > 0 && t.variant_tensors == nullptr)) {
    return error(StatusCode::kInvalidArgument, "variant_tensors: expected 0 to %d, got %d%s",
                 kMaxVariantTensors, count, t.variant_tensors == nullptr ? " at null" : "");
  }
  for (int32_t i = 0; i < count; ++i) {
    char name[32];
    std::snprintf(name, sizeof(name), "variant_tensors[%d]", i);
    FLASHPLAN_RETURN_IF_ERROR(read_tensors({{name, t.variant_tensors[i], &variant_tensors[i]}}));
  }
  tensors.variant_tensors = variant_tensors;
  tensors.num_variant_tensors = count;
  tensors.variant_scalars = t.variant_scalars;
  tensors.num_variant_scalars = t.num_variant_scalars;
  tensors.q_scale = t.q_scale;
  tensors.k_scale = t.k_scale;
  tensors.v_scale = t.v_scale;
  tensors.workspace = t.workspace;
  tensors.workspace_bytes = t.workspace_bytes;
  tensors.pdl = t.pdl != 0;
  return plan->plan.run(tensors, stream);
}

Status check_data(const flashplan_plan* plan, const flashplan_device_data* given,
                  Stream stream) noexcept {
  if (plan == nullptr) return null_argument("plan");
  flashplan_device_data d;
  FLASHPLAN_RETURN_IF_ERROR(read("data", given, flashplan_device_data{}, &d));
  DeviceData data;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"block_table", d.block_table, &data.block_table},
                                          {"page_indptr", d.page_indptr, &data.page_indptr},
                                          {"page_indices", d.page_indices, &data.page_indices},
                                          {"kv_lens", d.kv_lens, &data.kv_lens},
                                          {"slot_mapping", d.slot_mapping, &data.slot_mapping}}));
  data.num_pages = d.num_pages;
  return plan->plan.check_device_data(data, stream);
}

Status append(const flashplan_append_tensors* given, Stream stream) noexcept {
  AppendTensors tensors;
  FLASHPLAN_RETURN_IF_ERROR(read_append_tensors(given, &tensors));
  return append_paged_kv(tensors, stream);
}

Status merge(const flashplan_tensor* const* o, const flashplan_tensor* const* lse,
             int32_t num_states, const flashplan_tensor* out, const flashplan_tensor* out_lse,
             Stream stream, bool base2) noexcept {
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
  return merge_states(states, num_states, merged, stream, base2);
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
  uint64_t stride = 1;  // unsigned, because it may wrap
  for (int32_t d = num_dims - 1; d >= 0; --d) {
    t.shape[d] = shape[d];
    t.stride[d] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(shape[d]);
  }
  c_abi::write(t, tensor, struct_size);
}

void flashplan_variant_description_init(flashplan_variant_description* description,
                                        size_t struct_size) noexcept {
  c_abi::write(c_abi::default_description(), description, struct_size);
}

flashplan_status flashplan_variant_create(const flashplan_variant_description* description,
                                          flashplan_variant** variant, char* message) noexcept {
  return c_abi::report(c_abi::create(description, variant), message);
}

void flashplan_variant_destroy(flashplan_variant* variant) noexcept { delete variant; }

size_t flashplan_variant_compile_log(const flashplan_variant* variant, char* text,
                                     size_t size) noexcept {
  const std::string log = variant == nullptr ? std::string() : variant->variant.compile_log();
  return c_abi::write_text(log, text, size);
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

void flashplan_device_data_init(flashplan_device_data* data, size_t struct_size) noexcept {
  c_abi::write({}, data, struct_size);
}

flashplan_status flashplan_plan_check_device_data(const flashplan_plan* plan,
                                                  const flashplan_device_data* data,
                                                  flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::check_data(plan, data, stream), message);
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
  return c_abi::report(c_abi::merge(o, lse, num_states, out, out_lse, stream, false), message);
}

flashplan_status flashplan_merge_states_base2(const flashplan_tensor* const* o,
                                              const flashplan_tensor* const* lse,
                                              int32_t num_states, const flashplan_tensor* out,
                                              const flashplan_tensor* out_lse,
                                              flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::merge(o, lse, num_states, out, out_lse, stream, true), message);
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
