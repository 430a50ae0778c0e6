// SPDX-License-Identifier: Apache-2.0
// Rows of logits that are hard to sample from.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ops/sampling_math.h"

namespace flashplan::test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Rows {
  std::vector<std::string> names;
  std::vector<std::vector<float>> rows;
  bool are_probabilities = false;
};

/// Ties at every cut, neighbours in float32, one-hot, flat, denormal, huge, mostly -inf.
inline Rows hard_rows(int32_t vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> few(-3, 3);
  std::bernoulli_distribution half(0.5);
  std::bernoulli_distribution tenth(0.1);
  Rows all;
  const auto add = [&](const char* name, auto value) {
    std::vector<float> row(static_cast<size_t>(vocab));
    for (int32_t i = 0; i < vocab; ++i) row[static_cast<size_t>(i)] = value(i);
    all.names.emplace_back(name);
    all.rows.push_back(std::move(row));
  };
  add("normal", [&](int) { return 2 * normal(random); });
  add("peaked", [&](int) { return 8 * normal(random); });
  add("narrow", [&](int) { return 100.0F + 0.01F * normal(random); });
  add("ties", [&](int) { return std::round(normal(random)); });
  add("halves", [&](int) { return std::round(normal(random) * 16) / 16; });
  add("neighbours", [&](int) { return 1.5F + 0x1p-23F * static_cast<float>(few(random)); });
  add("one-hot", [&](int i) { return i == vocab / 3 ? -5.0F : -kInfinity; });
  add("flat", [&](int) { return 0.0F; });
  add("zeros", [&](int) { return half(random) ? 0.0F : -0.0F; });
  add("two zeros", [&](int i) { return i % 97 == 5 ? (i % 2 ? 0.0F : -0.0F) : -1.0F; });
  add("denormal", [&](int) { return 1e-42F * normal(random); });
  add("few", [&](int i) { return i == vocab / 2 || tenth(random) ? normal(random) : -kInfinity; });
  add("falling",
      [&](int i) { return 5.0F - 20.0F * static_cast<float>(i) / static_cast<float>(vocab); });
  add("rising",
      [&](int i) { return -40.0F + 40.0F * static_cast<float>(i) / static_cast<float>(vocab); });
  add("huge", [&](int) { return 1e30F * normal(random); });
  add("second half", [&](int i) { return i < vocab / 2 ? -kInfinity : normal(random); });
  add("all -inf", [&](int) { return -kInfinity; });
  add("NaN", [&](int i) { return i == vocab - 1 ? -std::nanf("") : normal(random); });
  add("+inf", [&](int i) { return i == vocab / 7 ? kInfinity : normal(random); });
  return all;
}

/// Blocks of very different sizes, some of them -inf, and what is no distribution.
inline Rows block_rows(int32_t vocab, uint32_t seed) {
  Rows all = hard_rows(vocab, seed);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto add = [&](const char* name, auto value_of_block) {
    std::vector<float> row;
    for (int32_t i = 0; i < vocab; ++i) {
      row.push_back(value_of_block(i / sampling::kBlock) + normal(random));
    }
    all.names.emplace_back(name);
    all.rows.push_back(std::move(row));
  };
  add("blocks rise", [](int b) { return 0.25F * static_cast<float>(b); });
  add("blocks differ", [](int b) { return static_cast<float>(b * 7 % 31); });
  add("every second block is -inf", [](int b) { return b % 2 == 0 ? 0.0F : -kInfinity; });
  add("the last block", [&](int b) { return b == (vocab - 1) / sampling::kBlock ? 60.0F : 0.0F; });
  return all;
}

}  // namespace flashplan::test
