// SPDX-License-Identifier: Apache-2.0
// Batch-invariant plans with two kernels, on a fake runtime: which work of a request each kernel
// gets, and where it writes states, follows from the request alone, whatever its neighbours are and
// however many queues there are. The kernels are not run; their schedules are read from the memory
// of the device, where a run has them.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "abi/params.h"
#include "check.h"
#include "cpp/problem.h"
#include "cpp/random_batch.h"
#include "fake_cuda.h"
#include "fake_plan.h"

namespace flashplan::test {
namespace {

constexpr int32_t kMostRequests = 16;
constexpr int32_t kMostTokens = 3000;
constexpr int32_t kMostKeys = 20000;
constexpr int32_t kNumKvHeads = 2;
constexpr int32_t kHeadDim = 128;

/// The parameters of the launches since the last run began.
std::vector<AttentionParams> launches;

const void* keep_launch(void** arguments) {
  launches.push_back(*static_cast<const AttentionParams*>(arguments[0]));
  return launches.back().schedule.starts;
}

/// Keys of which a kernel computes one state for some rows of a request: a chunk, or all that they
/// see.
struct State {
  int32_t row_tile;
  int32_t head;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t index;  // among the states of its rows
  int32_t chunk_kv;
  int32_t tile_kv;  // of the kernel's steps

  auto key() const { return std::tie(row_tile, head, kv_begin, kv_end, index, chunk_kv, tile_kv); }
  bool operator<(const State& other) const { return key() < other.key(); }
  bool operator==(const State& other) const { return key() == other.key(); }
};
/// Of each request of a batch.
using States = std::vector<std::vector<State>>;

/// Reads the schedule of a launch.
class LaunchReader {
 public:
  LaunchReader(const AttentionParams& params, const HostBatch& batch, bool is_general,
               States* states)
      : schedule_(params.schedule),
        partial_o_(params.workspace.partial_o),
        batch_(batch),
        is_general_(is_general),
        states_(*states) {}

  void read() {
    for (int32_t cta = 0; cta < schedule_.num_ctas; ++cta) {
      const QueueStart& start = schedule_.starts[cta];
      for (int32_t i = start.begin; i < start.end; ++i) {
        const WorkTile& tile = schedule_.tiles[i];
        if (i < start.begin + 2) check_start(start, i - start.begin, tile);
        for (int32_t h = 0; h < tile.num_kv_heads; ++h) read_head(tile, tile.kv_head + h);
      }
    }
    for (const auto& [merge, count] : pieces_) {
      CHECK_EQ(schedule_.merges[merge].num_pieces, count);
    }
  }
  /// How many work tiles each merge has.
  const std::map<int32_t, int32_t>& pieces() const { return pieces_; }
  /// Where it writes the partial results of rows.
  std::set<const float*> partial_rows() const {
    std::set<const float*> rows;
    for (const int32_t row : partial_rows_) {
      rows.insert(partial_o_ + int64_t{row} * kHeadDim);
    }
    return rows;
  }

 private:
  static void check_start(const QueueStart& start, int32_t i, const WorkTile& tile) {
    CHECK_EQ(start.tiles[i].segment, tile.segment);
    CHECK_EQ(start.tiles[i].row_tile, tile.row_tile);
    CHECK_EQ(start.tiles[i].kv_begin, tile.kv_begin);
    CHECK_EQ(start.tiles[i].merge, tile.merge);
  }

  void read_head(const WorkTile& tile, int32_t head) {
    const int32_t chunk_kv = schedule_.chunk_kv;
    const int32_t group_size = schedule_.group_size.value;
    const int32_t rows = batch_.qo_len(tile.segment) * group_size;
    const int32_t of_many = is_general_ ? 4096 : 0;
    CHECK_EQ(chunk_kv, rows <= std::max(64, group_size) ? 512 : of_many);
    const Segment& segment = schedule_.segments[tile.segment];
    CHECK_EQ(segment.qo_begin, batch_.qo_indptr[static_cast<size_t>(tile.segment)]);
    CHECK_EQ(segment.qo_len, batch_.qo_len(tile.segment));
    const int32_t first_row = tile.row_tile * schedule_.tile_q;
    const int32_t num_rows = std::min(schedule_.tile_q, rows - first_row);
    int32_t first = 0;
    if (tile.merge >= 0) {
      const Merge& merge = schedule_.merges[tile.merge];
      CHECK_EQ(merge.rows.segment, tile.segment);
      CHECK_EQ(merge.rows.row_begin, first_row);
      CHECK_EQ(merge.rows.num_rows, num_rows);
      CHECK_EQ(merge.kv_head, head);
      first = (tile.partial_row - merge.first_partial_row) / schedule_.tile_q;
      CHECK_EQ(tile.partial_row, merge.first_partial_row + first * schedule_.tile_q);
      ++pieces_[tile.merge];
    }
    const int32_t length = chunk_kv > 0 ? chunk_kv : tile.kv_end - tile.kv_begin;
    int32_t index = first;
    for (int32_t key = tile.kv_begin; key < tile.kv_end; key += length, ++index) {
      states_[static_cast<size_t>(tile.segment)].push_back(
          {tile.row_tile, head, key, std::min(key + length, tile.kv_end), index, chunk_kv,
           chunk_kv > 0 ? 64 : 128});
      if (tile.merge < 0) continue;
      CHECK(index < schedule_.merges[tile.merge].num_states);
      const int32_t row = tile.partial_row + (index - first) * schedule_.tile_q;
      for (int32_t r = row; r < row + num_rows; ++r) CHECK(partial_rows_.insert(r).second);
    }
  }

