// SPDX-License-Identifier: Apache-2.0
// What the filters of sample() keep of a row. Only kernels_sampling.cpp includes this file, inside
// the namespace of an instruction set.

struct Kept {
  sampling::Cut cut;
  uint64_t total;  // sum of the kept weights
};

/// Applies top-k, min-p and top-p to a row. Top-p keeps the part top_p of the mass `counted` or, if
/// `counted` is 0, of the mass that top-k and min-p keep.
template <typename RowType>
Kept filter(const RowType& row, int32_t top_k, float top_p, float min_p, uint64_t counted) {
  sampling::Cut cut = sampling::keep_all(sampling::least_weight(min_p));
  if (top_k < row.size()) {
    const auto wanted = static_cast<uint64_t>(top_k);
    const Threshold threshold = find_threshold<false>(row, cut, wanted);
    cut.key = threshold.key;
    cut.num_ties = static_cast<uint32_t>(wanted - threshold.above);
  }
  uint64_t above = mass_of(row, cut).above;
  uint64_t total = above + uint64_t{cut.num_ties} * weight_of_tie(cut, row.scale);
  if (top_p < 1.0F) {
    const uint64_t wanted = sampling::wanted_of_top_p(top_p, total, counted);
    if (above >= wanted) {
      const Threshold threshold = find_threshold<true>(row, cut, wanted);
      cut.key = threshold.key;
      above = threshold.above;
      cut.num_ties = 1;
    }
    const uint32_t tie = weight_of_tie(cut, row.scale);
    cut.num_ties = sampling::ties_to_reach(wanted, above, tie);
    total = above + uint64_t{cut.num_ties} * tie;
  }
  return {cut, total};
}

SampleError error_of_parameters(const SampleParams& p, int32_t index) {
  const float temperature = p.temperature.of(index);
  const float top_p = p.top_p.of(index);
  const float min_p = p.min_p.of(index);
  if (!(temperature >= 0.0F && temperature < kInfinity)) return SampleError::kTemperature;
  if (p.top_k.of(index) < 1) return SampleError::kTopK;
  if (!(top_p > 0.0F && top_p <= 1.0F)) return SampleError::kTopP;
  if (!(min_p >= 0.0F && min_p <= 1.0F)) return SampleError::kMinP;
  return SampleError::kNone;
}

/// Row number `row` of the logits. Its scale is not set; callers that weigh elements set it.
template <typename Format>
Row<Format> row_of(const SampleParams& p, int32_t row) {
  return {p.logits + row * p.row_stride, p.bias == nullptr ? nullptr : p.bias + row * p.bias_stride,
          p.vocab, p.from_probs};
}
