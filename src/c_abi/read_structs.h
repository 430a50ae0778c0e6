// SPDX-License-Identifier: Apache-2.0
// Reads the structs of flashplan_c.h into those of the C++ library.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "flashplan/flashplan_c.h"
#include "flashplan/flashplan_c_ops.h"
#include "flashplan/kv_cache.h"
#include "flashplan/plan.h"
#include "flashplan/rope.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "flashplan/variant.h"

struct flashplan_variant {
  flashplan::Variant variant;
};

namespace flashplan::c_abi {

// The default values of structs. Init functions write them, and read() takes them for fields that a
// caller's older struct does not have.
flashplan_options default_options() noexcept;
flashplan_attention_tensors default_attention_tensors() noexcept;
flashplan_append_tensors default_append_tensors() noexcept;
flashplan_rope default_rope() noexcept;
flashplan_variant_description default_description() noexcept;

/// Refuses a reserved field of the struct `name` that is not 0.
Status check_reserved(const char* name, int32_t reserved) noexcept;

/// A tensor of a C struct (null: not given), and the view that read_tensors() fills from it.
struct TensorField {
  const char* name;
  const flashplan_tensor* given;
  TensorView* view;
};
Status read_tensors(std::initializer_list<TensorField> fields) noexcept;

Status read_rope(const flashplan_rope* given, Rope* rope) noexcept;
Status read_variant(const flashplan_variant_description* given, Variant* variant) noexcept;
Status read_options(const flashplan_options* given, AttentionOptions* options) noexcept;
Status read_batch(const flashplan_batch* given, Batch* batch) noexcept;
Status read_append_tensors(const flashplan_append_tensors* given, AppendTensors* tensors) noexcept;

}  // namespace flashplan::c_abi
