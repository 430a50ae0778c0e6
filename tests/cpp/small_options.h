// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "flashplan/plan.h"

namespace flashplan::test {

/// Valid options of a small plan, ragged unless there is a page size.
inline AttentionOptions small_options(int32_t page_size = 0) {
  AttentionOptions o;
  o.num_qo_heads = 4;
  o.num_kv_heads = 2;
  o.head_dim_qk = o.head_dim_vo = 8;
  o.q_dtype = o.kv_dtype = o.o_dtype = DType::kFloat32;
  o.page_size = page_size;
  o.max_batch_size = 4;
  o.max_qo_tokens = 16;
  o.num_ctas = 2;
  return o;
}

}  // namespace flashplan::test
