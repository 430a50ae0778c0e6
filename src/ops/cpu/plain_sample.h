// SPDX-License-Identifier: Apache-2.0
// Draws from rows without filters or with top-p alone, on the CPU. Only kernels_sampling.cpp
// includes this file, inside the namespace of the instruction set that it is compiled for.

struct WeighedBlock {
  int32_t count;
  uint64_t sum;   // sum of the weights
  uint64_t mass;  // weight of the block in the row
  alignas(64) float values[sampling::kBlock];
  alignas(64) uint32_t weights[sampling::kBlock];
};

template <typename RowType>
[[gnu::noinline]] void weigh_block(const RowType& row, int32_t index, WeighedBlock& block) {
  float* values = block.values;
  uint32_t* weights = block.weights;
  const int32_t count = row.load(index * sampling::kBlock, values, sampling::kBlock);
  float largest = -kInfinity;
#pragma omp simd reduction(max : largest)
  for (int32_t i = 0; i < count; ++i) largest = values[i] > largest ? values[i] : largest;
  sampling::Scale scale = sampling::scale_of_block(largest, row.scale);
  const auto weigh = [&] {
    uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int32_t i = 0; i < count; ++i) {
      weights[i] = sampling::weight_in_block(values[i], scale);
      sum += weights[i];
    }
    return sum;
  };
  // Each branch sets from_probs to a constant, so that the compiler makes a loop for each value,
  // without branches.
  if (row.scale.from_probs) {
    scale.from_probs = true;
    block.sum = weigh();
  } else {
    scale.from_probs = false;
    block.sum = weigh();
  }
  block.count = count;
  block.mass = sampling::mass_of_block(largest, sampling::rounded_sum(block.sum), row.scale);
}

/// The index of the first of `count` amounts at which their running sum exceeds *target. The
/// amounts before it are subtracted from *target.
template <typename Amount>
int32_t find_place(const Amount* amounts, int32_t count, uint64_t* target) {
  for (int32_t i = 0; i < count; ++i) {
    if (*target < amounts[i]) return i;
    *target -= amounts[i];
  }
  return count;  // not reached: the target is below the sum
}

/// The masses of a row's blocks, added up over groups of neighbouring blocks.
struct BlockMasses {
  static constexpr int32_t kMostGroups = 4096;
  int32_t blocks_of_group;
  uint64_t groups[kMostGroups] = {};
  uint64_t total = 0;
};

template <typename RowType>
[[gnu::noinline]] void weigh_blocks(const RowType& row, BlockMasses& masses) {
  const int32_t num_blocks = (row.size() - 1) / sampling::kBlock + 1;
  masses.blocks_of_group = (num_blocks - 1) / BlockMasses::kMostGroups + 1;
  WeighedBlock block;
  for (int32_t b = 0; b < num_blocks; ++b) {
    weigh_block(row, b, block);
    masses.groups[b / masses.blocks_of_group] += block.mass;
    masses.total += block.mass;
  }
}

struct PlainToken {
  int32_t id;
  float value;
  float logprob;  // log-probability in the row without filters
};

/// Draws a block with one random number, and an element of that block with another one.
template <typename RowType>
[[gnu::noinline]] PlainToken draw_from_blocks(const RowType& row, const BlockMasses& masses,
                                              const sampling::RandomPair& random) {
  uint64_t target = sampling::high_product(random.first, masses.total);
  int32_t b = find_place(masses.groups, BlockMasses::kMostGroups, &target) * masses.blocks_of_group;
  WeighedBlock block;
  for (weigh_block(row, b, block); target >= block.mass; weigh_block(row, ++b, block)) {
    target -= block.mass;
  }
  target = sampling::high_product(random.second, block.sum);
  const int32_t place = find_place(block.weights, block.count, &target);
  const double part = static_cast<double>(block.mass) * static_cast<double>(block.weights[place]);
  const double all = static_cast<double>(masses.total) * static_cast<double>(block.sum);
  return {b * sampling::kBlock + place, block.values[place],
          static_cast<float>(__builtin_log(part / all))};
}

template <typename RowType>
SampleResult draw_from_all(const SampleParams& p, int32_t index, const RowType& row) {
  BlockMasses masses;
  weigh_blocks(row, masses);
  if (row.scale.from_probs && !sampling::masses_sum_to_one(masses.total)) {
    return {-1, 0.0F, SampleError::kProbabilities};
  }
  const PlainToken token = draw_from_blocks(row, masses, sampling::random_of_try(p, index, 0));
  return {token.id, token.logprob, SampleError::kNone};
}

/// The mass of all elements, and of those that come before a token: larger ones, and equal ones
/// with a smaller id.
struct MassBefore {
  uint64_t before = 0;
  uint64_t all = 0;
};
template <typename RowType>
[[gnu::noinline]] MassBefore mass_before(const RowType& row, const PlainToken& token) {
  Block block;
  MassBefore mass;
  for (int32_t first = 0; first < row.size(); first += kBlock) {
    const int32_t count = row.load(first, block);
    uint64_t above = 0;
    uint64_t all = 0;
    uint32_t num_ties = 0;
#pragma omp simd reduction(+ : above, all, num_ties)
    for (int32_t i = 0; i < count; ++i) {
      all += block.weights[i];
      above += block.values[i] > token.value ? block.weights[i] : 0U;
      num_ties += block.values[i] == token.value && first + i < token.id ? 1U : 0U;
    }
    mass.all += all;
    mass.before += above;
    if (num_ties != 0)
      mass.before += uint64_t{num_ties} * sampling::weight_of(token.value, row.scale);
  }
  return mass;
}

/// Draws as if there were no filter, until top-p keeps the token. The id is -1 if top-p drops the
/// tokens of all tries.
template <typename RowType>
PlainToken draw_by_tries(const SampleParams& p, int32_t index, const RowType& row,
                         const BlockMasses& masses) {
  for (uint32_t t = 0; t < sampling::kMostTries; ++t) {
    const PlainToken token = draw_from_blocks(row, masses, sampling::random_of_try(p, index, t));
    const MassBefore mass = mass_before(row, token);
    if (mass.before < sampling::part_of(p.top_p.of(index), mass.all)) return token;
  }
  return {-1, 0.0F, 0.0F};
}
