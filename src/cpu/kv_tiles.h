// SPDX-License-Identifier: Apache-2.0
// Copies keys and values, ragged or paged and in any format, to float32 tiles.
// Only run_queue.h includes this file, inside the namespace of an instruction set.

template <typename FormatOfRow>
FLASHPLAN_INLINE void convert_row(const typename FormatOfRow::Storage* from, float* to,
                                  int32_t head_dim) {
  for (int32_t d = 0; d < head_dim; ++d) to[d] = FormatOfRow::load(from[d]);
  for (int32_t d = head_dim; d < padded(head_dim); ++d) to[d] = 0.0F;
}

/// Reads keys [kv_begin, kv_end) of one segment in tiles of up to kCpuTileKv keys. Addresses are
/// looked up some tiles ahead, so that rows can be prefetched: the prefetching of the processor
/// itself stops at the ends of pages.
template <typename KvFormat>
class KvTiles {
 public:
  using Storage = typename KvFormat::Storage;

  KvTiles(const KvView& view, const PageTable& pages, const Segment& segment, int32_t kv_begin,
          int32_t kv_end, int32_t num_heads, int32_t head_dim)
      : view_(view),
        head_dim_(head_dim),
        distance_(num_heads < kMostAhead ? kMostAhead / num_heads : 1),
        num_left_(kv_end - kv_begin) {
    const auto* base = static_cast<const Storage*>(view.data);
    if (pages.ids == nullptr) {
      page_ = base + (int64_t{segment.kv_row} + kv_begin) * view.token_stride;
    } else {
      page_size_ = pages.page_size.value;
      ids_ = pages.ids +
             (pages.indptr != nullptr ? pages.indptr[segment.kv_row]
                                      : segment.kv_row * pages.row_stride) +
             kv_begin / page_size_;
      row_in_page_ = kv_begin % page_size_;
      num_pages_ = static_cast<uint32_t>(pages.num_pages);
      page_ = page_of(*ids_);
    }
    for (int32_t i = 0; i < distance_; ++i) look_up(tiles_[i]);
  }

  /// Moves to the next tile; the first call moves to the first tile.
  void advance() {
    current_ = current_ < kMostAhead ? current_ + 1 : 0;
    look_up(ahead());
  }

  /// Converts the current tile of a kv head to [kCpuTileKv, padded(head_dim)], and prefetches rows
  /// of a later tile of the same head, far enough ahead to hide the latency of memory.
  void load(int32_t kv_head, float* tile) {
    const int64_t offset = kv_head * view_.head_stride;
    const Tile& current = tiles_[current_];
    const Tile& next = ahead();
    for (int32_t j = 0; j < current.num_rows; ++j) {
      if (j < next.num_rows) prefetch_row(next.rows[j] + offset);
      convert_row<KvFormat>(current.rows[j] + offset, tile + int64_t{j} * padded(head_dim_),
                            head_dim_);
    }
  }

 private:
  static constexpr int32_t kMostAhead = 4;  // tiles

  /// Addresses of the rows of kv head 0.
  struct Tile {
    const Storage* rows[kCpuTileKv];
    int32_t num_rows;
  };

  Tile& ahead() {
    const int32_t i = current_ + distance_;
    return tiles_[i <= kMostAhead ? i : i - kMostAhead - 1];
  }

  void look_up(Tile& tile) {
    tile.num_rows = num_left_ < kCpuTileKv ? num_left_ : kCpuTileKv;
    num_left_ -= tile.num_rows;
    for (int32_t j = 0; j < tile.num_rows; ++j) {
      tile.rows[j] = page_ + row_in_page_ * view_.token_stride;
      ++row_in_page_;
      // Reads only page ids of keys in [kv_begin, kv_end).
      const bool is_last = num_left_ == 0 && j + 1 == tile.num_rows;
      if (ids_ == nullptr || row_in_page_ < page_size_ || is_last) continue;
      row_in_page_ = 0;
      page_ = page_of(*++ids_);
    }
  }

  /// The page with this id; page 0 if the cache has no such page, so that no memory outside of the
  /// cache is read. run() has checked the ids of all keys that a query sees, but ids of hidden keys
  /// may have any value, and another thread may change ids during the run.
  const Storage* page_of(int32_t id) const {
    const int64_t page = static_cast<uint32_t>(id) < num_pages_ ? id : 0;
    return static_cast<const Storage*>(view_.data) + page * view_.page_stride;
  }

  void prefetch_row(const Storage* row) const {
    constexpr int32_t kPerLine = 64 / static_cast<int32_t>(sizeof(Storage));
    for (int32_t d = 0; d < head_dim_; d += kPerLine) __builtin_prefetch(row + d, 0, 2);
  }

  const KvView& view_;
  const int32_t head_dim_;
  const int32_t distance_;        // tiles from the current one to the prefetched one
  const Storage* page_;           // of kv head 0
  const int32_t* ids_ = nullptr;  // of the page; null: ragged
  int64_t row_in_page_ = 0;
  int32_t page_size_ = 0;
  uint32_t num_pages_ = 0;
  int32_t num_left_;              // keys that are not looked up yet
  int32_t current_ = kMostAhead;  // in the ring of tiles
  Tile tiles_[kMostAhead + 1];
};
