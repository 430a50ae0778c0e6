// SPDX-License-Identifier: Apache-2.0
// speculative_verify() on one request. Only kernels_sampling.cpp includes this file, inside the
// namespace of an instruction set.

/// The target's probabilities less those of drafts that were rejected.
template <typename Format>
class ResidualRow {
 public:
  using Storage = typename Format::Storage;

  ResidualRow(const char* target, int32_t size) : target_(target, nullptr, size, true) {}

  sampling::Scale scale{};

  int32_t size() const { return target_.size(); }
  bool is_target() const { return num_rejected_ == 0; }
  void restore_target() { num_rejected_ = 0; }

  /// Subtracts the distribution of a rejected draft. `sum`: the sum of this row before that.
  /// `draft`: the distribution; null: token `id` has the probability 1.
  void reject(float sum, const char* draft, int64_t id) {
    rejected_[num_rejected_++] = {sum, reinterpret_cast<const Storage*>(draft), id};
  }

  /// Element i of a row of probabilities.
  static float load_at(const char* row, int64_t i) {
    return Format::load(reinterpret_cast<const Storage*>(row)[i]);
  }

  float value(int64_t i) const {
    float value = target_.value(i);
    for (int32_t r = 0; r < num_rejected_; ++r) {
      value = sampling::residual(value, rejected_[r].sum, rejected_[r].probability(i));
    }
    return value;
  }

  int32_t load(int32_t first, float* values) const {
    const int32_t count = target_.load(first, values);
    for (int32_t r = 0; r < num_rejected_; ++r) {
      const Rejected& rejected = rejected_[r];
      if (rejected.row == nullptr) {
        for (int32_t i = 0; i < count; ++i) {
          const float q = rejected.probability(first + i);
          values[i] = sampling::residual(values[i], rejected.sum, q);
        }
        continue;
      }
      const float sum = rejected.sum;
      const Storage* row = rejected.row + first;
      for (int32_t i = 0; i < count; ++i) {
        values[i] = sampling::residual(values[i], sum, Format::load(row[i]));
      }
    }
    return count;
  }

  int32_t load(int32_t first, Block& block) const {
    const int32_t count = load(first, static_cast<float*>(block.values));
    for (int32_t i = 0; i < count; ++i) {
      block.weights[i] = sampling::weight_of_probability(block.values[i], scale);
    }
    return count;
  }

 private:
  struct Rejected {
    float sum;
    const Storage* row;  // distribution of the draft; null: `id` has the probability 1
    int64_t id;

    float probability(int64_t i) const {
      if (row != nullptr) return Format::load(row[i]);
      return i == id ? 1.0F : 0.0F;
    }
  };
  Row<Format> target_;
  int32_t num_rejected_ = 0;
  Rejected rejected_[kMaxDrafts];
};

/// Whether all values of a row are probabilities, and their sum is about 1.
template <typename Format>
[[gnu::noinline]] bool is_distribution(const char* probabilities, int32_t size) {
  Row<Format> row(probabilities, nullptr, size, true);
  row.scale = sampling::absolute_scale();
  Block block;
  uint64_t total = 0;
  bool fits = true;
  for (int32_t first = 0; first < size; first += kBlock) {
    const int32_t count = row.load(first, block);
    for (int32_t i = 0; i < count; ++i) {
      fits = fits && sampling::is_probability(block.values[i]);
      total += block.weights[i];
    }
  }
  return fits && sampling::sums_to_one(total, 1.0F);
}

template <typename Format>
float largest_of(const ResidualRow<Format>& row) {
  return find_largest(row, true).largest;
}

/// Draws the token that follows the last accepted draft.
template <typename Format>
int32_t draw_token(const VerifyParams& p, int32_t request, ResidualRow<Format>& row) {
  float largest = largest_of(row);
  if (largest == 0.0F) {  // rounding has left nothing
    row.restore_target();
    largest = largest_of(row);
  }
  row.scale = sampling::make_scale(largest, 1.0F, true);
  const sampling::Cut all = sampling::keep_all(0);
  const uint64_t random = sampling::random_bits(p.seed_of(request), p.offset_of(request),
                                                p.stream(request), sampling::kUseVerify);
  uint32_t weight = 0;
  return find_token(row, all, sampling::high_product(random, mass_of(row, all).above), &weight);
}

template <typename Format>
VerifyResult verify(const VerifyParams& p, int32_t request, int32_t* nodes) {
  VerifyResult result;
  for (int32_t node = -1;; nodes[result.num_accepted++] = node) {
    const char* target = p.target_row(request, node);
    const VerifyResult bad_target = {0, -1, SampleError::kProbabilities, node + 1, false};
    ResidualRow<Format> row(target, p.vocab);
    float sum = 1.0F;
    int32_t accepted = -1;
    for (int32_t draft = node + 1; draft < p.num_drafts; ++draft) {
      const int64_t id = p.token(request, draft);
      // Ids have been checked, but another thread of the caller may change them meanwhile, so they
      // are checked again.
      if (id < 0 || id >= p.vocab || p.parent(request, draft) != node) continue;
      if (!row.is_target()) {
        const float largest = largest_of(row);
        if (largest == 0.0F) break;
        row.scale = sampling::make_scale(largest, 1.0F, true);
        sum = sampling::sum_of_weights(mass_of(row, sampling::keep_all(0)).above, largest);
      }
      const char* drafted_from = p.draft_row(request, draft);
      const bool is_looked_up = drafted_from == nullptr;
      const float q = is_looked_up ? 1.0F : row.load_at(drafted_from, id);
      const uint64_t random =
          sampling::random_bits(p.seed_of(request), p.offset_of(request), p.stream(request),
                                sampling::kUseDraft + static_cast<uint32_t>(draft));
      if (sampling::is_accepted(random, sampling::ratio(row.value(id), sum), q)) {
        accepted = draft;
        break;
      }
      if (row.is_target() && !is_distribution<Format>(target, p.vocab)) return bad_target;
      if (!is_looked_up && !is_distribution<Format>(drafted_from, p.vocab)) {
        return {0, -1, SampleError::kProbabilities, draft, true};
      }
      row.reject(sum, drafted_from, id);
    }
    if (accepted < 0) {
      if (row.is_target() && !is_distribution<Format>(target, p.vocab)) return bad_target;
      result.token = draw_token(p, request, row);
      return result;
    }
    node = accepted;
  }
}
