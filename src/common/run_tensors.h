// SPDX-License-Identifier: Apache-2.0
// The tensors that Plan::run() takes, in one list, which the bindings, the C interface and the
// checks of run() go through. A variant's own tensors and scalars may not have names of this list.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "flashplan/flashplan_c.h"
#include "flashplan/plan.h"

namespace flashplan {

/// The dtypes that a tensor of run() may have.
enum class RunTensorKind {
  kQuery,   // AttentionOptions::q_dtype
  kCache,   // AttentionOptions::kv_dtype
  kOutput,  // AttentionOptions::o_dtype
  kFloat,   // float32 or bfloat16
  kFloat32,
  kInt32,
  kUInt32,
};

/// Which calls of run() need a tensor.
enum class RunTensorUse { kAlways, kWithoutSharedKv, kOptional };

enum class RunTensorAccess { kRead, kWrite };

struct RunTensor {
  const char* name;  // the name of the argument in Python and in messages
  TensorView AttentionTensors::* view;
  const flashplan_tensor* flashplan_attention_tensors::* c_tensor;
  RunTensorKind kind;
  RunTensorUse use = RunTensorUse::kOptional;
  RunTensorAccess access = RunTensorAccess::kRead;
  /// The number that Python callers may pass instead of the tensor; null: they may not.
  float AttentionTensors::* number = nullptr;

  /// Whether every run() of a plan with this option `shared_kv` needs the tensor.
  constexpr bool is_required(bool shared_kv) const noexcept {
    return use == RunTensorUse::kAlways || (use == RunTensorUse::kWithoutSharedKv && !shared_kv);
  }
  constexpr bool is_written() const noexcept { return access == RunTensorAccess::kWrite; }
};

/// All tensors of run(), in the order in which the Python functions pass and import them: if
/// several are wrong, the error names the first one of this list.
inline constexpr auto kRunTensors = [] {
  using T = AttentionTensors;
  using C = flashplan_attention_tensors;
  using Kind = RunTensorKind;
  using Use = RunTensorUse;
  constexpr auto kRead = RunTensorAccess::kRead, kWrite = RunTensorAccess::kWrite;
  return std::to_array<RunTensor>({
      {"q", &T::q, &C::q, Kind::kQuery, Use::kAlways},
      {"k", &T::k, &C::k, Kind::kCache, Use::kAlways},
      {"v", &T::v, &C::v, Kind::kCache, Use::kWithoutSharedKv},
      {"q_tail", &T::q_tail, &C::q_tail, Kind::kQuery},
      {"k_tail", &T::k_tail, &C::k_tail, Kind::kCache},
      {"block_table", &T::block_table, &C::block_table, Kind::kInt32},
      {"page_indptr", &T::page_indptr, &C::page_indptr, Kind::kInt32},
      {"page_indices", &T::page_indices, &C::page_indices, Kind::kInt32},
      {"kv_lens", &T::kv_lens, &C::kv_lens, Kind::kInt32},
      {"topk_indices", &T::topk_indices, &C::topk_indices, Kind::kInt32},
      {"topk_lens", &T::topk_lens, &C::topk_lens, Kind::kInt32},
      {"mask", &T::mask, &C::mask, Kind::kUInt32},
      {"sinks", &T::sinks, &C::sinks, Kind::kFloat},
      {"q_scale", &T::q_scales, &C::q_scales, Kind::kFloat32, Use::kOptional, kRead, &T::q_scale},
      {"k_scale", &T::k_scales, &C::k_scales, Kind::kFloat32, Use::kOptional, kRead, &T::k_scale},
      {"v_scale", &T::v_scales, &C::v_scales, Kind::kFloat32, Use::kOptional, kRead, &T::v_scale},
      {"out", &T::o, &C::out, Kind::kOutput, Use::kAlways, kWrite},
      {"lse", &T::lse, &C::lse, Kind::kFloat32, Use::kOptional, kWrite},
  });
}();

inline constexpr std::size_t kNumRunTensors = kRunTensors.size();

/// The tensor of this name, or null.
constexpr const RunTensor* find_run_tensor(std::string_view name) noexcept {
  const auto found = std::find_if(kRunTensors.begin(), kRunTensors.end(),
                                  [&](const RunTensor& tensor) { return name == tensor.name; });
  return found == kRunTensors.end() ? nullptr : &*found;
}

}  // namespace flashplan
