// SPDX-License-Identifier: Apache-2.0
// Time of Plan::plan() for batches of decodes and prompts, and of the scheduler alone with the
// tiles and costs of a GPU. Usage: bench_plan [--json FILE]
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "flashplan/flashplan.h"
#include "kernels/families.h"
#include "plan/kernel/select_kernel.h"
#include "plan/schedule/schedule.h"
#include "plan/workspace_layout.h"

namespace {

struct HostBatch {
  std::vector<int32_t> qo_indptr = {0};
  std::vector<int32_t> kv_lens;
  std::vector<int32_t> shared_prefixes;  // rows of three

  flashplan::Batch view() const {
    return {qo_indptr.data(),
            kv_lens.data(),
            nullptr,
            static_cast<int32_t>(kv_lens.size()),
            shared_prefixes.data(),
            static_cast<int32_t>(shared_prefixes.size() / 3)};
  }
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

HostBatch decodes(int32_t num_requests, uint32_t seed) {
  std::mt19937 engine(seed);
  HostBatch batch;
  for (int32_t r = 0; r < num_requests; ++r) {
    batch.qo_indptr.push_back(r + 1);
    batch.kv_lens.push_back(static_cast<int32_t>(128 + engine() % 8065));
  }
  return batch;
}

/// Decodes below a system prompt, eight sets of examples and 32 conversations.
HostBatch tree(int32_t num_requests, uint32_t seed) {
  constexpr int32_t kTokens[] = {1024, 2048, 3072};
  constexpr int32_t kBranches[] = {1, 8, 32};
  HostBatch batch = decodes(num_requests, seed);
  for (int32_t& kv_len : batch.kv_lens) kv_len += kTokens[2];
  for (int level = 0; level < 3; ++level) {
    const int32_t count = num_requests / kBranches[level];
    for (int32_t r = 0; r + count <= num_requests; r += count) {
      batch.shared_prefixes.insert(batch.shared_prefixes.end(), {r, count, kTokens[level]});
    }
  }
  return batch;
}

HostBatch prompts(int32_t num_requests, uint32_t /*seed*/) {
  HostBatch batch;
  for (int32_t r = 0; r < num_requests; ++r) {
    batch.qo_indptr.push_back((r + 1) * 4096);
    batch.kv_lens.push_back(4096);
  }
  return batch;
}

// Lengths differ from step to step: repeating one batch would train the branch predictor on it.
constexpr uint32_t kBatches = 32;
constexpr int kRounds = 100;

struct Result {
  int32_t num_requests;
  int32_t num_work_tiles;
  double median_us;
  double p99_us;
};

/// Times plan(batch), which returns the number of work tiles or -1, over all batches in turn.
template <class PlanBatch>
bool measure(const std::vector<HostBatch>& batches, PlanBatch plan, Result* result) {
  std::vector<double> microseconds;
  result->num_requests = static_cast<int32_t>(batches[0].kv_lens.size());
  for (int i = 0; i < kRounds; ++i) {
    for (const HostBatch& b : batches) {
      const flashplan::Batch batch = b.view();
      const auto begin = std::chrono::steady_clock::now();
      result->num_work_tiles = plan(batch);
      const auto end = std::chrono::steady_clock::now();
      if (result->num_work_tiles < 0) return false;
      const bool warm_up = i == 0;
      if (!warm_up) {
        microseconds.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
      }
    }
  }
  std::sort(microseconds.begin(), microseconds.end());
  result->median_us = microseconds[microseconds.size() / 2];
  result->p99_us = microseconds[microseconds.size() * 99 / 100];
  return true;
}

flashplan::AttentionOptions llama(const std::vector<HostBatch>& batches) {
  flashplan::AttentionOptions options;
  options.num_qo_heads = 32;
  options.num_kv_heads = 8;
  options.head_dim_qk = options.head_dim_vo = 128;
  options.page_size = 16;
  options.max_batch_size = static_cast<int32_t>(batches[0].kv_lens.size());
  for (const HostBatch& b : batches) {
    options.max_qo_tokens = std::max(options.max_qo_tokens, b.qo_indptr.back());
  }
  return options;
}

bool measure_plan(const std::vector<HostBatch>& batches, Result* result) {
  flashplan::AttentionOptions options = llama(batches);
  options.num_ctas = 132;
  flashplan::Plan plan;
  if (!flashplan::Plan::create(options, &plan).ok()) return false;
  const auto plan_batch = [&](const flashplan::Batch& batch) {
    if (!plan.plan(batch).ok()) return -1;
    const flashplan::ScheduleView schedule = plan.schedule();
    return schedule.cta_indptr[schedule.num_ctas];
  };
  return measure(batches, plan_batch, result);
}

/// As on a GPU of 132 SMs, without the copy to it: none is needed here.
bool measure_gpu_schedule(const std::vector<HostBatch>& batches, Result* result) {
  using namespace flashplan;
  AttentionOptions options = llama(batches);
  options.device = {DeviceType::kCuda, 0};
  Kernel kernel;
  kernel.family = &kSm80Family;
  kernel.architecture = {90};
  kernel.q_dtype = options.q_dtype;
  kernel.kv_dtype = options.kv_dtype;
  kernel.head_dim_qk = kernel.head_dim_vo = 128;
  kernel.geometry = {.tile_q = 128, .tile_kv = 64, .queues_per_processor = 2};
  kernel.tuning = sm80_tuning(kernel.geometry.tile_kv);
  DeviceLimits device;
  device.kernels = {&kernel, 1};
  device.num_processors = 132;
  device.num_gpus = 1;
  device.major = 9;
  KernelChoices choices;
  if (!select_kernel(options, device, &choices).ok()) return false;
  const KernelChoice& choice = choices.first;
  const WorkspaceLayout layout = layout_workspace(options, choice, std::nullopt);
  const ScheduleShape shape = schedule_shape(options, choice, layout);
  const ScheduleBounds bounds =
      schedule_bounds(shape, options.max_batch_size, options.max_qo_tokens);
  Scheduler scheduler;
  scheduler.reserve(shape, bounds);
  ScheduleBuffers buffers(bounds);
  PrefixGroups groups;
  groups.reserve(options.max_batch_size);
  const auto plan_batch = [&](const Batch& batch) {
    if (!groups.read(batch).ok()) return -1;
    scheduler.make(batch, groups.in_order(), buffers.memory());
    return static_cast<int32_t>(scheduler.schedule().tiles.size());
  };
  return measure(batches, plan_batch, result);
}

/// Requests of 512 pages of which all share 256.
bool measure_find(const std::vector<HostBatch>& batches, Result* result) {
  constexpr int32_t kPages = 512;
  const auto num_requests = static_cast<int32_t>(batches[0].kv_lens.size());
  std::vector<int32_t> table;
  for (int32_t r = 0; r < num_requests; ++r) {
    for (int32_t p = 0; p < kPages; ++p) table.push_back(p < kPages / 2 ? p : r * kPages + p);
  }
  flashplan::HostPageTable pages;
  pages.block_table.data = table.data();
  pages.block_table.dtype = flashplan::DType::kInt32;
  pages.block_table.rank = 2;
  pages.block_table.shape[0] = num_requests;
  pages.block_table.shape[1] = pages.block_table.stride[0] = kPages;
  pages.block_table.stride[1] = 1;
  std::vector<int32_t> groups(3 * static_cast<size_t>(num_requests));
  const auto find = [&](const flashplan::Batch& batch) {
    int32_t count = 0;
    const auto status = flashplan::find_shared_prefixes(batch, 16, pages, groups.data(), &count);
    return status.ok() ? count : -1;
  };
  return measure(batches, find, result);
}

/// Decodes of 512 pages of 16 tokens.
HostBatch full_pages(int32_t num_requests, uint32_t /*seed*/) {
  HostBatch batch;
  for (int32_t r = 0; r < num_requests; ++r) {
    batch.qo_indptr.push_back(r + 1);
    batch.kv_lens.push_back(512 * 16);
  }
  return batch;
}

template <class MakeBatch>
std::vector<HostBatch> make_batches(MakeBatch make, int32_t num_requests) {
  std::vector<HostBatch> batches;
  for (uint32_t seed = 0; seed < kBatches; ++seed) batches.push_back(make(num_requests, seed));
  return batches;
}

void print(const char* name, const Result& r) {
  std::printf("%-8s %8d %10d %10.2f %10.2f %12.1f\n", name, r.num_requests, r.num_work_tiles,
              r.median_us, r.p99_us, 1000 * r.median_us / r.num_requests);
}

struct GpuResult {
  const char* name;
  Result result;
};

bool write_json(const char* path, const std::vector<Result>& results,
                const std::vector<GpuResult>& gpu_results) {
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return false;
  const auto write = [file](const Result& r) {
    std::fprintf(file,
                 "\"num_requests\": %d, \"num_work_tiles\": %d, \"median_us\": %.2f, "
                 "\"p99_us\": %.2f}",
                 r.num_requests, r.num_work_tiles, r.median_us, r.p99_us);
  };
  std::fprintf(file, "{\"benchmark\": \"plan\", \"num_ctas\": 132, \"results\": [");
  const char* separator = "\n  {";
  for (const Result& r : results) {
    std::fprintf(file, "%s", std::exchange(separator, ",\n  {"));
    write(r);
  }
  std::fprintf(file, "\n], \"gpu_num_ctas\": 264, \"gpu_results\": [");
  separator = "\n  {";
  for (const GpuResult& r : gpu_results) {
    std::fprintf(file, "%s\"batch\": \"%s\", ", std::exchange(separator, ",\n  {"), r.name);
    write(r.result);
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
  std::printf("%-8s %8s %10s %10s %10s %12s\n", "", "requests", "tiles", "median us", "p99 us",
              "ns/request");
  for (const int32_t num_requests : {256, 512, 1024, 2048, 4096}) {
    Result r;
    if (!measure_plan(make_batches(mixed_batch, num_requests), &r)) {
      std::fprintf(stderr, "plan() of %d requests failed\n", num_requests);
      return 1;
    }
    print("mixed", r);
    results.push_back(r);
  }

  std::vector<GpuResult> gpu_results;
  std::printf("schedule for a GPU: 264 CTAs\n");
  const auto measure_on_gpu = [&](const char* name, auto make, int32_t num_requests) {
    GpuResult r = {name, {}};
    if (!measure_gpu_schedule(make_batches(make, num_requests), &r.result)) return false;
    print(name, r.result);
    gpu_results.push_back(r);
    return true;
  };
  if (!measure_on_gpu("mixed", mixed_batch, 256) || !measure_on_gpu("decodes", decodes, 256) ||
      !measure_on_gpu("tree", tree, 256) || !measure_on_gpu("prompts", prompts, 16)) {
    std::fprintf(stderr, "no kernel for the GPU\n");
    return 1;
  }
  Result found;
  if (!measure_find(make_batches(full_pages, 256), &found)) {
    std::fprintf(stderr, "find_shared_prefixes() failed\n");
    return 1;
  }
  std::printf("find_shared_prefixes(): 256 requests of 512 pages that share 256\n");
  print("find", found);
  if (argc == 3 && !write_json(argv[2], results, gpu_results)) {
    std::perror(argv[2]);
    return 1;
  }
  return 0;
}
