// SPDX-License-Identifier: Apache-2.0
// Random batches of the kinds that serving sees. The same seed gives the same batch everywhere:
// the distributions of <random> differ between standard libraries, so they are not used.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "flashplan/plan.h"
#include "plan/schedule/schedule_shape.h"

namespace flashplan::test {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  /// Uniform in [low, high].
  int32_t between(int32_t low, int32_t high) {
    const auto span = static_cast<uint64_t>(static_cast<int64_t>(high) - low + 1);
    return static_cast<int32_t>(low + static_cast<int64_t>(engine_() % span));
  }

  /// Uniform in [0, 1).
  double unit() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }

  bool one_in(int32_t n) { return between(1, n) == 1; }

  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int32_t>(values.size()) - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

/// Owns what a Batch points to.
struct HostBatch {
  std::vector<int32_t> qo_indptr = {0};
  std::vector<int32_t> kv_lens;
  std::vector<int32_t> shared_prefixes;  // rows of three
  std::vector<int32_t> key_ranges;       // rows of two

  void add(int32_t qo_len, int32_t kv_len) {
    qo_indptr.push_back(qo_indptr.back() + qo_len);
    kv_lens.push_back(kv_len);
  }
  int32_t size() const { return static_cast<int32_t>(kv_lens.size()); }
  int32_t qo_tokens() const { return qo_indptr.back(); }
  int32_t qo_len(int32_t request) const {
    const auto r = static_cast<size_t>(request);
    return qo_indptr[r + 1] - qo_indptr[r];
  }
  int32_t num_shared_prefixes() const { return static_cast<int32_t>(shared_prefixes.size() / 3); }
  Batch view() const {
    return {qo_indptr.data(),
            kv_lens.data(),
            nullptr,
            size(),
            shared_prefixes.data(),
            num_shared_prefixes(),
            nullptr,
            key_ranges.empty() ? nullptr : key_ranges.data()};
  }
};

/// The costs of an imaginary kernel, which may be far from those of real ones.
inline CostModel random_costs(Random& random) {
  return {.tile = random.between(0, 500),
          .tile_row = random.between(0, 9),
          .step = random.between(1, 100),
          .step_row = random.between(0, 9),
          .split = random.between(0, 500),
          .split_row = random.between(0, 20),
          .write = random.between(0, 200),
          .write_row = random.between(0, 9),
          .merge = random.between(0, 500),
          .merge_row = random.between(0, 50),
          .cached = random.between(0, 50),
          .share = random.between(0, 100),
          .share_row = random.between(0, 5),
          .state = random.one_in(2) ? random.between(0, 500) : 0,
          .state_row = random.one_in(2) ? random.between(0, 9) : 0};
}

enum class Lengths { kUniform, kZipf, kOneGiant, kManyEmpty };
enum class Phase { kDecode, kPrefill, kMixed };

constexpr Lengths kAllLengths[] = {Lengths::kUniform, Lengths::kZipf, Lengths::kOneGiant,
                                   Lengths::kManyEmpty};
constexpr Phase kAllPhases[] = {Phase::kDecode, Phase::kPrefill, Phase::kMixed};

/// A length in [1, max_len]: uniform, or heavy-tailed with P(len > x) ~ 1/x, Zipf's law.
inline int32_t random_length(Random& random, Lengths lengths, int32_t max_len) {
  if (lengths != Lengths::kZipf) return random.between(1, max_len);
  const double len = std::pow(static_cast<double>(max_len), random.unit());
  return std::max(1, static_cast<int32_t>(len));
}

