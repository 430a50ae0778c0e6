// SPDX-License-Identifier: Apache-2.0
// The few elements of a row that a small top-k can keep. Only kernels_sampling.cpp includes this
// file, inside the namespace of an instruction set.

/// The elements of a row that may be kept, in the order of their ids.
struct Candidates {
  static constexpr int32_t kMost = 4096;
  int32_t count = 0;
  alignas(64) float values[kMost];
  int32_t ids[kMost];
};

/// Finds the elements that a top-k may keep. The row is divided into groups of 64 elements, and the
/// bound is the top_k-th largest of the groups' maxima. At least top_k elements reach the bound, so
/// top-k drops every element below it. Returns false if there are fewer groups than top_k, or too
/// many groups or candidates.
template <typename RowType>
[[gnu::noinline]] bool find_candidates(const RowType& row, int32_t top_k, Candidates& candidates) {
  constexpr int32_t kGroup = 64;
  constexpr int32_t kMostGroups = 4096;
  constexpr int32_t kGroupsOfBlock = kBlock / kGroup;
  const int32_t num_groups = (row.size() + kGroup - 1) / kGroup;
  if (top_k > num_groups || num_groups > kMostGroups) return false;
  alignas(64) float values[kBlock];
  alignas(64) float largest_of_group[kMostGroups];
  for (int32_t first = 0; first < row.size(); first += kBlock) {
    const int32_t count = row.load(first, static_cast<float*>(values));
    for (int32_t i = count; i % kGroup != 0; ++i) values[i] = -kInfinity;
    for (int32_t g = 0; g * kGroup < count; ++g) {
      const float* group = values + g * kGroup;
      float largest = -kInfinity;
#pragma omp simd reduction(max : largest)
      for (int32_t i = 0; i < kGroup; ++i) largest = group[i] > largest ? group[i] : largest;
      largest_of_group[first / kGroup + g] = largest;
    }
  }
  const Row<Float32> groups(reinterpret_cast<const char*>(largest_of_group), nullptr, num_groups,
                            false);
  const float bound = sampling::value_of(
      find_threshold<false>(groups, sampling::keep_all(0), static_cast<uint64_t>(top_k)).key);
  candidates.count = 0;
  for (int32_t block = 0; block * kBlock < row.size(); ++block) {
    const float* largest = largest_of_group + block * kGroupsOfBlock;
    const int32_t left = num_groups - block * kGroupsOfBlock;
    const int32_t groups_of_block = left < kGroupsOfBlock ? left : kGroupsOfBlock;
    bool is_loaded = false;
    for (int32_t g = 0; g < groups_of_block; ++g) {
      if (largest[g] < bound) continue;
      if (!is_loaded) row.load(block * kBlock, static_cast<float*>(values));
      is_loaded = true;
      const int32_t begin = g * kGroup;
      const int32_t rest = row.size() - block * kBlock - begin;
      for (int32_t i = begin; i < begin + (rest < kGroup ? rest : kGroup); ++i) {
        if (values[i] < bound) continue;
        if (candidates.count == Candidates::kMost) return false;
        candidates.values[candidates.count] = values[i];
        candidates.ids[candidates.count++] = block * kBlock + i;
      }
    }
  }
  return true;
}
