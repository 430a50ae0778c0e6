// SPDX-License-Identifier: Apache-2.0
// What the scheduler needs to know about the problem and the kernel.
#pragma once

#include <cstdint>

#include "abi/mask.h"

namespace flashplan {

struct AttentionOptions;
struct KernelChoice;
struct WorkspaceLayout;

/// Predicts the time, in arbitrary units, of a tile of `rows` query rows that reads keys in `steps`
/// steps:
///   of_tile(rows) + steps * of_step(rows)
/// This is alpha * l_q + beta * l_kv of FlashInfer's paper, with coefficients measured for a kernel
/// family.
/// A field that ends in _row is what each row adds to the cost of the field before it. The methods
/// below say what the fields mean.
struct CostModel {
  int32_t tile = 0;
  int32_t tile_row = 0;
  int32_t step = 1;
  int32_t step_row = 0;
  int32_t split = 0;
  int32_t split_row = 0;
  int32_t write = 0;
  int32_t write_row = 0;
  int32_t merge = 0;
  int32_t merge_row = 0;
  int32_t cached = 0;
  int32_t share = 0;
  int32_t share_row = 0;
  int32_t state = 0;
  int32_t state_row = 0;
  int32_t error_part = 1;

  friend bool operator==(const CostModel&, const CostModel&) = default;

  int64_t of_tile(int32_t rows) const noexcept { return tile + int64_t{tile_row} * rows; }
  int64_t of_step(int32_t rows) const noexcept { return step + int64_t{step_row} * rows; }
  /// The cost of writing one partial result and merging it. A split must save more than this.
  int64_t of_split(int32_t rows) const noexcept { return split + int64_t{split_row} * rows; }
  /// The cost of writing one partial result of a shared prefix, or of a request that reads one. The
  /// rows of both are merged, even if nothing is cut.
  int64_t of_write(int32_t rows) const noexcept { return write + int64_t{write_row} * rows; }
  /// The cost of merging the rows of one request that reads shared prefixes, for one kv head.
  int64_t of_merge(int32_t rows) const noexcept { return merge + int64_t{merge_row} * rows; }
  /// By how much a step is cheaper if another CTA reads the same keys at about the same time: the
  /// keys then come from a cache that the CTAs have in common.
  int64_t of_cached_step() const noexcept { return cached; }
  /// What sharing costs each queue besides its work tiles, on a GPU. Requests begin when all queues
  /// have ended their prefixes. At that time all queues write partial rows of prefixes, `rows` for
  /// each queue, and then all of them read these rows.
  int64_t of_sharing(int64_t rows) const noexcept { return share + share_row * rows; }
  /// By how much each state makes the merge of a cut tile longer. The batch ends with this merge.
  /// 0: the cost is not known, and the number of states is not limited.
  int64_t of_state(int32_t rows) const noexcept { return state + int64_t{state_row} * rows; }
  /// An upper bound of the measured time of a batch with shared prefixes, whose predicted time is
  /// `time`: measured times exceed predicted ones by up to 1 / error_part.
  int64_t longest(int64_t time) const noexcept { return time + time / error_part; }
};

/// How row tiles are divided among the queues. Plans use kBalanced; only measurements ask for the
/// others.
enum class Division : int32_t {
  kBalanced = 0,  // row tiles are cut where that makes the longest queue shorter
  kWhole,         // no row tile is cut; the longest go to the least loaded queues
  kInOrder,       // no row tile is cut; they go to the queues in turn, in the order of the batch
};

/// The facts about a plan that the scheduler needs. They stay the same for the life of the Plan.
struct ScheduleShape {
  int32_t num_kv_heads = 1;
  int32_t group_size = 1;  // query heads per kv head, packed: row = qo_idx * group_size + head
  Mask mask = {.causal = true};
  bool paged = false;
  int32_t tile_q = 64;   // packed query rows of a tile
  int32_t tile_kv = 64;  // keys of a step
  /// How many neighbouring kv heads of a decode are cut at the same keys, to be read together.
  int32_t heads_at_once = 1;
  int32_t num_ctas = 1;
  int32_t max_partial_slots = 0;  // slots in the workspace, each for tile_q partial rows
  /// Whether prefixes that requests share may be computed once for all of them.
  bool shares_prefixes = false;
  /// Whether a CTA merges its requests with their prefixes after the last tile of its queue.
  /// Prefixes then need to be complete only at that time.
  bool merges_readers_last = false;
  /// > 0: batch-invariant; a state is computed for each chunk of chunk_kv keys, which is tile_kv
  /// times a power of two.
  int32_t chunk_kv = 0;
  /// Whether row tiles may be cut. Batch-invariant plans cut only between chunks, so they cut
  /// nothing if the kernel has no chunks.
  bool cuts = true;
  /// How many packed query rows the scheduled requests have. Other requests are left out: they are
  /// in the schedule of another kernel. Scheduler::take_rows() changes both.
  int32_t min_rows = 1;
  int32_t max_rows = INT32_MAX;
  /// > 0: row tiles are divided into items, which are some kv heads of a row tile and have about
  /// item_steps steps. A request's items for the same heads are dealt to neighbouring queues. Their
  /// CTAs then read the same keys at about the same time, so that all but the first find them in
  /// the processor's cache, on a GPU L2. 0: all heads of a row tile stay together.
  int32_t item_steps = 0;
  /// > 0: a queue may exceed its share of the work by 1 / uncut_part of the share, so that fewer
  /// row tiles are cut in requests that have several. The pieces of cut row tiles do not read the
  /// same keys at the same time.
  int32_t uncut_part = 0;
  /// How many row tiles must read each key, so that preparing the keys of a request saves time
  /// (plan/prepared_kv.h).
  int32_t prepare_reads = 0;
  /// Whether the keys of some requests of a batch may be prepared while others are not.
  bool prepares_some = false;
  Division division = Division::kBalanced;
  CostModel cost;

