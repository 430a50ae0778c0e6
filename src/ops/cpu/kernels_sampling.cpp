// SPDX-License-Identifier: Apache-2.0
// sample() and its filters on one row of logits, and speculative_verify() on one request. This file
// is compiled once for each instruction set, and FLASHPLAN_ISA is the name of the instruction set.
// The compiler must not contract a * b + c into one instruction, so that results have the same bits
// as on a GPU. Only the functions that kernels.h declares may have external linkage. Of any other
// function with external linkage the linker would keep one copy for all instruction sets, and that
// copy may have instructions that the machine lacks.
#include "cpu/float_formats.h"
#include "ops/cpu/kernels.h"
#include "ops/filter_math.h"

namespace flashplan::cpu::FLASHPLAN_ISA {
namespace {

constexpr int32_t kBlock = 1024;  // elements that are converted and weighed at a time
// find_threshold() finds the key of a threshold digit by digit. A key has three digits, and a digit
// has up to kDigits values.
constexpr int32_t kDigits = 2048;
constexpr float kInfinity = __builtin_inff();
using Float32 = Format<DType::kFloat32>;

/// A block of a row.
struct Block {
  alignas(64) float values[kBlock];
  alignas(64) uint32_t weights[kBlock];
};

template <typename Format>
class Row {
 public:
  Row(const char* values, const float* bias, int32_t size, bool from_probs)
      : values_(reinterpret_cast<const typename Format::Storage*>(values)),
        bias_(bias),
        size_(size),
        from_probs_(from_probs) {}

  int32_t size() const { return size_; }
  sampling::Scale scale{};

  /// Element i of a row that has no bias. Adding +0 turns -0 into +0, because key_of() does not
  /// accept -0.
  float value(int64_t i) const { return Format::load(values_[i]) + 0.0F; }

  /// Element i plus its bias: the value that filters compare and weigh(). Like value(), this turns
  /// -0 into +0.
  float load_one(int64_t i) const {
    const float value = Format::load(values_[i]);
    return (bias_ == nullptr ? value : value + bias_[i]) + 0.0F;
  }

  /// Writes what load_one() returns for the elements from `first` on to `values`: for `most`
  /// elements, or for fewer if the row ends before. Returns the number of these elements.
  int32_t load(int32_t first, float* values, int32_t most = kBlock) const {
    const int32_t count = size_ - first < most ? size_ - first : most;
    if (bias_ == nullptr) {
      for (int32_t i = 0; i < count; ++i) values[i] = Format::load(values_[first + i]) + 0.0F;
    } else {
      for (int32_t i = 0; i < count; ++i) {
        values[i] = (Format::load(values_[first + i]) + bias_[first + i]) + 0.0F;
      }
    }
    return count;
  }

  void weigh(int32_t count, const float* values, uint32_t* weights) const {
    if (from_probs_) {
      for (int32_t i = 0; i < count; ++i) {
        weights[i] = sampling::weight_of_probability(values[i], scale);
      }
    } else {
      for (int32_t i = 0; i < count; ++i) {
        weights[i] = sampling::weight_of_logit(values[i], scale);
      }
    }
  }

  int32_t load(int32_t first, Block& block) const {
    const int32_t count = load(first, block.values);
    weigh(count, block.values, block.weights);
    return count;
  }

