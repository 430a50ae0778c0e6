// SPDX-License-Identifier: Apache-2.0
// Schedules without cuts, which are only made to measure how much cutting and balancing gain.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "plan/schedule/queue_filler.h"

namespace flashplan {

/// Divides each row tile into items of least_heads_ heads, and gives each item to a queue as a
/// whole. The longest items go first, to the least loaded queue. With Division::kInOrder the items
/// go to the queues in turn, in the order of the batch.
void QueueFiller::place_without_cuts() {
  num_left_ = 0;
  const int32_t num_heads = shape_.num_kv_heads;
  const auto add = [&](int32_t row_tile) {
    for (int32_t head = 0; head < num_heads; head += least_heads_) {
      left_[static_cast<std::size_t>(num_left_++)] = {row_tile, head,
                                                      std::min(least_heads_, num_heads - head), -1};
    }
  };
  for (const RowTileGroup& group : tiles_->groups) {
    for (int32_t i = 0; i < group.count; ++i) add(group.first + i);
  }
  for (const int32_t row_tile : tiles_->longest_first) add(row_tile);
  if (loads_before_.empty()) {
    std::fill(loads_.begin(), loads_.end(), 0);
  } else {
    std::copy(loads_before_.begin(), loads_before_.end(), loads_.begin());
  }
  constexpr int64_t kEndless = std::numeric_limits<int64_t>::max() / 2;
  num_dealt_ = num_whole_ = 0;
  if (shape_.division == Division::kInOrder) {
    const auto left = left_.begin();
    std::sort(left, left + num_left_, [](const Item& a, const Item& b) {
      return a.row_tile != b.row_tile ? a.row_tile < b.row_tile : a.head < b.head;
    });
    for (int32_t n = 0; n < num_left_; ++n) {
      Item item = left_[static_cast<std::size_t>(n)];
      item.cta = n % shape_.num_ctas;
      loads_[static_cast<std::size_t>(item.cta)] += cost_of(item);
      dealt_[static_cast<std::size_t>(num_whole_++)] = item;
    }
  } else {
    sort_left_items();
    place_whole(0, kEndless);
  }
  num_left_ = 0;
  cutter_.start(kEndless, loads_.data(), 1);
  cutter_.finish();
}

}  // namespace flashplan
