// SPDX-License-Identifier: Apache-2.0
// The CUDA kernel of speculative_verify(), run by an emulator of clusters: tokens, numbers of
// accepted drafts, nodes and errors must be the CPU's.
#include "cuda_builtins.h"
#include "dynamic_memory.h"
#include "flashplan/speculative.h"
#include "ops/cpu/kernels.h"
#include "ops/operators.h"
// The library defines this function, too, so the emulated one gets another name.
#define speculative_verify emulated_verify
#include "ops/cuda/sample/speculative_verify.cu"
#undef speculative_verify

#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace flashplan::test {
namespace {

using cpu::VerifyResult;

constexpr int32_t kRequests = 12;
constexpr int32_t kDrafts = 5;
constexpr int32_t kTree[kDrafts] = {-1, -1, 0, 0, 1};

/// Rows of probabilities, the ids that were drafted from them, and what comes out.
struct Problem {
  std::vector<char> draft_probs, target_probs;
  std::vector<int32_t> tokens, out, num_accepted, nodes, status;
  VerifyParams params;
};

void append_row(std::vector<char>& rows, const std::vector<double>& weights, DType dtype) {
  double sum = 0;
  for (const double weight : weights) sum += weight;
  for (const double weight : weights) {
    const auto value = static_cast<float>(weight / sum);
    const uint16_t bits = dtype == DType::kFloat16
                              ? std::bit_cast<uint16_t>(static_cast<_Float16>(value))
                              : __float2bfloat16_rn(value).bits;
    const char* from = dtype == DType::kFloat32 ? reinterpret_cast<const char*>(&value)
                                                : reinterpret_cast<const char*>(&bits);
    rows.insert(rows.end(), from, from + item_size(dtype));
  }
}

/// Targets are peaked, and drafts near them, so that some are accepted.
Problem random_problem(uint32_t seed, int32_t vocab, DType dtype, bool has_tree) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Problem problem;
  std::vector<double> weights(static_cast<size_t>(vocab));
  const auto draw_weights = [&] {
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i] = std::exp(normal(random) + (i % 1000 == 7 ? 7.0 : 0.0));
    }
  };
  for (int32_t r = 0; r < kRequests; ++r) {
    for (int32_t i = 0; i <= kDrafts; ++i) {
      draw_weights();
      if (r == 3 && i == 0) weights.assign(weights.size(), NAN);
      append_row(problem.target_probs, weights, dtype);
      if (i == kDrafts) break;
      draw_weights();
      append_row(problem.draft_probs, weights, dtype);
      std::discrete_distribution<int32_t> drawn(weights.begin(), weights.end());
      problem.tokens.push_back(r == 4 && i == 2 ? -1 : drawn(random));
    }
  }
  problem.tokens[5 * kDrafts + 1] = vocab;
  // Row 6 of the drafts' probabilities sums to 0.
  const auto row_bytes = static_cast<size_t>(vocab * item_size(dtype));
  std::fill_n(problem.draft_probs.begin() + static_cast<int64_t>(6 * kDrafts * row_bytes),
              row_bytes, char{0});
  problem.out.assign(kRequests * (kDrafts + 1), -7);
  problem.nodes.assign(kRequests * kDrafts, -7);
  problem.num_accepted.assign(kRequests, -7);
  problem.status.assign(kRequests, -7);
  VerifyParams& p = problem.params;
  p.tokens = problem.tokens.data();
  p.token_stride = kDrafts;
  p.parents = has_tree ? kTree : nullptr;
  p.draft_probs = problem.draft_probs.data();
  p.draft_row_stride = static_cast<int64_t>(row_bytes);
  p.draft_request_stride = kDrafts * p.draft_row_stride;
  p.target_probs = problem.target_probs.data();
  p.target_row_stride = static_cast<int64_t>(row_bytes);
  p.target_request_stride = (kDrafts + 1) * p.target_row_stride;
  p.dtype = dtype;
  p.num_rows = kRequests;
  p.num_drafts = kDrafts;
  p.vocab = vocab;
  p.seed.all = seed;
  p.out = problem.out.data();
  p.out_stride = kDrafts + 1;
  p.num_accepted = problem.num_accepted.data();
  p.nodes = problem.nodes.data();
  p.node_stride = kDrafts;
  p.status = problem.status.data();
  return problem;
}