 private:
  const typename Format::Storage* values_;
  const float* bias_;
  int32_t size_;
  bool from_probs_;
};

struct Extremes {
  float largest;
  SampleError error;
};

template <typename RowType>
[[gnu::noinline]] Extremes find_largest(const RowType& row, bool from_probs) {
  alignas(64) float values[kBlock];
  float largest = -kInfinity;
  float smallest = kInfinity;
  int32_t num_nan = 0;
  for (int32_t first = 0; first < row.size(); first += kBlock) {
    const int32_t count = row.load(first, static_cast<float*>(values));
#pragma omp simd reduction(max : largest) reduction(min : smallest) reduction(+ : num_nan)
    for (int32_t i = 0; i < count; ++i) {
      const float x = values[i];
      largest = x > largest ? x : largest;
      smallest = x < smallest ? x : smallest;
      num_nan += x != x ? 1 : 0;
    }
  }
  if (num_nan > 0) return {largest, SampleError::kNotANumber};
  if (from_probs) {
    const bool fits = smallest >= 0.0F && largest > 0.0F && largest <= 1.01F;
    return {largest, fits ? SampleError::kNone : SampleError::kProbabilities};
  }
  if (largest == kInfinity) return {largest, SampleError::kNotANumber};
  return {largest, largest == -kInfinity ? SampleError::kNoToken : SampleError::kNone};
}

template <typename Format>
[[gnu::noinline]] int32_t first_of_value(const Row<Format>& row, float value) {
  alignas(64) float values[kBlock];
  for (int32_t first = 0;; first += kBlock) {
    const int32_t count = row.load(first, values);
    for (int32_t i = 0; i < count; ++i) {
      if (values[i] == value) return first + i;
    }
  }
}

struct Threshold {
  uint32_t key;
  uint64_t above;  // number or mass of the values with larger keys than `key`
};

/// Finds a threshold: the largest key for which the values with this key or a larger one reach
/// `wanted`. Without kByWeight, the number of these values must reach `wanted`, and all values of
/// the row count. With kByWeight, the sum of their weights must reach `wanted`, and a value counts
/// only if its key is above cut.key and its weight is at least cut.min_weight. All values that
/// count must together reach `wanted`.
template <bool kByWeight, typename RowType>
[[gnu::noinline]] Threshold find_threshold(const RowType& row, const sampling::Cut& cut,
                                           uint64_t wanted) {
  struct Level {
    int32_t shift;
    uint32_t mask;  // selects the bits above the digit
    int32_t num_digits;
  };
  constexpr Level kLevels[] = {
      {21, 0U, kDigits}, {10, ~0U << 21, kDigits}, {0, ~0U << 10, kDigits / 2}};
  Block block;
  uint64_t sums[kDigits];
  Threshold found{0U, 0U};
  for (const Level& level : kLevels) {
    for (int32_t d = 0; d < level.num_digits; ++d) sums[d] = 0;
    for (int32_t first = 0; first < row.size(); first += kBlock) {
      const int32_t count =
          kByWeight ? row.load(first, block) : row.load(first, static_cast<float*>(block.values));
      for (int32_t i = 0; i < count; ++i) {
        const uint32_t key = sampling::key_of(block.values[i]);
        if ((key & level.mask) != found.key) continue;
        if (kByWeight && (key <= cut.key || block.weights[i] < cut.min_weight)) continue;
        const uint32_t digit = (key >> level.shift) & static_cast<uint32_t>(level.num_digits - 1);
        sums[digit] += kByWeight ? block.weights[i] : 1U;
      }
    }
    int32_t digit = level.num_digits - 1;
    while (digit > 0 && found.above + sums[digit] < wanted) found.above += sums[digit--];
    found.key |= static_cast<uint32_t>(digit) << level.shift;
  }
  return found;
}

struct Mass {
  uint64_t above = 0;  // mass of values above the cut's key
  uint64_t num_ties = 0;
};

/// Adds up the weights of one block.
FLASHPLAN_INLINE Mass mass_of(const Block& block, int32_t count, const sampling::Cut& cut) {
  uint64_t above = 0;
  uint32_t num_ties = 0;
#pragma omp simd reduction(+ : above, num_ties)
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t key = sampling::key_of(block.values[i]);
    const uint32_t weight = block.weights[i] >= cut.min_weight ? block.weights[i] : 0U;
    above += key > cut.key ? weight : 0U;
    num_ties += key == cut.key ? 1U : 0U;
  }
  return {above, num_ties};
}

template <typename RowType>
[[gnu::noinline]] Mass mass_of(const RowType& row, const sampling::Cut& cut) {
  Block block;
  Mass total;
  for (int32_t first = 0; first < row.size(); first += kBlock) {
    const int32_t count = row.load(first, block);
    const Mass part = mass_of(block, count, cut);
    total.above += part.above;
    total.num_ties += part.num_ties;
  }
  return total;
}

/// The weight of a value that has the cut's key; 0 if min-p drops such values, or if no tie is
/// kept.
uint32_t weight_of_tie(const sampling::Cut& cut, const sampling::Scale& scale) {
  if (cut.num_ties == 0) return 0;
  const uint32_t weight = sampling::weight_of(sampling::value_of(cut.key), scale);
  return weight >= cut.min_weight ? weight : 0;
}

/// The first token at which the sum of the kept weights, in the order of ids, exceeds `target`.
template <typename RowType>
[[gnu::noinline]] int32_t find_token(const RowType& row, const sampling::Cut& cut, uint64_t target,
                                     uint32_t* weight) {
  Block block;
  const uint32_t tie = weight_of_tie(cut, row.scale);
  uint64_t passed = 0;
  uint64_t ties_passed = 0;
  for (int32_t first = 0; first < row.size(); first += kBlock) {
    const int32_t count = row.load(first, block);
    const Mass part = mass_of(block, count, cut);
    const uint32_t kept =
        sampling::kept_ties(cut, ties_passed, static_cast<uint32_t>(part.num_ties));
    if (passed + part.above + uint64_t{kept} * tie <= target) {
      passed += part.above + uint64_t{kept} * tie;
      ties_passed += part.num_ties;
      continue;
    }
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t key = sampling::key_of(block.values[i]);
      *weight = block.weights[i];
      if (key > cut.key && *weight >= cut.min_weight) passed += *weight;
      if (key == cut.key && ties_passed++ < cut.num_ties) passed += tie;
      if (passed > target) return first + i;
    }
  }
  return -1;  // not reached: the target is below the sum
}

#include "ops/cpu/candidates.h"    // uses Row and find_threshold()
#include "ops/cpu/filter_row.h"    // uses find_threshold() and mass_of()
#include "ops/cpu/plain_sample.h"  // uses Row

