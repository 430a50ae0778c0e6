// SPDX-License-Identifier: Apache-2.0
// The smallest options that a variant is compiled for.
#pragma once

#include "flashplan/flashplan.h"

namespace flashplan::test {

inline AttentionOptions options_with(const Variant& variant) {
  AttentionOptions o;
  o.num_qo_heads = 2;
  o.num_kv_heads = 1;
  o.head_dim_qk = o.head_dim_vo = 4;
  o.q_dtype = o.kv_dtype = o.o_dtype = DType::kFloat32;
  o.max_batch_size = 1;
  o.max_qo_tokens = 1;
  o.num_ctas = 1;
  o.variant = variant;
  return o;
}

}  // namespace flashplan::test