  /// Whether each queue has its shared prefixes before everything else. A GPU then merges the
  /// requests that read them on all CTAs at the same time. If instead a prefix ended after its
  /// requests, the CTA that ends it would merge all these requests one after the other, while other
  /// CTAs idle. On a CPU merging costs little, and prefixes are divided together with the requests.
  bool prefixes_first() const noexcept { return item_steps > 0; }

  /// Steps between possible cuts: a power of two.
  int32_t granule() const noexcept { return chunk_kv > 0 ? chunk_kv / tile_kv : 1; }
};

/// Whether plans with these options may compute shared prefixes once. Batch-invariant plans may
/// not, because rows must not depend on their neighbours. Plans with a window do not, because the
/// window hides most prefixes. Plans with a variant or RoPE do not, because these need the
/// positions of the queries, which a kernel does not know when it computes a prefix for several
/// requests. Plans with topk do not, because each query has keys of its own.
bool may_share_prefixes(const AttentionOptions& options) noexcept;
/// The largest number of requests in a batch, as the scheduler counts them. With topk each token
/// counts as a request, because it has keys of its own.
int32_t most_requests(const AttentionOptions& options) noexcept;
/// Whether plans with these options and the kernel of `choice` may compute shared prefixes once.
bool shares_prefixes(const AttentionOptions& options, const KernelChoice& choice) noexcept;

/// The most sharers of a batch. Sharers are the requests that read shared prefixes, and these
/// prefixes, which are fewer than the requests. Each has a merge for each kv head; a limit of 65536
/// merges bounds the memory of large batches.
inline int32_t most_sharing(int32_t max_batch_size, int32_t num_kv_heads) noexcept {
  constexpr int32_t kMostMerges = 1 << 16;
  const int32_t most = kMostMerges / num_kv_heads;
  return max_batch_size < most / 2 ? 2 * max_batch_size : most;
}

/// Computes the ScheduleShape of a plan with these options, kernel and workspace.
ScheduleShape schedule_shape(const AttentionOptions& options, const KernelChoice& choice,
                             const WorkspaceLayout& layout);

}  // namespace flashplan
