// SPDX-License-Identifier: Apache-2.0
// Writes tokens to a paged cache. Only kernels.cpp includes this file, inside the namespace of an
// instruction set.

/// Where a token goes in the cache.
struct Place {
  int64_t page = -1;  // < 0: the token is not written
  int32_t row_in_page = 0;
  // The token's position among the keys of its request; < 0: the token belongs to no request, its
  // position is out of range, or the caller gives only its slot.
  int32_t position = -1;
};

/// Finds the places of tokens, which must be asked for in rising order from `first` on. indptr,
/// lengths, ids and slots were checked, but another thread may change them meanwhile. So each is
/// checked again before it serves as an index into a tensor or the cache.
class PlaceFinder {
 public:
  PlaceFinder(const TokenPlaces& places, int32_t first) : places_(places) {
    if (!places.by_lengths()) return;
    int32_t behind = places.batch_size;  // the request of token `first` is in [request_, behind)
    while (behind - request_ > 1) {
      const int32_t middle = request_ + (behind - request_) / 2;
      (places.indptr[middle] <= first ? request_ : behind) = middle;
    }
  }

  Place find(int32_t token) {
    const Divisor& page_size = places_.pages.page_size;
    if (places_.slots != nullptr) {
      const int64_t slot = places_.slots[token];
      if (slot < 0 || slot / page_size.value >= places_.pages.num_pages) return {};
      return {slot / page_size.value, static_cast<int32_t>(slot % page_size.value)};
    }
    if (places_.requests != nullptr) {
      const int32_t request = places_.requests[token];
      if (request < 0 || request >= places_.batch_size) return {};
      return place_of(request, places_.positions[token]);
    }
    const int32_t* indptr = places_.indptr;
    if (token < indptr[request_]) return {};
    while (token >= indptr[request_ + 1]) {
      if (request_ + 1 >= places_.batch_size) return {};
      ++request_;
    }
    const int64_t key = int64_t{places_.kv_lens[request_]} - indptr[request_ + 1] + token;
    return place_of(request_, key);
  }

 private:
  Place place_of(int32_t request, int64_t key) const {
    if (key < 0 || key > 0x7fffffff) return {};
    const Divisor& page_size = places_.pages.page_size;
    const auto position = static_cast<int32_t>(key);
    const PageTable::Row ids = places_.pages.row_of(request);
    const int32_t page_of_request = position / page_size.value;
    const int32_t page =
        page_of_request < ids.count ? places_.pages.ids[ids.first + page_of_request] : -1;
    return {page < places_.pages.num_pages ? page : -1, position % page_size.value, position};
  }

  const TokenPlaces& places_;
  int32_t request_ = 0;
};

/// Stores dims of a head to the cache. `scale` is that of the head.
template <typename From, typename To>
void store_dims(const AppendSide& side, float scale, const typename From::Storage* from,
                typename To::Storage* to, int32_t num_dims) {
  if (side.verbatim) {
    __builtin_memcpy(to, from, sizeof(*from) * static_cast<uint32_t>(num_dims));
    return;
  }
  narrow<From, To>(from, to, num_dims, scale);
}

/// Calls body(from, to, scale) for each head of a token: where its elements are read, where they go
/// in the cache, and the head's scale.
template <typename From, typename To, typename Body>
FLASHPLAN_INLINE void for_each_head(const AppendSide& side, int32_t token, const Place& place,
                                    const Body& body) {
  const char* from = side.rows + token * side.token_stride;
  char* to = side.cache + place.page * side.page_stride + place.row_in_page * side.row_stride;
  for (int32_t head = 0; head < side.num_heads; ++head) {
    body(reinterpret_cast<const typename From::Storage*>(from + head * side.row_head_stride),
         reinterpret_cast<typename To::Storage*>(to + head * side.head_stride),
         side.scale_of(head));
  }
}

template <typename From, typename To>
void append_token(const AppendSide& side, int32_t token, const Place& place) {
  for_each_head<From, To>(side, token, place, [&](const auto* from, auto* to, float scale) {
    store_dims<From, To>(side, scale, from, to, side.head_dim);
  });
}

void append_rows(const AppendParams& p, int32_t begin, int32_t end) noexcept {
  for (const AppendSide& side : p.sides) {
    dispatch_format(side.dtype, [&](auto from) {
      using From = decltype(from);
      dispatch_stored_format<From>(side.cache_dtype, [&](auto to) {
        PlaceFinder finder(p.places, begin);
        for (int32_t token = begin; token < end; ++token) {
          const Place place = finder.find(token);
          if (place.page >= 0) append_token<From, decltype(to)>(side, token, place);
        }
      });
    });
  }
}

/// Rotates the keys of a token, rounds them to the dtype of k, and stores them to the cache.
template <typename From, typename To>
void append_rotated_token(const RopeAppendParams& p, const Rotations& rotations, int32_t token,
                          const Place& place) {
  const AppendSide& side = p.append.sides[0];
  const int32_t rotary_dim = p.rope.rotary_dim;
  alignas(64) typename From::Storage rotated[kMaxRotaryDim];
  for_each_head<From, To>(side, token, place, [&](const auto* from, auto* to, float scale) {
    rotate_head<From>(p.rope, rotations, from, rotated);
    store_dims<From, To>(side, scale, rotated, to, rotary_dim);
    store_dims<From, To>(side, scale, from + rotary_dim, to + rotary_dim,
                         side.head_dim - rotary_dim);
  });
}

void rope_append_rows(const RopeAppendParams& p, int32_t begin, int32_t end) noexcept {
  dispatch_wide_format(p.rope.dtype, [&](auto from) {
    using From = decltype(from);
    dispatch_stored_format<From>(p.append.sides[0].cache_dtype, [&](auto to) {
      using To = decltype(to);
      Rotations rotations;
      PlaceFinder finder(p.append.places, begin);
      for (int32_t token = begin; token < end; ++token) {
        const Place place = finder.find(token);
        if (place.page < 0) continue;
        fill_rotations(p.rope, place.position, rotations);
        rotate_token<From>(p.rope, rotations, p.rope.sides[0], token);
        append_rotated_token<From, To>(p, rotations, token, place);
        append_token<From, To>(p.append.sides[1], token, place);
      }
    });
  });
}
