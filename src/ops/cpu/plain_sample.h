// SPDX-License-Identifier: Apache-2.0
// Draws from rows without filters, on the CPU. Only kernels_sampling.cpp includes this file, inside
// the namespace of the instruction set that it is compiled for.

struct WeighedBlock {
  int32_t count;
  uint64_t sum;   // of the weights
  uint64_t mass;  // of the block in the row
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
  // Each branch sets from_probs to a constant, so that the loops need not branch on it.
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

/// The first of `count` amounts at which their running sum exceeds *target, from which those before
/// it are taken.
template <typename Amount>
int32_t find_place(const Amount* amounts, int32_t count, uint64_t* target) {
  for (int32_t i = 0; i < count; ++i) {
    if (*target < amounts[i]) return i;
    *target -= amounts[i];
  }
  return count;  // not reached: the target is below the sum
}

/// Draws a block with one random number, and an element of that block with another one.
template <typename RowType>
SampleResult draw_from_all(const SampleParams& p, int32_t index, const RowType& row) {
  constexpr int32_t kMostGroups = 4096;  // of neighbouring blocks
  const int32_t num_blocks = (row.size() - 1) / sampling::kBlock + 1;
  const int32_t blocks_of_group = (num_blocks - 1) / kMostGroups + 1;
  uint64_t masses[kMostGroups] = {};
  uint64_t total = 0;
  WeighedBlock block;
  for (int32_t b = 0; b < num_blocks; ++b) {
    weigh_block(row, b, block);
    masses[b / blocks_of_group] += block.mass;
    total += block.mass;
  }
  if (row.scale.from_probs && !sampling::masses_sum_to_one(total)) {
    return {-1, 0.0F, SampleError::kProbabilities};
  }
  const sampling::RandomPair random = sampling::random_pair(p.seed.of(index), p.offset.of(index),
                                                            p.stream(index), sampling::kUseSample);
  uint64_t target = sampling::high_product(random.first, total);
  int32_t b = find_place(masses, kMostGroups, &target) * blocks_of_group;
  for (weigh_block(row, b, block); target >= block.mass; weigh_block(row, ++b, block)) {
    target -= block.mass;
  }
  target = sampling::high_product(random.second, block.sum);
  const int32_t place = find_place(block.weights, block.count, &target);
  const double part = static_cast<double>(block.mass) * static_cast<double>(block.weights[place]);
  const double all = static_cast<double>(total) * static_cast<double>(block.sum);
  return {b * sampling::kBlock + place, static_cast<float>(__builtin_log(part / all)),
          SampleError::kNone};
}
