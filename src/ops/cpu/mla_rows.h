// SPDX-License-Identifier: Apache-2.0
// Writes keys of latent attention to their cache, and gathers them. Only kernels.cpp includes this
// file, inside the namespace of an instruction set.

/// The scale of 128 dims of an fp8_ds_mla key. `largest`: the largest magnitude of these dims. The
/// scale is at least the smallest normal number, so that it is not 0 for dims of zeros.
FLASHPLAN_INLINE float ds_mla_scale(float largest) {
  const float scale = largest / 448.0F;
  return scale > 1.17549435e-38F ? scale : 1.17549435e-38F;
}

/// Narrows the latent dims of a key to float8_e4m3fn and 4 scales. NaN does not change a scale.
template <typename From>
void store_scaled_dims(const typename From::Storage* from, uint8_t* to) {
  using To = Format<DType::kFloat8E4M3>;
  constexpr int32_t kDimsOfScale = 128;
  float scales[kDsMlaScaledDims / kDimsOfScale];
  for (int32_t i = 0; i < kDsMlaScaledDims / kDimsOfScale; ++i) {
    const auto* first = from + int64_t{i} * kDimsOfScale;
    float largest = 0.0F;
    for (int32_t d = 0; d < kDimsOfScale; ++d) {
      const float magnitude = __builtin_fabsf(From::load(first[d]));
      largest = magnitude > largest ? magnitude : largest;
    }
    scales[i] = ds_mla_scale(largest);
    uint8_t* stored = to + int64_t{i} * kDimsOfScale;
    for (int32_t d = 0; d < kDimsOfScale; ++d)
      stored[d] = To::store(From::load(first[d]) / scales[i]);
  }
  __builtin_memcpy(to + kDsMlaScaledDims, scales, sizeof(scales));
}

/// Stores num_dims dims of a key to the cache, from dim `first` of `part` on.
template <typename From>
void store_part(const MlaPart& part, float scale, const typename From::Storage* from, char* to,
                int32_t first, int32_t num_dims) {
  dispatch_stored_format<From>(part.cache_dtype, [&](auto format) {
    using To = decltype(format);
    auto* stored = reinterpret_cast<typename To::Storage*>(to) + first;
    if (part.verbatim) {
      __builtin_memcpy(stored, from, sizeof(*from) * static_cast<uint32_t>(num_dims));
      return;
    }
#pragma omp simd
    for (int32_t d = 0; d < num_dims; ++d) stored[d] = To::store(From::load(from[d]) / scale);
  });
}

/// The latent dims of tokens, normalised if the call has norm weights.
template <typename Format, typename WeightFormat>
class LatentRows {
 public:
  using Storage = typename Format::Storage;

  explicit LatentRows(const MlaAppendParams& p)
      : part_(p.parts[0]), is_normed_(p.norm_weight != nullptr) {
    if (!is_normed_) return;
    rows_.weight.load(static_cast<const typename WeightFormat::Storage*>(p.norm_weight),
                      part_.num_dims);
    norm_.row_size = part_.num_dims;
    norm_.eps = p.eps;
    norm_.out.data = reinterpret_cast<char*>(normed_);
    norm_.x.size[0] = norm_.x.size[1] = norm_.out.size[0] = norm_.out.size[1] = make_divisor(1);
  }

  const Storage* row(int32_t token) {
    const auto* row = reinterpret_cast<const Storage*>(part_.row(token));
    if (!is_normed_) return row;
    norm_.x.data = part_.row(token);
    norm_row<Format, WeightFormat, Format>(norm_, 0, rows_, 1.0F);
    return normed_;
  }

 private:
  const MlaPart& part_;
  const bool is_normed_;
  NormParams norm_;
  NormRows<Format, WeightFormat> rows_;
  alignas(64) Storage normed_[kMaxLatentDim];
};

