// SPDX-License-Identifier: Apache-2.0
// Copies keys and values, ragged or paged and in any format, to float32 tiles.
// Only run_queue.h includes this file, inside the namespace of an instruction set.

/// Converts `num_dims` elements, and appends zeros up to `width` floats.
template <typename FormatOfRow>
FLASHPLAN_INLINE void convert_row(const typename FormatOfRow::Storage* from, float* to,
                                  int32_t num_dims, int32_t width) {
  for (int32_t d = 0; d < num_dims; ++d) to[d] = FormatOfRow::load(from[d]);
  for (int32_t d = num_dims; d < width; ++d) to[d] = 0.0F;
}

template <>
FLASHPLAN_INLINE void convert_row<Format<DType::kFp8DsMla>>(const uint8_t* from, float* to,
                                                            int32_t num_dims, int32_t width) {
  load_ds_mla(from, to);
  for (int32_t d = num_dims; d < width; ++d) to[d] = 0.0F;
}

/// Where the keys, or the values, of all requests lie.
struct KvRows {
  const KvView& view;
  const KeyTail& tail;
  const PageTable& pages;
  const KeyLists& lists;
  int32_t head_dim;  // includes the dims of the tail
};

/// Reads keys [kv_begin, kv_end) of one segment in tiles of up to kCpuTileKv keys. Addresses are
/// looked up some tiles ahead, so that rows can be prefetched: the hardware prefetcher of the
/// processor stops at the ends of pages.
template <typename KvFormat>
class KvTiles {
 public:
  using Storage = typename KvFormat::Storage;

  KvTiles(const KvRows& rows, const Segment& segment, int32_t kv_begin, int32_t kv_end,
          int32_t num_heads)
      : from_(rows),
        num_dims_(rows.head_dim - rows.tail.num_dims),
        distance_(num_heads < kMostAhead ? kMostAhead / num_heads : 1),
        num_left_(kv_end - kv_begin) {
    const PageTable& pages = rows.pages;
    num_pages_ = static_cast<uint32_t>(pages.num_pages);
    page_size_ = pages.page_size.value;
    if (rows.lists.slots != nullptr) {
      slots_ = rows.lists.slots + segment.kv_row * rows.lists.row_stride + kv_begin;
      num_slots_ = rows.lists.size - kv_begin;
    } else if (pages.ids == nullptr) {
      row_in_page_ = int64_t{segment.kv_row} + kv_begin;
    } else {
      ids_ = pages.ids +
             (pages.indptr != nullptr ? pages.indptr[segment.kv_row]
                                      : segment.kv_row * pages.row_stride) +
             kv_begin / page_size_;
      row_in_page_ = kv_begin % page_size_;
      page_ = page_of(*ids_);
    }
    for (int32_t i = 0; i < distance_; ++i) look_up(tiles_[i]);
  }

  /// Moves to the next tile; the first call moves to the first tile.
  void advance() {
    current_ = current_ < kMostAhead ? current_ + 1 : 0;
    look_up(ahead());
  }

  /// A bit for each key of the current tile: whether it is in the cache. Keys of page tables always
  /// are; entries of lists may name no key.
  uint32_t found() const { return tiles_[current_].found; }

  /// Converts the current tile of a kv head to [kCpuTileKv, width], and prefetches rows of a later
  /// tile of the same head, far enough ahead to hide the latency of memory.
  void load(int32_t kv_head, float* tile, int32_t width) {
    const int64_t offset = kv_head * from_.view.head_stride;
    const Tile& current = tiles_[current_];
    const Tile& next = ahead();
    const bool has_tail = from_.tail.num_dims > 0;
    for (int32_t j = 0; j < current.num_rows; ++j) {
      if (j < next.num_rows) prefetch_row(next.rows[j] + offset);
      float* row = tile + int64_t{j} * width;
      convert_row<KvFormat>(current.rows[j] + offset, row, num_dims_, has_tail ? num_dims_ : width);
      if (!has_tail) continue;
      convert_row<KvFormat>(current.tails[j], row + num_dims_, from_.tail.num_dims,
                            width - num_dims_);
    }
  }

 private:
  static constexpr int32_t kMostAhead = 4;  // tiles whose addresses are looked up ahead, at most

  /// Addresses of the rows of kv head 0, and of their last dims, which all heads share.
  struct Tile {
    const Storage* rows[kCpuTileKv];
    const Storage* tails[kCpuTileKv];
    int32_t num_rows;
    uint32_t found;
  };

  Tile& ahead() {
    const int32_t i = current_ + distance_;
    return tiles_[i <= kMostAhead ? i : i - kMostAhead - 1];
  }

  void look_up(Tile& tile) {
    tile.num_rows = num_left_ < kCpuTileKv ? num_left_ : kCpuTileKv;
    num_left_ -= tile.num_rows;
    tile.found = slots_ == nullptr ? 0xffffffffU : 0;
    for (int32_t j = 0; j < tile.num_rows; ++j) {
      if (slots_ != nullptr && go_to_slot()) tile.found |= uint32_t{1} << j;
      tile.rows[j] = row_of(from_.view);
      if (from_.tail.num_dims > 0) tile.tails[j] = row_of(from_.tail.view);
      if (slots_ != nullptr) continue;
      ++row_in_page_;
      // After the last key no further page id is read, since the table may end there.
      const bool is_last = num_left_ == 0 && j + 1 == tile.num_rows;
      if (ids_ == nullptr || row_in_page_ < page_size_ || is_last) continue;
      row_in_page_ = 0;
      page_ = page_of(*++ids_);
    }
  }

  /// Goes to the next key of the list. Returns whether it is in the cache. If not, the current row
  /// is the first one of page 0, whose memory exists; nobody uses what is read there.
  bool go_to_slot() {
    page_ = row_in_page_ = 0;
    if (num_slots_ <= 0) return false;
    --num_slots_;
    const int32_t slot = *slots_++;
    if (slot < 0 || static_cast<uint32_t>(slot / page_size_) >= num_pages_) return false;
    page_ = slot / page_size_;
    row_in_page_ = slot % page_size_;
    return true;
  }

  /// The page with this id; page 0 if the cache has no such page, so that no memory outside of the
  /// cache is read. run() has checked the ids of all keys that a query sees, but ids of hidden keys
  /// may have any value, and another thread may change ids during the run.
  int64_t page_of(int32_t id) const { return static_cast<uint32_t>(id) < num_pages_ ? id : 0; }

  /// The current row of a tensor.
  const Storage* row_of(const KvView& view) const {
    return static_cast<const Storage*>(view.data) + page_ * view.page_stride +
           row_in_page_ * view.token_stride;
  }

  void prefetch_row(const Storage* row) const {
    constexpr int32_t kPerLine = 64 / static_cast<int32_t>(sizeof(Storage));
    for (int32_t d = 0; d < num_dims_; d += kPerLine) __builtin_prefetch(row + d, 0, 2);
  }

  const KvRows from_;
  const int32_t num_dims_;          // dims of a row without those that lie in its tail
  const int32_t distance_;          // number of tiles between the current and the prefetched one
  const int32_t* ids_ = nullptr;    // id of the current page; null: ragged
  const int32_t* slots_ = nullptr;  // list entry of the next key; null: there is no list
  int32_t num_slots_ = 0;           // entries left in the list
  int64_t page_ = 0;
  int64_t row_in_page_ = 0;
  int32_t page_size_ = 0;
  uint32_t num_pages_ = 0;
  int32_t num_left_;              // keys that are not looked up yet
  int32_t current_ = kMostAhead;  // index of the current tile in tiles_
  Tile tiles_[kMostAhead + 1];
};
