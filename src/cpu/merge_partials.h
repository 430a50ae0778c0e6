// SPDX-License-Identifier: Apache-2.0
// Writes results and partial results, and merges partial results.
// Only run_queue.h includes this file, inside the namespace of an instruction set.

inline float sink_of(const Sinks& sinks, int64_t qo_head) {
  if (!sinks.are_bfloat16) return static_cast<const float*>(sinks.data)[qo_head];
  return Format<DType::kBFloat16>::load(static_cast<const uint16_t*>(sinks.data)[qo_head]);
}

/// Writes the result of row r, which is scale * v_scale * o, and its lse. It also adds the
/// attention sink. It is called once for each row, so the sink counts once.
template <typename Variant>
void write_row(const RowBlock& rows, const Variant& variant, int32_t r, const float* o, float scale,
               float lse) {
  const AttentionParams& p = rows.params;
  const int64_t token = rows.token(r);
  const int64_t head = rows.qo_head(r);
  if (p.variant.sinks.data != nullptr) scale *= add_sink(sink_of(p.variant.sinks, head), &lse);
  scale *= p.variant.v_scale * p.variant.v_scales.of(rows.kv_head_of(r));
  dispatch_wide_format(p.tensors.o_dtype, [&](auto format) {
    using OFormat = decltype(format);
    auto* out = static_cast<typename OFormat::Storage*>(p.tensors.o.data) +
                token * p.tensors.o.token_stride + head * p.tensors.o.head_stride;
    if constexpr (Variant::kTransformsOutput) {
      const ElementPosition at = rows.element_position(r);
      for (int32_t d = 0; d < p.tensors.head_dim_vo; ++d) {
        out[d] = OFormat::store(variant.output(o[d] * scale, at.next(d)));
      }
    } else {
      for (int32_t d = 0; d < p.tensors.head_dim_vo; ++d) out[d] = OFormat::store(o[d] * scale);
    }
  });
  if (p.tensors.lse.data != nullptr)
    p.tensors.lse.data[token * p.tensors.lse.token_stride + head * p.tensors.lse.head_stride] =
        lse * p.tensors.lse_scale;
}

template <typename Variant>
void write_state(const RowBlock& rows, const Variant& variant, const Scratch& scratch) {
  const int32_t width = padded(rows.params.tensors.head_dim_vo);
  for (int32_t r = 0; r < rows.num_rows(); ++r) {
    write_row(rows, variant, r, scratch.o + int64_t{r} * width, 1.0F, scratch.lse[r]);
  }
}

void write_partial(const RowBlock& rows, int64_t first_row, const Scratch& scratch) {
  const AttentionParams& p = rows.params;
  const int32_t width = padded(p.tensors.head_dim_vo);
  for (int32_t r = 0; r < rows.num_rows(); ++r) {
    float* to = p.workspace.partial_o + (first_row + r) * p.tensors.head_dim_vo;
    const float* from = scratch.o + int64_t{r} * width;
    for (int32_t d = 0; d < p.tensors.head_dim_vo; ++d) to[d] = from[d];
    p.workspace.partial_lse[first_row + r] = scratch.lse[r];
  }
}

/// The states merged so far, for all rows. Without a softmax states are added.
template <typename Variant>
class MergedRows {
 public:
  MergedRows(const RowBlock& rows, const Variant& variant, const Scratch& scratch)
      : rows_(rows), variant_(variant), scratch_(scratch) {
    const int64_t width = padded(rows.params.tensors.head_dim_vo);
    for (int64_t i = 0; i < rows.num_rows() * width; ++i) scratch.merged_o[i] = 0.0F;
    for (int32_t r = 0; r < rows.num_rows(); ++r) {
      scratch.merged_max[r] = -__builtin_inff();
      scratch.merged_sum[r] = 0.0F;
    }
  }

  void add_row(int32_t r, const float* o, float lse) {
    if constexpr (!Variant::kUseSoftmax) {
      for (int32_t d = 0; d < rows_.params.tensors.head_dim_vo; ++d) merged_o(r)[d] += o[d];
      return;
    }
    merge_row(o, lse, rows_.params.tensors.head_dim_vo, merged_o(r), &scratch_.merged_max[r],
              &scratch_.merged_sum[r]);
  }

  void write() {
    for (int32_t r = 0; r < rows_.num_rows(); ++r) {
      if constexpr (!Variant::kUseSoftmax) {
        write_row(rows_, variant_, r, merged_o(r), 1.0F, 0.0F);
        continue;
      }
      const float total = scratch_.merged_sum[r];
      const bool no_keys = total == 0.0F;  // false for NaN, which comes from a key
      const float scale = no_keys ? 0.0F : 1.0F / total;
      const float lse =
          no_keys ? -__builtin_inff() : scratch_.merged_max[r] + __builtin_logf(total);
      write_row(rows_, variant_, r, merged_o(r), scale, lse);
    }
  }

 private:
  float* merged_o(int32_t r) const {
    return scratch_.merged_o + int64_t{r} * padded(rows_.params.tensors.head_dim_vo);
  }

  const RowBlock& rows_;
  const Variant& variant_;
  const Scratch& scratch_;
};

/// Merges the partial results of the rows of one request, in the order of their keys, then those of
/// the prefixes around them, and writes o and lse.
template <typename Variant>
void merge_partials(const AttentionParams& p, const Variant& variant, const Merge& merge,
                    const Scratch& scratch) {
  // Only variants use the request. Their plans share no prefixes, so the segment is the request.
  const int32_t request = merge.rows.segment;
  Segment segment = {};
  if constexpr (Variant::kTransformsOutput) {
    segment = p.schedule.segments[request];
    segment.position = real_length(p, segment, request) - segment.qo_len;
  }
  const RowBlock rows = {p, merge.rows, segment, 0, merge.kv_head, 1, request};
  MergedRows merged(rows, variant, scratch);
  const Merge* from = &merge;
  for (;;) {
    int64_t first_row =
        from->first_partial_row + rows.rows.row_in(from->rows, p.schedule.group_size);
    for (int32_t i = 0; i < from->num_states; ++i, first_row += p.schedule.tile_q) {
      for (int32_t r = 0; r < rows.num_rows(); ++r) {
        merged.add_row(r, p.workspace.partial_o + (first_row + r) * p.tensors.head_dim_vo,
                       p.workspace.partial_lse[first_row + r]);
      }
    }
    if (from->parent < 0) break;
    from = &p.schedule.merges[from->parent];
  }
  merged.write();
}

/// Arrives at merge number `number`. The last work tile to arrive sees the states that all others
/// wrote, and completes the merge.
template <typename Variant>
void arrive(const AttentionParams& p, const Variant& variant, int32_t number,
            const Scratch& scratch) {
  const Merge& merge = p.schedule.merges[number];
  int32_t* const counter = p.schedule.arrivals[number].counters;
  const int32_t arrived = __atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL);
  if (arrived != merge.num_pieces) return;
  if (merge.num_readers == 0) merge_partials(p, variant, merge, scratch);
  for (int32_t i = 0; i < merge.num_readers; ++i) {
    arrive(p, variant, merge.first_reader + i * merge.reader_step, scratch);
  }
}
