// SPDX-License-Identifier: Apache-2.0
// Keys and values from where they lie, ragged or paged and in any format, to float32 tiles.
// Included by kernel.cpp only, inside the namespace of its instruction set.

template <typename FormatOfRow>
FLASHPLAN_INLINE void convert_row(const typename FormatOfRow::Storage* from, float* to,
                                  int32_t head_dim) {
  for (int32_t d = 0; d < head_dim; ++d) to[d] = FormatOfRow::load(from[d]);
  for (int32_t d = head_dim; d < padded(head_dim); ++d) to[d] = 0.0F;
}

/// Keys [kv_begin, kv_end) of one request, a tile of up to kCpuTileKv at a time. Addresses are
/// looked up one tile ahead, so that rows can be asked for before they are used: the processor's
/// own prefetching stops at page ends.
template <typename KvFormat>
class KvTiles {
 public:
  using Storage = typename KvFormat::Storage;

  KvTiles(const KvView& view, const PageTable& pages, const RequestInfo& info, int32_t request,
          int32_t kv_begin, int32_t kv_end, int32_t head_dim)
      : view_(view), head_dim_(head_dim), num_left_(kv_end - kv_begin) {
    const auto* base = static_cast<const Storage*>(view.data);
    if (pages.ids == nullptr) {
      page_ = base + (int64_t{info.kv_begin} + kv_begin) * view.token_stride;
    } else {
      page_size_ = pages.page_size;
      ids_ = pages.ids +
             (pages.indptr != nullptr ? pages.indptr[request] : request * pages.row_stride) +
             kv_begin / page_size_;
      slot_ = kv_begin % page_size_;
      page_ = base + *ids_ * view_.page_stride;
    }
    look_up();
  }

  /// Moves to the next tile.
  void advance() {
    num_current_ = num_next_;
    for (int32_t j = 0; j < num_next_; ++j) current_[j] = next_[j];
    look_up();
  }

  /// Converts the current tile of a kv head to [kCpuTileKv, padded(head_dim)], and asks for the
  /// same rows of the next tile: far enough ahead for memory to answer.
  void load(int32_t kv_head, float* tile) const {
    const int64_t offset = kv_head * view_.head_stride;
    for (int32_t j = 0; j < num_current_; ++j) {
      if (j < num_next_) prefetch_row(next_[j] + offset);
      convert_row<KvFormat>(current_[j] + offset, tile + int64_t{j} * padded(head_dim_), head_dim_);
    }
  }

 private:
  void look_up() {
    num_next_ = num_left_ < kCpuTileKv ? num_left_ : kCpuTileKv;
    num_left_ -= num_next_;
    for (int32_t j = 0; j < num_next_; ++j) {
      next_[j] = page_ + slot_ * view_.token_stride;
      ++slot_;
      // No page id is read but those of keys that follow.
      if (ids_ == nullptr || slot_ < page_size_ || (j + 1 == num_next_ && num_left_ == 0)) continue;
      slot_ = 0;
      page_ = static_cast<const Storage*>(view_.data) + *++ids_ * view_.page_stride;
    }
  }

  void prefetch_row(const Storage* row) const {
    constexpr int32_t kPerLine = 64 / static_cast<int32_t>(sizeof(Storage));
    for (int32_t d = 0; d < head_dim_; d += kPerLine) __builtin_prefetch(row + d, 0, 2);
  }

  const KvView& view_;
  const int32_t head_dim_;
  const Storage* page_;           // of kv head 0
  const int32_t* ids_ = nullptr;  // of the page; null: ragged
  int64_t slot_ = 0;
  int32_t page_size_ = 0;
  int32_t num_left_;  // keys after the next tile
  int32_t num_current_ = 0;
  int32_t num_next_ = 0;
  const Storage* current_[kCpuTileKv];
  const Storage* next_[kCpuTileKv];
};
