// SPDX-License-Identifier: Apache-2.0
// libFuzzer target. Any lengths must give a Status that agrees with the header's rules, and every
// schedule must keep its invariants and come near the slow planner's makespan.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "flashplan/plan.h"
#include "owning_scheduler.h"
#include "plan/schedule/schedule.h"
#include "random_batch.h"
#include "run_schedule.h"
#include "schedule_invariants.h"
#include "slow_planner.h"

namespace flashplan::test {
namespace {

constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_plan: %s\n", what.c_str());
  std::abort();
}

/// A number, mostly a small one.
int32_t any_length(FuzzedDataProvider& in, int32_t small) {
  return in.ConsumeIntegral<uint8_t>() < 250 ? in.ConsumeIntegralInRange<int32_t>(0, small)
                                             : in.ConsumeIntegral<int32_t>();
}

struct Lengths {
  std::vector<int32_t> qo_indptr, kv_lens, kv_indptr, shared_prefixes, mask_begin, key_ranges;

  Batch view() const {
    return {qo_indptr.data(),
            kv_lens.data(),
            kv_indptr.empty() ? nullptr : kv_indptr.data(),
            static_cast<int32_t>(kv_lens.size()),
            shared_prefixes.data(),
            static_cast<int32_t>(shared_prefixes.size() / 3),
            mask_begin.empty() ? nullptr : mask_begin.data(),
            key_ranges.empty() ? nullptr : key_ranges.data()};
  }
  /// Whether the lengths are valid, and so small that others may be added to them.
  bool are_small() const {
    const auto fits = [](int32_t length) { return length >= 0 && length < 100000; };
    return std::is_sorted(qo_indptr.begin(), qo_indptr.end()) && qo_indptr.front() == 0 &&
           fits(qo_indptr.back()) && std::all_of(kv_lens.begin(), kv_lens.end(), fits);
  }
  HostBatch host_batch() const {
    HostBatch batch;
    batch.qo_indptr = qo_indptr;
    batch.kv_lens = kv_lens;
    return batch;
  }
};

/// Any rows, or a valid forest of prefixes.
void add_prefixes(FuzzedDataProvider& in, Lengths& lengths) {
  const auto size = static_cast<int32_t>(lengths.kv_lens.size());
  if (lengths.are_small() && size > 0 && lengths.kv_indptr.empty() && in.ConsumeBool()) {
    HostBatch batch = lengths.host_batch();
    Random random(in.ConsumeIntegral<uint32_t>());
    share_randomly(random, in.PickValueInArray({10, 300, 5000}), &batch);
    lengths.kv_lens = batch.kv_lens;
    lengths.shared_prefixes = batch.shared_prefixes;
    return;
  }
  for (int32_t count = in.ConsumeIntegralInRange<int32_t>(0, 5); count > 0; --count) {
    for (int column = 0; column < 3; ++column) {
      lengths.shared_prefixes.push_back(any_length(in, std::max(size, 1)));
    }
  }
}

Lengths any_lengths(FuzzedDataProvider& in) {
  Lengths lengths;
  const auto wrapping_add = [](int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  };
  const int32_t size = in.ConsumeIntegralInRange<int32_t>(0, 40);
  const int32_t max_qo_len = in.PickValueInArray({1, 8, 100});
  const int32_t max_kv_len = in.PickValueInArray({10, 300, 10000, kMaxInt});
  const bool has_kv_indptr = in.ConsumeBool();
  lengths.qo_indptr = {any_length(in, 0)};
  if (has_kv_indptr) lengths.kv_indptr = {any_length(in, 5)};
  for (int32_t r = 0; r < size; ++r) {
    lengths.qo_indptr.push_back(wrapping_add(lengths.qo_indptr.back(), any_length(in, max_qo_len)));
    lengths.kv_lens.push_back(any_length(in, max_kv_len));
    if (!has_kv_indptr) continue;
    const int32_t gap = any_length(in, 3);
    lengths.kv_indptr.push_back(
        wrapping_add(lengths.kv_indptr.back(), wrapping_add(lengths.kv_lens.back(), gap)));
  }
  if (in.ConsumeBool()) add_prefixes(in, lengths);
  return lengths;
}

/// Lets the masks of the requests begin anywhere, or at the first of some drafts.
void add_masks(FuzzedDataProvider& in, Lengths& lengths) {
  const int32_t num_drafts = in.ConsumeIntegralInRange<int32_t>(0, 64);
  const bool begins_at_drafts = in.ConsumeBool();
  for (const int32_t kv_len : lengths.kv_lens) {
    const int32_t begin = begins_at_drafts ? std::max(kv_len, num_drafts) - num_drafts
                                           : any_length(in, std::max(kv_len, 0));
    lengths.mask_begin.push_back(begin);
  }
}

/// The rules of plan.h for the shared prefixes of an otherwise valid batch, checked pair by pair.
bool has_valid_prefixes(const AttentionOptions& options, const Lengths& l) {
  const auto size = static_cast<int64_t>(l.kv_lens.size());
  const auto& rows = l.shared_prefixes;
  if (static_cast<int64_t>(rows.size()) > 6 * int64_t{options.max_batch_size}) return false;
  for (size_t i = 0; i < rows.size(); i += 3) {
    const int64_t begin = rows[i];
    const int64_t end = begin + rows[i + 1];
    if (begin < 0 || end <= begin || end > size || rows[i + 2] < 0) return false;
    for (auto r = static_cast<size_t>(begin); r < static_cast<size_t>(end); ++r) {
      const int64_t most = int64_t{l.kv_lens[r]} - (l.qo_indptr[r + 1] - l.qo_indptr[r]);
      if (rows[i + 2] > std::max<int64_t>(most, 0)) return false;
    }
    for (size_t j = 0; j < i; j += 3) {
      const int64_t other = rows[j];
      const int64_t other_end = other + rows[j + 1];
      const bool apart = end <= other || other_end <= begin;
      const bool inside =
          (other <= begin && end <= other_end) || (begin <= other && other_end <= end);
      if (!apart && !inside) return false;
    }
  }
  return true;
}

/// The rules of plan.h.
bool is_valid(const AttentionOptions& options, const Lengths& l) {
  const size_t size = l.kv_lens.size();
  int64_t num_keys = 0;
  if (static_cast<int64_t>(size) > options.max_batch_size || l.qo_indptr[0] != 0) return false;
  for (size_t r = 0; r < size; ++r) {
    if (l.qo_indptr[r + 1] < l.qo_indptr[r] || l.kv_lens[r] < 0) return false;
    num_keys += l.kv_lens[r];
  }
  if (l.qo_indptr.back() > options.max_qo_tokens) return false;
  if (!has_valid_prefixes(options, l)) return false;
  if (!l.mask_begin.empty()) {
    const bool is_below_0 = *std::min_element(l.mask_begin.begin(), l.mask_begin.end()) < 0;
    if (!options.custom_mask || is_below_0) return false;
  }
  if (options.page_size > 0) return l.kv_indptr.empty();
  if (l.kv_indptr.empty()) return num_keys <= kMaxInt;
  for (size_t r = 0; r < size; ++r) {
    if (int64_t{l.kv_indptr[r + 1]} - l.kv_indptr[r] < l.kv_lens[r]) return false;
  }
  return l.kv_indptr[0] >= 0;
}

AttentionOptions any_options(FuzzedDataProvider& in) {
  AttentionOptions o;
  o.num_kv_heads = in.ConsumeIntegralInRange<int32_t>(1, 8);
  o.num_qo_heads = o.num_kv_heads * in.ConsumeIntegralInRange<int32_t>(1, 9);
  o.head_dim_qk = in.PickValueInArray({1, 64, 128});
  o.head_dim_vo = in.PickValueInArray({1, 64, 128});
  o.page_size = in.PickValueInArray({0, 1, 16, kMaxInt});
  o.causal = in.ConsumeBool();
  o.window_left = in.ConsumeBool() ? any_length(in, 500) : -1;
  o.max_batch_size = any_length(in, 40);
  o.max_qo_tokens = in.ConsumeIntegralInRange<int32_t>(0, 500);
  o.num_ctas = in.ConsumeIntegralInRange<int32_t>(0, 264);
  o.batch_invariant = in.ConsumeBool();
  if (in.ConsumeBool()) o.workspace_bytes = in.ConsumeIntegralInRange<size_t>(0, 1 << 26);
  // A length that select_kernel allows may still be more memory than a fuzzer has.
  if (o.max_batch_size > 1000 && o.max_batch_size <= 1 << 20) o.max_batch_size = 1000;
  o.custom_mask = in.ConsumeBool();
  return o;
}

/// The keys that a mask may hide must be in work tiles of the request itself: those of a shared
/// prefix read no mask. Returns the first key that is not, or an empty text.
std::string key_without_mask(const ScheduleView& schedule, const AttentionOptions& options,
                             const Lengths& lengths) {
  ScheduleShape shape;
  shape.group_size = options.num_qo_heads / options.num_kv_heads;
  shape.mask = {options.causal, options.window_left};
  shape.tile_q = schedule.tile_q;
  shape.tile_kv = schedule.tile_kv;
  std::map<std::tuple<int32_t, int32_t, int32_t>, std::vector<std::pair<int32_t, int32_t>>> own;
  for (int32_t i = 0; i < schedule.cta_indptr[schedule.num_ctas]; ++i) {
    const WorkTile& tile = schedule.tiles[i];
    for (int32_t head = tile.kv_head; head < tile.kv_head + tile.num_kv_heads; ++head) {
      own[{tile.segment, tile.row_tile, head}].emplace_back(tile.kv_begin, tile.kv_end);
    }
  }
  for (const SlowRowTile& want : slow_row_tiles(shape, lengths.view())) {
    const auto r = static_cast<size_t>(want.request);
    const int64_t first_query =
        int64_t{lengths.kv_lens[r]} - (lengths.qo_indptr[r + 1] - lengths.qo_indptr[r]);
    const int64_t mask_begin = lengths.mask_begin.empty() ? first_query : lengths.mask_begin[r];
    for (int32_t head = 0; head < options.num_kv_heads; ++head) {
      auto& spans = own[{want.request, want.row_tile, head}];
      std::sort(spans.begin(), spans.end());
      int64_t key = std::max(want.kv_begin, mask_begin);
      for (const auto& [begin, end] : spans) {
        if (begin <= key) key = std::max<int64_t>(key, end);
      }
      if (key < want.kv_end) {
        return "key " + std::to_string(key) + " of request " + std::to_string(want.request) +
               " is computed without the mask";
      }
    }
  }
  return "";
}

void plan_anything(FuzzedDataProvider& in) {
  const AttentionOptions options = any_options(in);
  Plan plan;
  const Status created = Plan::create(options, &plan);
  require(created.ok() == (created.message[0] == '\0'), "a refusal says why");
  if (!created.ok()) return;
  for (int i = 0; i < 2; ++i) {
    Lengths lengths = any_lengths(in);
    const bool mostly = in.ConsumeIntegral<uint8_t>() < 250;  // where masks are allowed
    if (options.custom_mask == mostly && in.ConsumeBool()) add_masks(in, lengths);
    const Status status = plan.plan(lengths.view());
    require(status.ok() == is_valid(options, lengths),
            std::string("plan() and the rules disagree: ") + status.message);
    require(status.ok() == (status.message[0] == '\0'), "a refusal says why");
    require(!plan.describe().empty(), "describe() is empty");
    plan.timeline_svg();
    if (!status.ok() || !options.custom_mask) continue;
    const std::string violation = key_without_mask(plan.schedule(), options, lengths);
    require(violation.empty(), violation);
  }
}

/// Trees of drafts behind shared prefixes, with masks that begin at the tree or inside of a prefix.
void mask_trees(FuzzedDataProvider& in) {
  AttentionOptions options;
  options.num_kv_heads = in.PickValueInArray({1, 2, 8});
  options.num_qo_heads = options.num_kv_heads * in.PickValueInArray({1, 4, 5});
  options.head_dim_qk = options.head_dim_vo = 64;
  options.page_size = in.PickValueInArray({1, 16});
  options.causal = in.ConsumeBool();
  options.window_left = in.ConsumeIntegralInRange<uint8_t>(0, 9) == 0 ? 500 : -1;
  options.num_ctas = in.ConsumeIntegralInRange<int32_t>(1, 264);
  options.custom_mask = true;
  options.max_batch_size = 40;
  Random random(in.ConsumeIntegral<uint32_t>());
  HostBatch batch;
  for (int32_t size = random.between(1, options.max_batch_size); size > 0; --size) {
    const int32_t num_nodes = random.pick({1, 8, 64});
    batch.add(num_nodes, num_nodes + random.between(0, random.pick({0, 100, 2000})));
  }
  options.max_qo_tokens = batch.qo_tokens();
  share_randomly(random, random.pick({300, 5000}), &batch);
  Lengths lengths;
  lengths.qo_indptr = batch.qo_indptr;
  lengths.kv_lens = batch.kv_lens;
  lengths.shared_prefixes = batch.shared_prefixes;
  const int32_t percent_inside = random.pick({0, 5, 100});
  const bool is_default = random.one_in(4);
  for (int32_t r = 0; !is_default && r < batch.size(); ++r) {
    const int32_t begin = batch.kv_lens[static_cast<size_t>(r)] - batch.qo_len(r);
    const bool is_inside = random.between(1, 100) <= percent_inside;
    lengths.mask_begin.push_back(is_inside ? random.between(0, begin) : begin);
  }
  Plan plan;
  const Status created = Plan::create(options, &plan);
  require(created.ok(), created.message);
  const Status planned = plan.plan(lengths.view());
  require(planned.ok(), planned.message);
  const std::string violation = key_without_mask(plan.schedule(), options, lengths);
  require(violation.empty(), violation);
}

ScheduleShape any_shape(FuzzedDataProvider& in) {
  ScheduleShape s;
  s.num_kv_heads = in.ConsumeIntegralInRange<int32_t>(1, 32);
  s.group_size = in.ConsumeIntegralInRange<int32_t>(1, 9);
  s.mask.causal = in.ConsumeBool();
  s.mask.window_left = in.ConsumeBool() ? in.ConsumeIntegralInRange<int32_t>(0, 2000) : -1;
  s.tile_q = 1 << in.ConsumeIntegralInRange<int32_t>(2, 7);
  s.tile_kv = 1 << in.ConsumeIntegralInRange<int32_t>(3, 7);
  s.heads_at_once = in.ConsumeIntegralInRange<int32_t>(1, 2);
  s.num_ctas = in.ConsumeIntegralInRange<int32_t>(1, 264);
  s.shares_prefixes = s.mask.window_left < 0 && in.ConsumeBool();
  s.max_partial_slots = 2 * s.num_ctas;
  if (in.ConsumeBool()) s.max_partial_slots = in.ConsumeIntegralInRange<int32_t>(0, 3000);
  if (!s.shares_prefixes && in.ConsumeBool()) {
    s.chunk_kv = s.tile_kv << in.ConsumeIntegralInRange<int32_t>(0, 4);
  }
  if (in.ConsumeBool()) s.item_steps = in.ConsumeIntegralInRange<int32_t>(1, 100);
  s.merges_readers_last = s.prefixes_first() && in.ConsumeBool();
  s.cost.tile = in.ConsumeIntegralInRange<int32_t>(0, 1000);
  s.cost.tile_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  s.cost.step = in.ConsumeIntegralInRange<int32_t>(1, 1000);
  s.cost.step_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  s.cost.split = in.ConsumeIntegralInRange<int32_t>(0, 1000);
  s.cost.split_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  s.cost.write = in.ConsumeIntegralInRange<int32_t>(0, 500);
  s.cost.write_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  s.cost.merge = in.ConsumeIntegralInRange<int32_t>(0, 1000);
  s.cost.merge_row = in.ConsumeIntegralInRange<int32_t>(0, 100);
  s.cost.cached = in.ConsumeIntegralInRange<int32_t>(0, 500);
  s.cost.share = in.ConsumeIntegralInRange<int32_t>(0, 1000);
  s.cost.share_row = in.ConsumeIntegralInRange<int32_t>(0, 100);
  if (in.ConsumeBool()) {
    s.cost.state = in.ConsumeIntegralInRange<int32_t>(0, 1000);
    s.cost.state_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  }
  return s;
}

void schedule_anything(FuzzedDataProvider& in) {
  const ScheduleShape shape = any_shape(in);
  AttentionOptions limits;
  limits.max_qo_tokens = 2000;
  OwningScheduler scheduler(shape, limits.max_batch_size, limits.max_qo_tokens);
  const ScheduleBounds bounds = schedule_bounds(shape, limits.max_batch_size, limits.max_qo_tokens);
  for (int i = 0; i < 2; ++i) {
    Lengths lengths = any_lengths(in);
    if (!is_valid(limits, lengths)) return;
    // Only variants give ranges of keys, and they share no prefixes.
    if (!shape.shares_prefixes && lengths.are_small() && in.ConsumeBool()) {
      HostBatch batch = lengths.host_batch();
      Random random(in.ConsumeIntegral<uint32_t>());
      limit_keys_randomly(random, &batch);
      lengths.key_ranges = batch.key_ranges;
    }
    scheduler.make(lengths.view());
    const Schedule& schedule = scheduler.schedule();
    const std::string violation = schedule.prefixes.empty()
                                      ? schedule_violation(schedule, lengths.view(), shape, bounds)
                                      : ScheduleRun(schedule, lengths.view(), shape).violation(0);
    require(violation.empty(), violation);
    if (shape.chunk_kv > 0 || shape.max_partial_slots < 2 * shape.num_ctas) continue;
    // Where states cost time, queues may be longer on purpose, for a shorter merge.
    if (shape.cost.of_state(shape.tile_q) > 0) continue;
    const int64_t slow = slow_makespan(shape, lengths.view());
    const int64_t fast = *std::max_element(schedule.cta_cost.begin(), schedule.cta_cost.end());
    require(fast <= acceptable_makespan(shape, slow),
            "makespan " + std::to_string(fast) + ", Algorithm 1's " + std::to_string(slow));
  }
}

}  // namespace
}  // namespace flashplan::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider in(data, size);
  switch (in.ConsumeIntegralInRange<uint8_t>(0, 2)) {
    case 0: flashplan::test::plan_anything(in); break;
    case 1: flashplan::test::schedule_anything(in); break;
    default: flashplan::test::mask_trees(in); break;
  }
  return 0;
}