/// Draws from what top-k, min-p and top-p keep of the row. The resulting id is the element's index
/// in `row`. `counted`: the mass of which top-p keeps a part; 0: what top-k and min-p keep.
template <typename RowType>
SampleResult filter_and_draw(const SampleParams& p, int32_t index, const RowType& row,
                             uint64_t counted) {
  const int32_t top_k = p.top_k.of(index);
  const float top_p = p.top_p.of(index);
  const float min_p = p.min_p.of(index);
  const bool is_tried = sampling::is_tried(top_k, top_p, min_p, p.vocab);
  SampleResult result{-1, 0.0F, SampleError::kNone};
  uint32_t weight = 0;
  if (is_tried) {
    BlockMasses masses;
    weigh_blocks(row, masses);
    if (p.from_probs && !sampling::masses_sum_to_one(masses.total)) {
      return {-1, 0.0F, SampleError::kProbabilities};
    }
    const PlainToken token = draw_by_tries(p, index, row, masses);
    if (token.id >= 0 && p.logprobs == nullptr) return {token.id, 0.0F, SampleError::kNone};
    result.id = token.id;
    weight = sampling::weight_of(token.value, row.scale);
  }
  const Kept kept = filter(row, top_k, top_p, min_p, counted);
  if (result.id < 0) {
    const uint64_t random =
        sampling::random_of_try(p, index, is_tried ? sampling::kMostTries : 0).first;
    result.id = find_token(row, kept.cut, sampling::high_product(random, kept.total), &weight);
  }
  const double chance = static_cast<double>(weight) / static_cast<double>(kept.total);
  result.logprob = static_cast<float>(__builtin_log(chance));
  return result;
}

template <typename Format>
SampleResult sample_from(const SampleParams& p, int32_t index) {
  const auto failed = [](SampleError error) { return SampleResult{-1, 0.0F, error}; };
  const SampleError error = error_of_parameters(p, index);
  if (error != SampleError::kNone) return failed(error);
  const float temperature = p.temperature.of(index);
  const int32_t top_k = p.top_k.of(index);
  const int32_t logits_row = p.logits_row(index);  // read once, as another thread may change it
  if (logits_row < 0) return failed(SampleError::kRow);
  Row<Format> row = row_of<Format>(p, logits_row);
  const Extremes extremes = find_largest(row, p.from_probs);
  if (extremes.error != SampleError::kNone) return failed(extremes.error);
  if (temperature == 0.0F) return {first_of_value(row, extremes.largest), 0.0F};
  row.scale = sampling::make_scale(extremes.largest, temperature, p.from_probs);
  if (!sampling::has_filters(top_k, p.top_p.of(index), p.min_p.of(index), p.vocab)) {
    return draw_from_all(p, index, row);
  }
  const bool is_tried = sampling::is_tried(top_k, p.top_p.of(index), p.min_p.of(index), p.vocab);
  // If draws are tried without filters, filter_and_draw() checks the sum of the probabilities.
  const bool is_checked = p.from_probs && !is_tried;
  const uint64_t all =
      is_checked || p.joint ? mass_of(row, sampling::keep_all(0)).above : uint64_t{0};
  if (is_checked && !sampling::sums_to_one(all, extremes.largest)) {
    return failed(SampleError::kProbabilities);
  }
  const uint64_t counted = p.joint ? all : 0;
  Candidates candidates;
  if (top_k >= p.vocab || !find_candidates(row, top_k, candidates)) {
    return filter_and_draw(p, index, row, counted);
  }
  Row<Float32> kept(reinterpret_cast<const char*>(candidates.values), nullptr, candidates.count,
                    p.from_probs);
  kept.scale = row.scale;
  SampleResult result = filter_and_draw(p, index, kept, counted);
  result.id = candidates.ids[result.id];
  return result;
}

#include "ops/cpu/verify_row.h"      // uses Row and the functions above
#include "ops/cpu/write_filtered.h"  // uses filter_row.h

}  // namespace

SampleResult sample_row(const SampleParams& p, int32_t row) noexcept {
  SampleResult result;
  dispatch_wide_format(p.dtype,
                       [&](auto format) { result = sample_from<decltype(format)>(p, row); });
  return result;
}

FilterResult find_filter(const FilterParams& p, int32_t row) noexcept {
  FilterResult result;
  dispatch_wide_format(p.dtype,
                       [&](auto format) { result = find_filter_of<decltype(format)>(p, row); });
  return result;
}

void write_filtered(const FilterParams& p, int32_t row, const FilterResult& filter) noexcept {
  dispatch_wide_format(p.dtype,
                       [&](auto format) { write_filtered_of<decltype(format)>(p, row, filter); });
}

void list_logprobs(const FilterParams& p, int32_t row) noexcept {
  dispatch_wide_format(p.dtype, [&](auto format) { list_logprobs_of<decltype(format)>(p, row); });
}

VerifyResult verify_row(const VerifyParams& p, int32_t row, int32_t* nodes) noexcept {
  VerifyResult result;
  dispatch_wide_format(p.dtype,
                       [&](auto format) { result = verify<decltype(format)>(p, row, nodes); });
  return result;
}

}  // namespace flashplan::cpu::FLASHPLAN_ISA
