// SPDX-License-Identifier: Apache-2.0
// Norms of rows. Only kernels.cpp includes this file, inside the namespace of an instruction set.

/// Elements of a row or of weights as float32. If they are float32 in memory, they are used where
/// they are. Otherwise up to kMost elements are converted once and kept; longer rows are converted
/// block by block whenever they are used. Where there are no weights, all elements are 1.
template <typename Format>
class FloatRow {
 public:
  using Storage = typename Format::Storage;

  void load(const Storage* from, int32_t size, float offset = 0.0F) {
    from_ = from;
    offset_ = offset;
    is_float_ = sizeof(Storage) == sizeof(float) && offset == 0.0F;
    is_kept_ = !is_float_ && size <= kMost;
    block_size_ = is_float_ || is_kept_ ? size : kBlock;
    if (is_kept_) convert(0, size);
  }

  void fill_with_ones(int32_t size) {
    is_float_ = false;
    is_kept_ = size <= kMost;
    block_size_ = is_kept_ ? size : kBlock;
    for (int32_t i = 0; i < block_size_; ++i) values_[i] = 1.0F;
  }

  /// Elements that block() can give at once.
  int32_t block_size() const { return block_size_; }

  /// Returns the elements [first, first + count). `count` is at most block_size().
  const float* block(int32_t first, int32_t count) {
    if (is_float_) return reinterpret_cast<const float*>(from_) + first;
    if (is_kept_) return values_ + first;
    if (from_ != nullptr) convert(first, count);
    return values_;
  }

 private:
  static constexpr int32_t kMost = 8192;
  static constexpr int32_t kBlock = 256;

  void convert(int32_t first, int32_t count) {
    load_all<Format>(from_ + first, count, static_cast<float*>(values_));
    if (offset_ == 0.0F) return;
#pragma omp simd
    for (int32_t i = 0; i < count; ++i) values_[i] += offset_;
  }

  const Storage* from_ = nullptr;
  float offset_ = 0.0F;
  bool is_float_ = false;
  bool is_kept_ = false;
  int32_t block_size_ = 0;
  alignas(64) float values_[kMost];
};

typedef float UnalignedVec
    __attribute__((vector_size(kLanes * sizeof(float)), may_alias, aligned(alignof(float))));

FLASHPLAN_INLINE Vec load_unaligned(const float* x) {
  return *reinterpret_cast<const UnalignedVec*>(x);
}

/// The sum of term(x) over a row. Terms are added to four vectors in turn, because an addition to a
/// vector must wait for the one before.
template <typename Format, typename Term>
FLASHPLAN_INLINE float sum_of(FloatRow<Format>& row, int32_t size, const Term& term) {
  Vec sums[4] = {};
  float rest = 0.0F;
  for (int32_t first = 0; first < size; first += row.block_size()) {
    const int32_t count = size - first < row.block_size() ? size - first : row.block_size();
    const float* x = row.block(first, count);
    int32_t i = 0;
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
      for (int32_t u = 0; u < 4; ++u) sums[u] += term(load_unaligned(x + i + u * kLanes));
    }
    for (; i + kLanes <= count; i += kLanes) sums[0] += term(load_unaligned(x + i));
    for (; i < count; ++i) rest += term(x[i]);
  }
  return rest + sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/// The row that is to be normalised: `x`, or the residual after x was added to it.
template <typename Format>
const typename Format::Storage* summed_row(const NormParams& p, int32_t row) {
  using Storage = typename Format::Storage;
  const auto* x = reinterpret_cast<const Storage*>(row_at(p.x, row));
  if (p.residual.data == nullptr) return x;
  auto* residual = reinterpret_cast<Storage*>(row_at(p.residual, row));
  store_each<Format>(residual, p.row_size,
                     [=](int32_t i) { return Format::load(residual[i]) + Format::load(x[i]); });
  return residual;
}

/// The operands of a call as float32: a row, and the weight and bias of all rows.
template <typename Format, typename WeightFormat>
struct NormRows {
  FloatRow<Format> row;
  FloatRow<WeightFormat> weight;
  FloatRow<WeightFormat> bias;
};

/// The number by which all results of a call are divided.
inline float scale_of(const NormParams& p) {
  return p.scales == nullptr ? p.scale : p.scale * *p.scales;
}

template <typename Format, typename WeightFormat, typename To>
void norm_row(const NormParams& p, int32_t index, NormRows<Format, WeightFormat>& rows,
              float scale) {
  FloatRow<Format>& row = rows.row;
  row.load(summed_row<Format>(p, index), p.row_size);
  const auto size = static_cast<float>(p.row_size);
  float mean = 0.0F;
  if (p.centered) mean = sum_of(row, p.row_size, [](auto x) { return x; }) / size;
  const float squares = sum_of(row, p.row_size, [=](auto x) { return (x - mean) * (x - mean); });
  const float factor = 1.0F / __builtin_sqrtf(squares / size + p.eps);
  auto* to = reinterpret_cast<typename To::Storage*>(row_at(p.out, index));
  // A long row and its weights may have blocks of different sizes: float32 elements that are used
  // where they are form one block, all others small blocks. The smaller size fits both.
  const int32_t block_size =
      row.block_size() < rows.weight.block_size() ? row.block_size() : rows.weight.block_size();
  for (int32_t first = 0; first < p.row_size; first += block_size) {
    const int32_t left = p.row_size - first;
    const int32_t count = left < block_size ? left : block_size;
    const float* x = row.block(first, count);  // before `to`, which may be the row, is written
    const float* weight = rows.weight.block(first, count);
    const auto store_scaled = [&](const auto& value_of) {
      if (scale == 1.0F) return store_each<To>(to + first, count, value_of);
      store_each<To>(to + first, count, [=](int32_t i) { return value_of(i) / scale; });
    };
    if (p.bias == nullptr) {
      store_scaled([=](int32_t i) { return (x[i] - mean) * factor * weight[i]; });
    } else {
      const float* bias = rows.bias.block(first, count);
      store_scaled([=](int32_t i) { return (x[i] - mean) * factor * weight[i] + bias[i]; });
    }
  }
}

template <typename Format, typename WeightFormat>
void norm_rows_of(const NormParams& p, int32_t begin, int32_t end) {
  using Storage = typename WeightFormat::Storage;
  NormRows<Format, WeightFormat> rows;
  if (p.weight != nullptr) {
    rows.weight.load(static_cast<const Storage*>(p.weight), p.row_size, p.weight_offset);
  } else {
    rows.weight.fill_with_ones(p.row_size);
  }
  if (p.bias != nullptr) rows.bias.load(static_cast<const Storage*>(p.bias), p.row_size);
  const float scale = scale_of(p);
  dispatch_stored_format<Format>(p.out_dtype, [&](auto to) {
    using To = decltype(to);
    for (int32_t row = begin; row < end; ++row) {
      norm_row<Format, WeightFormat, To>(p, row, rows, scale);
    }
  });
}

void norm_rows(const NormParams& p, int32_t begin, int32_t end) noexcept {
  dispatch_wide_format(p.dtype, [&](auto format) {
    using Format = decltype(format);
    if (p.weight_dtype == p.dtype) {
      norm_rows_of<Format, Format>(p, begin, end);
    } else {
      norm_rows_of<Format, cpu::Format<DType::kFloat32>>(p, begin, end);
    }
  });
}