  const ScheduleParams& schedule_;
  const float* const partial_o_;
  const HostBatch& batch_;
  const bool is_general_;  // whether no kernel is one for Hopper alone
  States& states_;
  std::map<int32_t, int32_t> pieces_;
  std::set<int32_t> partial_rows_;
};

/// A batch-invariant plan on the GPU, with tensors that are large enough for every batch.
class Server {
 public:
  Server(const AttentionOptions& options, cudaStream_t stream)
      : stream_(stream),
        q_(DType::kBFloat16, {kMostTokens, options.num_qo_heads, kHeadDim}),
        kv_(DType::kBFloat16, {4, 16, options.num_kv_heads, kHeadDim}),
        o_(DType::kBFloat16, {kMostTokens, options.num_qo_heads, kHeadDim}),
        table_(DType::kInt32, {kMostRequests, kMostKeys / 16}) {
    CHECK_EQ(Plan::create(options, &plan_).message, std::string());
    workspace_ = std::make_unique<Workspace>(plan_.workspace_bytes());
  }

  /// Plans and runs a batch. Returns the states of its requests, in order.
  States states_of(const HostBatch& batch) {
    CHECK_EQ(plan_.plan(batch.view(), stream_).message, std::string());
    launches.clear();
    CHECK_EQ(plan_.run(tensors(), stream_).message, std::string());
    CHECK(cudaStreamSynchronize(stream_) == cudaSuccess);
    States states(static_cast<size_t>(batch.size()));
    std::set<int32_t> merges;
    std::set<const float*> partial_rows;
    std::set<const QueueStart*> taken;
    for (const AttentionParams& params : launches) {
      taken.insert(params.schedule.starts);
      const bool is_general = plan_.options().kernels == KernelGroup::kGeneral;
      LaunchReader reader(params, batch, is_general, &states);
      reader.read();
      for (const auto& [merge, count] : reader.pieces()) CHECK(merges.insert(merge).second);
      partial_rows.merge(reader.partial_rows());
    }
    check_apart(partial_rows);
    if (launches.size() == 2) check_processors();
    // A captured graph launches both kernels: one without requests has no work.
    for (const auto& [starts, num_ctas] : queues_) {
      for (int32_t cta = 0; taken.count(starts) == 0 && cta < num_ctas; ++cta) {
        CHECK_EQ(starts[cta].begin, starts[cta].end);
      }
    }
    for (const AttentionParams& params : launches) {
      queues_[params.schedule.starts] = params.schedule.num_ctas;
    }
    CHECK(queues_.size() <= 2);
    for (std::vector<State>& of_request : states) std::sort(of_request.begin(), of_request.end());
    return states;
  }

  std::string describe() const { return plan_.describe(); }

 private:
  /// The kernels of a run write at the same time.
  static void check_apart(const std::set<const float*>& rows) {
    const float* end = nullptr;
    for (const float* row : rows) {
      CHECK(row >= end);
      end = row + kHeadDim;
    }
  }

  /// Where the plan chooses the number of queues, those with work fill the GPU at most once.
  void check_processors() const {
    CHECK(!launches[0].schedule.beside_last && launches[1].schedule.beside_last);
    int32_t processors = 0;
    for (const AttentionParams& params : launches) {
      const ScheduleParams& schedule = params.schedule;
      int32_t last = 0;  // queue with work
      for (int32_t cta = 0; cta < schedule.num_ctas; ++cta) {
        if (schedule.starts[cta].begin < schedule.starts[cta].end) last = cta + 1;
      }
      const int32_t of_processor = schedule.num_ctas / fake_cuda::kNumProcessors;
      if (schedule.num_ctas % fake_cuda::kNumProcessors != 0 || of_processor > 2) return;
      processors += (last + of_processor - 1) / of_processor;
    }
    CHECK(processors <= fake_cuda::kNumProcessors);
  }