template <typename Format, typename WeightFormat>
void append_mla_tokens(const MlaAppendParams& p, int32_t begin, int32_t end) {
  LatentRows<Format, WeightFormat> latents(p);
  const MlaPart& latent = p.parts[0];
  const MlaPart& tail = p.parts[1];
  const int32_t rotary_dim = p.rope.head_dim > 0 ? p.rope.rotary_dim : 0;
  alignas(64) typename Format::Storage rotated[kMaxRotaryDim];
  Rotations rotations;
  PlaceFinder finder(p.places, begin);
  for (int32_t token = begin; token < end; ++token) {
    if (rotary_dim > 0) {
      fill_rotations(p.rope, p.rope.position(token), rotations);
      rotate_token<Format>(p.rope, rotations, p.rope.sides[0], token);
    }
    const Place place = finder.find(token);
    if (place.page < 0) continue;
    const auto* row = latents.row(token);
    char* to = latent.slot(place.page, place.row_in_page);
    if (p.has_scales) {
      store_scaled_dims<Format>(row, reinterpret_cast<uint8_t*>(to));
    } else {
      store_part<Format>(latent, p.scale, row, to, 0, latent.num_dims);
    }
    if (tail.num_dims == 0) continue;
    const auto* from = reinterpret_cast<const typename Format::Storage*>(tail.row(token));
    to = tail.slot(place.page, place.row_in_page);
    if (rotary_dim > 0) {
      rotate_head<Format>(p.rope, rotations, from, rotated);
      store_part<Format>(tail, p.scale, rotated, to, 0, rotary_dim);
    }
    store_part<Format>(tail, p.scale, from + rotary_dim, to, rotary_dim,
                       tail.num_dims - rotary_dim);
  }
}

void append_mla_rows(const MlaAppendParams& p, int32_t begin, int32_t end) noexcept {
  dispatch_wide_format(p.parts[0].dtype, [&](auto format) {
    using Format = decltype(format);
    if (p.weight_dtype == p.parts[0].dtype) {
      append_mla_tokens<Format, Format>(p, begin, end);
    } else {
      append_mla_tokens<Format, cpu::Format<DType::kFloat32>>(p, begin, end);
    }
  });
}

/// Widens one part of a key, its latent or its rotated dims. `scales`: one for each 128 dims; null:
/// all are 1.
template <typename From, typename To>
void widen_part(const MlaPart& part, float scale, const char* stored, const float* scales,
                char* to) {
  const auto* from = reinterpret_cast<const typename From::Storage*>(stored);
  auto* row = reinterpret_cast<typename To::Storage*>(to);
  if (part.verbatim) {
    __builtin_memcpy(row, from, sizeof(*from) * static_cast<uint32_t>(part.num_dims));
    return;
  }
  if (scales == nullptr) {
#pragma omp simd
    for (int32_t d = 0; d < part.num_dims; ++d) row[d] = To::store(From::load(from[d]) * scale);
    return;
  }
  for (int32_t d = 0; d < part.num_dims; ++d) {
    row[d] = To::store(From::load(from[d]) * scales[d / 128] * scale);
  }
}

void gather_mla_row(const MlaGatherParams& p, const MlaPart& part, MlaGatherParams::Place place,
                    int32_t row, bool has_scales) {
  if (part.num_dims == 0) return;
  char* to = part.row(row);
  if (place.page < 0) {  // another thread has changed the table since it was checked
    __builtin_memset(to, 0, static_cast<uint64_t>(part.num_dims * item_size(part.dtype)));
    return;
  }
  const char* stored = part.slot(place.page, place.row_in_page);
  float scales[kDsMlaScaledDims / 128];
  if (has_scales) __builtin_memcpy(scales, stored + kDsMlaScaledDims, sizeof(scales));
  dispatch_wide_format(part.dtype, [&](auto to_format) {
    using To = decltype(to_format);
    dispatch_format(part.cache_dtype, [&](auto from_format) {
      widen_part<decltype(from_format), To>(part, p.scale, stored, has_scales ? scales : nullptr,
                                            to);
    });
  });
}

void gather_mla_rows(const MlaGatherParams& p, int32_t begin, int32_t end) noexcept {
  for (int32_t row = begin; row < end; ++row) {
    if (row < p.indptr[0] || row >= p.indptr[p.batch_size]) continue;
    const MlaGatherParams::Place place = p.place_of(p.request_of(row), row);
    gather_mla_row(p, p.parts[0], place, row, p.has_scales);
    gather_mla_row(p, p.parts[1], place, row, false);
  }
}