inline HostBatch random_batch(Random& random, Lengths lengths, Phase phase, int32_t batch_size,
                              int32_t max_kv_len) {
  HostBatch batch;
  const int32_t giant = random.between(0, std::max(batch_size - 1, 0));
  for (int32_t r = 0; r < batch_size; ++r) {
    int32_t kv_len = random_length(random, lengths, max_kv_len);
    if (lengths == Lengths::kOneGiant && r != giant) kv_len = 1 + kv_len % (max_kv_len / 50 + 1);
    if (lengths == Lengths::kOneGiant && r == giant) kv_len = max_kv_len;

    const bool decode = phase == Phase::kDecode || (phase == Phase::kMixed && !random.one_in(8));
    // A prompt may have been prefilled in part; a few have more queries than keys.
    int32_t qo_len = decode ? 1 : random.one_in(2) ? kv_len : random.between(1, kv_len);
    if (!decode && random.one_in(20)) qo_len += random.between(1, 10);

    if (lengths == Lengths::kManyEmpty && !random.one_in(3)) {
      if (random.one_in(2)) qo_len = 0;
      if (random.one_in(2)) kv_len = 0;
    }
    batch.add(qo_len, kv_len);
  }
  return batch;
}

/// Adds a group of `num_requests` from `first` on, which share `begin` keys already, and groups
/// inside it. Requests that are too short for the prefix of their group get longer.
inline void add_random_groups(Random& random, int32_t first, int32_t num_requests, int32_t begin,
                              int32_t max_tokens, HostBatch* batch) {
  const int32_t end = begin + random.between(0, max_tokens);
  for (int32_t r = first; r < first + num_requests; ++r) {
    int32_t& kv_len = batch->kv_lens[static_cast<size_t>(r)];
    kv_len = std::max(kv_len, end + batch->qo_len(r));
  }
  batch->shared_prefixes.insert(batch->shared_prefixes.end(), {first, num_requests, end});
  for (int32_t r = first; r < first + num_requests;) {
    const int32_t left = first + num_requests - r;
    const int32_t inside = random.between(1, left);
    if (num_requests > 1 && !random.one_in(3)) {
      add_random_groups(random, r, inside, end, max_tokens / 2, batch);
    }
    r += inside;
  }
}

/// Decodes that share their first `prefix` keys, and have `suffix` keys of their own.
inline HostBatch decodes(int32_t num_requests, int32_t prefix, int32_t suffix) {
  HostBatch batch;
  for (int32_t r = 0; r < num_requests; ++r) batch.add(1, prefix + suffix);
  batch.shared_prefixes = {0, num_requests, prefix};
  return batch;
}

/// Gives the requests of `batch` shared prefixes: a forest of groups, in any order.
inline void share_randomly(Random& random, int32_t max_tokens, HostBatch* batch) {
  for (int32_t r = 0; r < batch->size();) {
    const int32_t count = random.between(1, batch->size() - r);
    if (!random.one_in(4)) add_random_groups(random, r, count, 0, max_tokens, batch);
    r += count;
  }
  // There may be no more than two for each request.
  const auto most = static_cast<size_t>(2 * batch->size());
  auto& rows = batch->shared_prefixes;
  if (rows.size() > 3 * most) rows.resize(3 * most);
  for (size_t i = rows.size() / 3; i > 1; --i) {
    const auto other = static_cast<size_t>(random.between(0, static_cast<int32_t>(i) - 1));
    std::swap_ranges(&rows[3 * (i - 1)], &rows[3 * (i - 1)] + 3, &rows[3 * other]);
  }
}

/// Gives each query of `batch` a range of keys: some are empty, some exceed the keys.
inline void limit_keys_randomly(Random& random, HostBatch* batch) {
  for (int32_t r = 0; r < batch->size(); ++r) {
    const int32_t kv_len = batch->kv_lens[static_cast<size_t>(r)];
    const int32_t width = random.pick({0, 20, 300, kv_len});
    for (int32_t query = 0; query < batch->qo_len(r); ++query) {
      const int32_t begin = random.between(-30, kv_len + 10);
      const int32_t end = begin + random.between(-3, width);
      batch->key_ranges.insert(batch->key_ranges.end(), {begin, end});
    }
  }
}

}  // namespace flashplan::test