  AttentionTensors tensors() {
    AttentionTensors t;
    t.q = q_.view();
    t.k = t.v = kv_.view();
    t.o = o_.view();
    t.block_table = table_.view();
    t.workspace = workspace_->data();
    t.workspace_bytes = workspace_->size();
    for (TensorView* view : {&t.q, &t.k, &t.v, &t.o, &t.block_table}) view->device = kGpu;
    return t;
  }

  cudaStream_t stream_;
  HostTensor q_, kv_, o_, table_;
  Plan plan_;
  std::unique_ptr<Workspace> workspace_;
  std::map<const QueueStart*, int32_t> queues_;  // of the kernels that were launched
};

AttentionOptions options_of(Random& random, int32_t group_size) {
  AttentionOptions o;
  o.num_kv_heads = kNumKvHeads;
  o.num_qo_heads = group_size * kNumKvHeads;
  o.head_dim_qk = o.head_dim_vo = kHeadDim;
  o.q_dtype = o.kv_dtype = o.o_dtype = DType::kBFloat16;
  o.page_size = 16;
  o.device = kGpu;
  o.max_batch_size = kMostRequests;
  o.max_qo_tokens = kMostTokens;
  o.num_ctas = random.pick({0, 1, 7, 132, 300});
  o.batch_invariant = true;
  return o;
}

/// A decode, a draft, a prompt, or a chunk of one.
std::pair<int32_t, int32_t> random_request(Random& random) {
  const int32_t qo_len = random.pick({0, 1, 1, 1, random.between(2, 20), random.between(16, 180)});
  const int32_t most_keys = random.pick({qo_len, 700, 5000, kMostKeys});
  return {qo_len, random.between(0, std::max(qo_len, most_keys))};
}

TEST(states_depend_on_the_request_alone) {
  Random random(1);
  const TestStream stream;
  fake_cuda::set_memory_of_launch(&keep_launch);
  for (int round = 0; round < check::rounds(40); ++round) {
    const int32_t group_size = random.pick({1, 4, 8, 100});
    const AttentionOptions options = options_of(random, group_size);
    AttentionOptions others = options;
    others.window_left = random.one_in(4) ? random.between(0, 3000) : -1;
    others.causal = !random.one_in(4);
    if (random.one_in(3)) others.kernels = KernelGroup::kGeneral;
    AttentionOptions with_other_queues = others;
    with_other_queues.num_ctas = random.between(1, 264);
    with_other_queues.max_batch_size = 1;
    Server crowded(others, stream);
    Server lonely(with_other_queues, stream);
    for (int i = 0; i < 250; ++i) {
      HostBatch batch;
      const int32_t num_requests = random.between(1, kMostRequests);
      for (int32_t r = 0; r < num_requests; ++r) {
        const auto [qo_len, kv_len] = random_request(random);
        batch.add(qo_len, kv_len);
      }
      const States together = crowded.states_of(batch);
      const int32_t r = random.between(0, num_requests - 1);
      HostBatch one;
      one.add(batch.qo_len(r), batch.kv_lens[static_cast<size_t>(r)]);
      const States alone = lonely.states_of(one);
      CHECK(together[static_cast<size_t>(r)] == alone[0]);
    }
  }
  CHECK_EQ(fake_cuda::take_mistakes(), std::string());
}

TEST(a_mixed_batch_is_described_with_both_kernels) {
  Random random(2);
  const TestStream stream;
  fake_cuda::set_memory_of_launch(&keep_launch);
  AttentionOptions options = options_of(random, 4);
  options.num_ctas = 0;
  Server server(options, stream);
  const auto describe = [&](const std::vector<int32_t>& qo_lens) {
    HostBatch batch;
    for (const int32_t qo_len : qo_lens) batch.add(qo_len, 2000);
    server.states_of(batch);
    return server.describe();
  };
  const auto has = [](const std::string& text, const char* what) {
    return text.find(what) != std::string::npos;
  };
  const std::string mixed = describe({17, 1});
  CHECK(has(mixed, "kernel sm90_bf16_d128, 4 queues\n"));
  CHECK(has(mixed,
            "\nrequests of up to 64 query rows for each kv head: kernel sm80_bf16_d128, 8 "
            "queues\n"));
  CHECK(!has(mixed, "\nnot sm"));
  const std::string prompts = describe({17, 500});
  CHECK(has(prompts, "kernel sm90_bf16_d128, 4 queues\n"));
  CHECK(has(prompts, "\nnot sm80: no request has few query rows\n"));
  const std::string decodes = describe({16, 1});
  CHECK(has(decodes, "kernel sm80_bf16_d128, 8 queues\n"));
  CHECK(has(decodes, "\nnot sm90: no request has many query rows\n"));
}

}  // namespace
}  // namespace flashplan::test