/// Verifies by both engines, and returns how many drafts were accepted.
int32_t compare(const Problem& problem, const std::string& name) {
  const VerifyParams& p = problem.params;
  CHECK(cuda::emulated_verify(p, Device{DeviceType::kCuda, 0}, nullptr).ok());
  int32_t all_accepted = 0;
  for (int32_t r = 0; r < kRequests; ++r) {
    int32_t nodes[kDrafts];
    VerifyResult wanted;
    for (int32_t i = 0; i < kDrafts; ++i) {
      if (p.is_wrong(r, i)) wanted.error = SampleError::kDraft;
    }
    if (wanted.error == SampleError::kNone) {
      wanted = cpu::baseline::verify_row(p, r, static_cast<int32_t*>(nodes));
    }
    const bool is_right = wanted.error == SampleError::kNone;
    const int32_t accepted = is_right ? wanted.num_accepted : 0;
    const auto row = static_cast<size_t>(r);
    bool same = problem.status[row] == static_cast<int32_t>(wanted.error) &&
                problem.num_accepted[row] == accepted;
    for (int32_t i = 0; i <= kDrafts; ++i) {
      int32_t token = -1;
      if (i < accepted) token = static_cast<int32_t>(p.token(r, nodes[i]));
      if (i == accepted && is_right) token = wanted.token;
      same = same && p.out[r * p.out_stride + i] == token;
      if (i < kDrafts) {
        same = same && p.nodes[r * p.node_stride + i] == (i < accepted ? nodes[i] : -1);
      }
    }
    all_accepted += accepted;
    if (same) continue;
    check::fail(__FILE__, __LINE__,
                name + ", request " + std::to_string(r) + ": status " +
                    std::to_string(problem.status[row]) + ", " +
                    std::to_string(problem.num_accepted[row]) + " accepted, not status " +
                    std::to_string(static_cast<int>(wanted.error)) + ", " +
                    std::to_string(accepted));
  }
  return all_accepted;
}

TEST(requests) {
  int32_t accepted = 0;
  for (const int32_t vocab : {7, 1003, 9001, 40'008}) {
    for (const bool has_tree : {false, true}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        const std::string name = "vocabulary " + std::to_string(vocab) + ", dtype " +
                                 std::to_string(static_cast<int>(dtype));
        const auto seed = static_cast<uint32_t>(vocab) + (has_tree ? 100U : 0U);
        accepted += compare(random_problem(seed, vocab, dtype, has_tree), name);
      }
    }
  }
  CHECK(accepted > 20);
}

/// Each of many rows gets as few CTAs as can hold it: two and sixteen.
TEST(many_rows_of_clusters) {
  cuda::emulated_facts.num_sms = 5;
  for (const int32_t vocab : {40'008, 200'008}) {
    compare(random_problem(3, vocab, DType::kFloat32, false), std::to_string(vocab) + " elements");
  }
  cuda::emulated_facts.num_sms = 132;
}

TEST(drafts_that_were_looked_up) {
  int32_t accepted = 0;
  for (const int32_t vocab : {7, 9001}) {
    for (const bool has_tree : {false, true}) {
      Problem problem = random_problem(1, vocab, DType::kFloat32, has_tree);
      problem.params.draft_probs = nullptr;
      accepted += compare(problem, "looked up, vocabulary " + std::to_string(vocab));
    }
  }
  CHECK(accepted > 0);
}

/// A GPU below compute capability 9.0 has no clusters: one CTA processes a row, and reads it
/// several times because its shared memory does not hold it.
TEST(rows_that_are_not_held) {
  cuda::emulated_facts.major = 8;
  for (const bool has_tree : {false, true}) {
    Problem problem = random_problem(3, 20'003, DType::kFloat32, has_tree);
    compare(problem, "not held");
    problem.params.draft_probs = nullptr;
    compare(problem, "not held, looked up");
  }
  cuda::emulated_facts.major = 9;
}

}  // namespace
}  // namespace flashplan::test
