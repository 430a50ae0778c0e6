// SPDX-License-Identifier: Apache-2.0
// Writes what filters keep of a row: its probabilities or its logits, or the log-probabilities of
// the drawn token and of the likeliest ones. Only kernels_sampling.cpp includes this file, inside
// the namespace of an instruction set.

template <typename Format>
FilterResult find_filter_of(const FilterParams& p, int32_t index) {
  FilterResult result;
  const float temperature = p.temperature.of(index);
  result.error = error_of_parameters(p, index);
  const int32_t logits_row = p.logits_row(index);
  if (result.error == SampleError::kNone && logits_row < 0) result.error = SampleError::kRow;
  if (result.error != SampleError::kNone) return result;
  Row<Format> row = row_of<Format>(p, logits_row);
  const Extremes extremes = find_largest(row, p.from_probs);
  result.error = extremes.error;
  if (result.error != SampleError::kNone) return result;
  const bool is_greedy = temperature == 0.0F;
  row.scale = sampling::make_scale(extremes.largest, is_greedy ? 1.0F : temperature, p.from_probs);
  result.scale = row.scale;
  if (is_greedy) {
    result.cut = sampling::keep_largest(extremes.largest);
    result.total = sampling::kOne;
    return result;
  }
  const uint64_t all =
      p.from_probs || p.joint ? mass_of(row, sampling::keep_all(0)).above : uint64_t{0};
  // A call without `out` only lists log-probabilities after sample(), which has checked the sum of
  // the row already.
  if (p.from_probs && p.out != nullptr && !sampling::sums_to_one(all, extremes.largest)) {
    result.error = SampleError::kProbabilities;
    return result;
  }
  const Kept kept =
      filter(row, p.top_k.of(index), p.top_p.of(index), p.min_p.of(index), p.joint ? all : 0);
  result.cut = kept.cut;
  result.total = kept.total;
  return result;
}

/// Calls body(first, count, values, is_kept) for the blocks of a row. is_kept[i]: filters keep
/// values[i].
template <typename RowType, typename Body>
void for_each_kept(const RowType& row, const FilterResult& filter, const Body& body) {
  alignas(64) float values[kBlock];
  bool is_kept[kBlock];
  uint64_t ties = 0;
  for (int32_t first = 0; first < row.size(); first += kBlock) {
    const int32_t count = row.load(first, static_cast<float*>(values));
    for (int32_t i = 0; i < count; ++i) {
      is_kept[i] = sampling::keeps(filter.cut, values[i], ties < filter.cut.num_ties, filter.scale);
      ties += sampling::key_of(values[i]) == filter.cut.key ? 1 : 0;
    }
    body(first, count, static_cast<const float*>(values), static_cast<const bool*>(is_kept));
  }
}

/// Writes a row of `out`, which may be the logits: a block is read before it is written.
template <typename Format>
void write_filtered_of(const FilterParams& p, int32_t index, const FilterResult& filter) {
  const Row<Format> row = row_of<Format>(p, index);
  char* out = p.out + index * p.out_stride;
  const float sum = sampling::sum_of_kept(filter.total, filter.scale);
  for_each_kept(
      row, filter, [&](int32_t first, int32_t count, const float* values, const bool* is_kept) {
        if (p.is_mask) {
          using Storage = typename Format::Storage;
          auto* to = reinterpret_cast<Storage*>(out) + first;
          const auto* from =
              reinterpret_cast<const Storage*>(p.logits + index * p.row_stride) + first;
          const Storage dropped = Format::store(-kInfinity);
          for (int32_t i = 0; i < count; ++i) to[i] = is_kept[i] ? from[i] : dropped;
          return;
        }
        auto* to = reinterpret_cast<float*>(out) + first;
        for (int32_t i = 0; i < count; ++i) {
          to[i] = is_kept[i] ? sampling::probability_of(values[i], filter.scale, sum) : 0.0F;
        }
      });
}

/// The likeliest tokens, the largest first, equal ones by id.
struct TopTokens {
  int32_t count = 0;
  float values[kMaxTopLogprobs];
  int32_t ids[kMaxTopLogprobs];

  /// Inserts a token. Tokens must come in rising order of ids.
  void insert(float value, int32_t id) {
    int32_t i = count++;
    for (; i > 0 && values[i - 1] < value; --i) {
      values[i] = values[i - 1];
      ids[i] = ids[i - 1];
    }
    values[i] = value;
    ids[i] = id;
  }
};

template <typename RowType>
void find_top(const RowType& row, int32_t num_top, TopTokens& top) {
  const auto wanted = static_cast<uint64_t>(num_top);
  const Threshold threshold = find_threshold<false>(row, sampling::keep_all(0), wanted);
  uint64_t ties_left = wanted - threshold.above;
  alignas(64) float values[kBlock];
  for (int32_t first = 0; first < row.size(); first += kBlock) {
    const int32_t count = row.load(first, static_cast<float*>(values));
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t key = sampling::key_of(values[i]);
      if (key < threshold.key || (key == threshold.key && ties_left == 0)) continue;
      ties_left -= key == threshold.key ? 1 : 0;
      if (top.count < num_top) top.insert(values[i], first + i);
    }
  }
}

template <typename Format>
void list_logprobs_of(const FilterParams& p, int32_t index) {
  const FilterResult filter = find_filter_of<Format>(p, index);
  if (filter.error != SampleError::kNone) return;  // another thread has changed the logits
  const Row<Format> row = row_of<Format>(p, p.logits_row(index));
  const float temperature = p.temperature.of(index) == 0.0F ? 1.0F : p.temperature.of(index);
  const auto logprob_of = [&](float x) {
    return sampling::log_probability_of(
        x, filter.scale, temperature, filter.total,
        [](double part, double all) { return static_cast<float>(__builtin_log(part / all)); });
  };
  const int32_t id = p.ids[index];
  const bool is_token = id >= 0 && id < p.vocab;  // another thread may have changed p.ids
  if (p.logprobs != nullptr && is_token) p.logprobs[index] = logprob_of(row.load_one(id));
  if (p.num_top == 0) return;
  TopTokens top;
  find_top(row, p.num_top, top);
  uint32_t ties = 0;
  for (int32_t i = 0; i < top.count; ++i) {
    const float x = top.values[i];
    float logprob = -kInfinity;
    if (sampling::keeps(filter.cut, x, ties < filter.cut.num_ties, filter.scale)) {
      logprob = logprob_of(x);
    }
    ties += sampling::key_of(x) == filter.cut.key ? 1 : 0;
    p.top_ids_of(index)[i] = logprob > -kInfinity ? top.ids[i] : -1;
    p.top_logprobs_of(index)[i] = logprob;
  }
}
