// SPDX-License-Identifier: Apache-2.0
// Time of Plan::plan() for batches of decodes and prompts. Usage: bench_plan [--json FILE]
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "flashplan/flashplan.h"

namespace {

struct HostBatch {
  std::vector<int32_t> qo_indptr = {0};
  std::vector<int32_t> kv_lens;
};

/// One request in eight is a prompt, or a part of one; the others decode.
HostBatch mixed_batch(int32_t num_requests, uint32_t seed) {
  std::mt19937 engine(seed);
  const auto between = [&](uint32_t low, uint32_t high) {
    return static_cast<int32_t>(low + engine() % (high - low + 1));
  };
  HostBatch batch;
  for (int32_t r = 0; r < num_requests; ++r) {
    const bool prompt = r % 8 == 0;
    const int32_t qo_len = prompt ? between(2, 512) : 1;
    const int32_t kv_len = prompt ? qo_len + between(0, 1024) : between(128, 8192);
    batch.qo_indptr.push_back(batch.qo_indptr.back() + qo_len);
    batch.kv_lens.push_back(kv_len);
  }
  return batch;
}

struct Result {
  int32_t num_requests;
  int32_t num_work_tiles;
  double median_us;
  double p99_us;
};

bool measure(int32_t num_requests, Result* result) {
  flashplan::AttentionOptions options;
  options.num_qo_heads = 32;
  options.num_kv_heads = 8;
  options.head_dim_qk = options.head_dim_vo = 128;
  options.page_size = 16;
  options.max_batch_size = num_requests;
  options.num_ctas = 132;

  // Lengths differ from step to step: repeating one batch would train the branch predictor on it.
  constexpr int kBatches = 32;
  constexpr int kRounds = 100;
  std::vector<HostBatch> batches;
  for (uint32_t seed = 0; seed < kBatches; ++seed) {
    batches.push_back(mixed_batch(num_requests, seed));
    options.max_qo_tokens = std::max(options.max_qo_tokens, batches.back().qo_indptr.back());
  }
  flashplan::Plan plan;
  if (!flashplan::Plan::create(options, &plan).ok()) return false;

  std::vector<double> microseconds;
  for (int i = 0; i < kBatches * kRounds; ++i) {
    const HostBatch& b = batches[static_cast<size_t>(i % kBatches)];
    const flashplan::Batch batch = {b.qo_indptr.data(), b.kv_lens.data(), nullptr, num_requests};
    const auto begin = std::chrono::steady_clock::now();
    const flashplan::Status status = plan.plan(batch);
    const auto end = std::chrono::steady_clock::now();
    if (!status.ok()) return false;
    const bool warm_up = i < kBatches;
    if (!warm_up) {
      microseconds.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    }
  }
  std::sort(microseconds.begin(), microseconds.end());
  const flashplan::ScheduleView schedule = plan.schedule();
  *result = {num_requests, schedule.cta_indptr[schedule.num_ctas],
             microseconds[microseconds.size() / 2], microseconds[microseconds.size() * 99 / 100]};
  return true;
}

bool write_json(const char* path, const std::vector<Result>& results) {
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return false;
  std::fprintf(file, "{\"benchmark\": \"plan\", \"num_ctas\": 132, \"results\": [");
  for (size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    std::fprintf(file,
                 "%s\n  {\"num_requests\": %d, \"num_work_tiles\": %d, \"median_us\": %.2f, "
                 "\"p99_us\": %.2f}",
                 i == 0 ? "" : ",", r.num_requests, r.num_work_tiles, r.median_us, r.p99_us);
  }
  std::fprintf(file, "\n]}\n");
  return std::fclose(file) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 1 && !(argc == 3 && std::strcmp(argv[1], "--json") == 0)) {
    std::fprintf(stderr, "usage: %s [--json FILE]\n", argv[0]);
    return 2;
  }
  std::vector<Result> results;
  std::printf("plan(): 7/8 decodes, 1/8 prompts, 32/8 heads, page 16, 132 CTAs\n");
  std::printf("%8s %10s %10s %10s %12s\n", "requests", "tiles", "median us", "p99 us",
              "ns/request");
  for (const int32_t num_requests : {256, 512, 1024, 2048, 4096}) {
    Result r;
    if (!measure(num_requests, &r)) {
      std::fprintf(stderr, "plan() of %d requests failed\n", num_requests);
      return 1;
    }
    std::printf("%8d %10d %10.2f %10.2f %12.1f\n", r.num_requests, r.num_work_tiles, r.median_us,
                r.p99_us, 1000 * r.median_us / r.num_requests);
    results.push_back(r);
  }
  if (argc == 3 && !write_json(argv[2], results)) {
    std::perror(argv[2]);
    return 1;
  }
  return 0;
}
