// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "cpu/float_formats.h"
#include "ops/operators.h"

namespace flashplan::cpu {
namespace {

/// Where one token goes in the cache.
struct Position {
  int64_t page;
  int64_t row_in_page;
};

template <typename From, typename To>
void copy_head(const void* from, void* to, int64_t head_dim, float scale) {
  const auto* source = static_cast<const typename From::Storage*>(from);
  auto* target = static_cast<typename To::Storage*>(to);
  for (int64_t d = 0; d < head_dim; ++d) {
    target[d] = To::store(From::load(source[d]) / scale);
  }
}

void append_token(const TensorView& from, int64_t token, const TensorView& cache, KvLayout layout,
                  Position position, float scale) {
  const bool nhd = layout == KvLayout::kNHD;
  const int64_t row_stride = cache.stride[nhd ? 1 : 2];
  const int64_t head_stride = cache.stride[nhd ? 2 : 1];
  const int64_t head_dim = from.shape[2];
  const int64_t from_size = item_size(from.dtype);
  const int64_t to_size = item_size(cache.dtype);
  const bool verbatim = from.dtype == cache.dtype && scale == 1.0F;
  const auto* source = static_cast<const char*>(from.data) + token * from.stride[0] * from_size;
  auto* target = static_cast<char*>(cache.data) +
                 (position.page * cache.stride[0] + position.row_in_page * row_stride) * to_size;
  for (int64_t h = 0; h < from.shape[1]; ++h) {
    const char* source_head = source + h * from.stride[1] * from_size;
    char* target_head = target + h * head_stride * to_size;
    if (verbatim) {
      std::memcpy(target_head, source_head, static_cast<size_t>(head_dim * to_size));
      continue;
    }
    dispatch_format(from.dtype, [&](auto from_format) {
      dispatch_format(cache.dtype, [&](auto to_format) {
        copy_head<decltype(from_format), decltype(to_format)>(source_head, target_head, head_dim,
                                                              scale);
      });
    });
  }
}

}  // namespace

void append_paged_kv(const AppendTensors& t) noexcept {
  const auto* indptr = static_cast<const int32_t*>(t.indptr.data);
  const auto* kv_lens = static_cast<const int32_t*>(t.kv_lens.data);
  const auto* page_indptr = static_cast<const int32_t*>(t.page_indptr.data);
  const int64_t page_size = t.k_cache.shape[t.layout == KvLayout::kNHD ? 1 : 2];
  const int64_t batch_size = t.kv_lens.shape[0];
  for (int64_t r = 0; r < batch_size; ++r) {
    const int32_t* pages =
        t.block_table.empty()
            ? static_cast<const int32_t*>(t.page_indices.data) + page_indptr[r]
            : static_cast<const int32_t*>(t.block_table.data) + r * t.block_table.stride[0];
    const int64_t num_new = indptr[r + 1] - indptr[r];
    for (int64_t i = 0; i < num_new; ++i) {
      const int64_t position = kv_lens[r] - num_new + i;
      const Position to{pages[position / page_size], position % page_size};
      append_token(t.k, indptr[r] + i, t.k_cache, t.layout, to, t.k_scale);
      append_token(t.v, indptr[r] + i, t.v_cache, t.layout, to, t.v_scale);
    }
  }
}

}  // namespace flashplan::cpu
