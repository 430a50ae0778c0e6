// SPDX-License-Identifier: Apache-2.0
#include "plan/kernel/side_by_side.h"

#include <algorithm>

#include "common/dtypes.h"
#include "flashplan/tensor.h"
#include "plan/causal_keys.h"
#include "plan/kernel/batch_kind.h"
#include "plan/kernel/tuning.h"

namespace flashplan {
namespace {

/// The number of keys that a query sees, on average over the queries of a request.
int64_t keys_of_query(const AttentionOptions& options, int32_t qo_len, int32_t kv_len) {
  const int64_t keys = options.causal ? mean_causal_keys(qo_len, kv_len) : kv_len;
  return options.window_left < 0 ? keys : std::min(keys, int64_t{options.window_left} + 1);
}

}  // namespace

int32_t processors_for_many_rows(const Batch& batch, const AttentionOptions& options,
                                 int32_t tile_q, int32_t num_processors) noexcept {
  const int32_t group_size = options.num_qo_heads / options.num_kv_heads;
  const int32_t most_few = most_few_queries(options);
  // The work for one kv head and one dim of keys and values: `products` counts the multiplications
  // of requests of many rows, whose rows are padded to whole row tiles; `numbers` counts the
  // elements that requests of few rows read.
  double products = 0;
  double numbers = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    const int32_t qo_len = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
    if (qo_len == 0) continue;
    const auto keys = static_cast<double>(keys_of_query(options, qo_len, batch.kv_lens[r]));
    if (qo_len <= most_few) {
      numbers += keys;
    } else {
      const int64_t row_tiles = (int64_t{qo_len} * group_size - 1) / tile_q + 1;
      products += keys * static_cast<double>(row_tiles * tile_q);
    }
  }
  constexpr SideBySideTuning kTuning = kSideBySideTuning;
  const double many = 2 * products / kTuning.flops_per_clock;
  const double bytes_per_clock =
      is_narrow_float(options.kv_dtype) ? kTuning.narrow_bytes_per_clock : kTuning.bytes_per_clock;
  const double few = numbers * static_cast<double>(item_size(options.kv_dtype)) / bytes_per_clock;
  const double processors = num_processors * (many / std::max(many + few, 1.0));
  return std::clamp(static_cast<int32_t>(processors + 0.5), 1, num_processors - 1);
}

}  // namespace flashplan
