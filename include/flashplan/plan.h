// SPDX-License-Identifier: Apache-2.0
// Plan, the one object of the library: create() takes the options, plan() schedules each step, and
// run() computes each layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "flashplan/export.h"
#include "flashplan/rope.h"
#include "flashplan/schedule.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "flashplan/variant.h"

namespace flashplan {

/// Order of the dimensions inside a page of the KV cache.
enum class KvLayout : int32_t {
  kNHD = 0,  // [num_pages, page_size, num_kv_heads, head_dim]
  kHND = 1,  // [num_pages, num_kv_heads, page_size, head_dim]
};

/// Which kernels may run the batches of a plan.
enum class KernelGroup : int32_t {
  kAll = 0,
  kGeneral = 1,  // for every GPU from compute capability 8.0 on; on the CPU all kernels are general
  kHopper = 2,   // kernels with wgmma and TMA, for compute capability 9.0 alone
};

/// The largest head_dim_qk and head_dim_vo that options may have.
inline constexpr int32_t kMaxHeadDim = 4096;

/// What the caller wants, fixed for the life of a Plan.
struct AttentionOptions {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_qo_heads; group_size = num_qo_heads / num_kv_heads
  int32_t head_dim_qk = 0;   // 1 to kMaxHeadDim; on a GPU fewer, see is_supported()
  int32_t head_dim_vo = 0;
  int32_t page_size = 0;  // 0: k and v are ragged tensors; >= 1: a paged cache
  KvLayout kv_layout = KvLayout::kNHD;
  DType q_dtype = DType::kBFloat16;   // an 8-bit float only with an 8-bit kv_dtype
  DType kv_dtype = DType::kBFloat16;  // q_dtype, an 8-bit float, or kFp8DsMla
  DType o_dtype = DType::kBFloat16;

  /// Key j is visible to query i iff j <= i + kv_len - qo_len (bottom-right aligned).
  bool causal = true;
  /// Key j is visible iff j >= i + kv_len - qo_len - window_left (inclusive); -1: unbounded.
  int32_t window_left = -1;
  /// Each run() takes a mask of bits (AttentionTensors::mask), which hides further keys.
  bool custom_mask = false;
  /// Values are the first head_dim_vo dims of the keys, as in multi-head latent attention (MLA):
  /// runs take no v. It needs num_kv_heads == 1, head_dim_vo <= head_dim_qk and a softmax_scale,
  /// and allows neither a variant nor a rotation. The CPU serves it, and so do Hopper GPUs for head
  /// dims (576, 512) and (512, 512), without softcap and not over a cache of float8_e5m2.
  bool shared_kv = false;
  /// With shared_kv and pages: the most keys that a query sees, which each run() lists
  /// (AttentionTensors::topk_indices); 0: queries see the keys of their requests. causal does not
  /// hide listed keys. A window and a mask are refused, and shared prefixes are not used.
  int32_t topk = 0;
  /// Multiplies q.k; a normal float > 0; empty: 1 / sqrt(head_dim_qk). With shared_kv there is no
  /// default, because models scale by the head dim before their keys were compressed.
  std::optional<float> softmax_scale;
  /// logits = softcap * tanh(softmax_scale * q.k / softcap); a normal float > 0, or 0: off.
  float softcap = 0.0F;
  /// Queries and keys are rotated by their positions as they are read: the cache holds keys before
  /// rotation. Key j is at position j, query i of a request at kv_len - qo_len + i. On a GPU keys
  /// have the dtype of q, and NVRTC compiles the kernel, as it does for a variant.
  std::optional<Rope> rope;
  /// An attention of the user's own; empty: none. The Plan holds it. Such plans share no prefixes.
  Variant variant;

  // Upper bounds for every batch. Buffers and the grid are sized for them, once.
  int32_t max_batch_size = 256;
  int32_t max_qo_tokens = 8192;

  Device device;
  /// Work queues: CTAs on a GPU, or pairs of CTAs that share the widened keys of latent attention;
  /// tasks of the thread pool on the CPU. 0: chosen for the device.
  int32_t num_ctas = 0;
  /// Bytes of workspace that the caller will give; empty: as many as the bounds ask for. If it has
  /// fewer, the keys of long prompts may be rotated, or gathered from small pages, several times,
  /// and long requests are split into fewer parts.
  std::optional<std::size_t> workspace_bytes;
  /// The results of a request have the same bits whatever other requests are in the batch, and
  /// whatever num_ctas is. On a Hopper GPU a batch may then take two kernels, one for requests of
  /// few query rows and one for those of many. (A batch over an 8-bit cache may take two kernels
  /// without this option, too.)
  bool batch_invariant = false;
  /// lse is a logarithm to base 2, not a natural one. This does not change the meaning of sinks:
  /// exp(sink) is added to a denominator.
  bool lse_base2 = false;
  /// Every batch runs on a kernel of this group, also where another one is faster.
  KernelGroup kernels = KernelGroup::kAll;
};

/// Lengths of one step, in host memory; read before plan() returns.
struct Batch {
  const int32_t* qo_indptr = nullptr;  // [batch_size + 1], starts at 0, ascending
  /// [batch_size] keys of each request, with those of this step. With topk they are upper bounds:
  /// of the list of a query, the first min(topk, kv_len) entries count.
  const int32_t* kv_lens = nullptr;
  /// [batch_size + 1] first row of each request in ragged k and v; null: the running sum of
  /// kv_lens.
  const int32_t* kv_indptr = nullptr;
  int32_t batch_size = 0;
  /// [num_shared_prefixes, 3] rows {first_request, num_requests, num_tokens}, at most 2 *
  /// max_batch_size rows. A row says that num_requests neighbouring requests, from first_request
  /// on, begin with the same num_tokens keys, a prefix. Two prefixes are nested or have no request
  /// in common. A prefix must not be longer than kv_len - qo_len of any of its requests, also not
  /// with real lengths (AttentionTensors::kv_lens). Where it saves time, the keys of a prefix are
  /// read once for all of its requests, at the place of the first request's keys. Results are the
  /// same up to rounding; with batch_invariant prefixes are not used, so the bits are the same.
  const int32_t* shared_prefixes = nullptr;
  int32_t num_shared_prefixes = 0;
  /// [batch_size] >= 0, with custom_mask only: the key of each request that bit 0 of its mask
  /// stands for; null: kv_len - qo_len, the position of its first query, with the real kv_len.
  const int32_t* mask_begin = nullptr;
  /// [qo_indptr[batch_size], 2], with a variant only: rows {begin, end} for each token of q, which
  /// sees keys [begin, end) of its request at most; null: a token may see any key. The kernels skip
  /// keys that no token of a tile may see. They hide no other keys, so the variant must hide what
  /// is outside of the ranges. An end <= begin means no key; ranges may exceed the keys of the
  /// request. Runs of such a plan take no real lengths (AttentionTensors::kv_lens).
  const int32_t* key_ranges = nullptr;
};

/// Arguments of one attention layer. T = qo_indptr[batch_size]; tensors may have more rows.
struct AttentionTensors {
  TensorView q;  // [>= T, num_qo_heads, head_dim_qk]
  /// ragged: [>= kv_indptr[batch_size], num_kv_heads, head_dim]; paged: see KvLayout. Any strides
  /// but for the last dimension, which is contiguous. With shared_kv v is empty, and k may also
  /// have no dimension of heads; its last dimension has kDsMlaBytes elements in kFp8DsMla.
  TensorView k, v;
  /// Each may be empty. With shared_kv they have the last head_dim_qk - head_dim_vo dims of queries
  /// and of keys; q or k then has only the first head_dim_vo dims. A tail is shaped like q or k,
  /// except for the last dimension. Without shared_kv, k_tail [>= kv_indptr[batch_size], any] has
  /// the last dims of ragged keys, which all kv heads have in common, such as the rotated dims of
  /// DeepSeek's prompts; k has the other dims. With such a k_tail a GPU refuses keys of up to 128
  /// dims (kUnsupported), and Hopper's kernels also refuse a variant or rope.
  TensorView q_tail, k_tail;
  /// With topk, instead of a page table: [>= T, 1 to topk] int32, on the Plan's device, the keys
  /// that each query sees, page * page_size + row in page. Entries outside of the cache, such as
  /// -1, are skipped; a key that is listed twice counts twice. The first min(topk, kv_len) entries
  /// of a list count, with the kv_len that plan() was given; on the CPU a key after these is an
  /// error.
  TensorView topk_indices;
  /// [>= T] int32, or empty: how many entries of each list count. Later entries may be anything.
  TensorView topk_lens;
  // Paged only, one of the two forms, int32, on the Plan's device. A request of kv_len tokens
  // reads its first ceil(kv_len / page_size) page ids and no more. The id of a page whose keys no
  // query sees may be anything. If a query sees keys of a page whose id is outside of the cache,
  // run() returns an error on the CPU, and gives these keys weight 0 on a GPU. On a GPU run()
  // checks only that block_table has enough columns for the longest request of the plan.
  // check_device_data() finds wrong ids there; docs/reference/errors.md has all rules.
  TensorView block_table;   // [>= batch_size, max_pages]
  TensorView page_indptr;   // [>= batch_size + 1]
  TensorView page_indices;  // [>= page_indptr[batch_size]]
  /// [>= batch_size] int32, on the Plan's device: the real lengths, where plan() was given upper
  /// bounds; may be empty. The result is that of a plan with these lengths: the position of query i
  /// among the keys is kv_lens[r] - qo_len + i. Ragged k and v stay where they were planned. A
  /// length above the planned one counts as the planned one, a negative one as 0. On a GPU the
  /// lengths are read when the work runs, so also at each replay of a graph. Empty if the batch has
  /// key_ranges, since these belong to the planned positions of the queries.
  TensorView kv_lens;
  /// [>= T, >= ceil((kv_len - mask_begin) / 32) of any request] uint32, with custom_mask: bit j %
  /// 32 of word j / 32 of row t says whether query t sees key mask_begin + j of its request. All
  /// queries see the keys before mask_begin, and none sees a key for which there is no bit. causal
  /// and window_left hide further keys.
  TensorView mask;
  /// [num_qo_heads] float32 or bfloat16, on the Plan's device: a logit for each query head that
  /// stands for no key; may be empty. exp(sink) is added to the denominator of the softmax of each
  /// row, and lse includes it; -inf adds nothing. softmax_scale and softcap do not apply to it.
  TensorView sinks;
  TensorView o;  // [>= T, num_qo_heads, head_dim_vo], written
  /// [>= T, num_qo_heads] float32, written; may be empty. A natural logarithm, or with lse_base2
  /// one to base 2.
  TensorView lse;
  /// For 8-bit caches: a key is k_scale * its stored number, a value v_scale * its stored number.
  /// Both scales must be normal floats > 0, and so must softmax_scale * q_scale * k_scale, which
  /// must not overflow when it is divided by softcap. With shared_kv, k_scale is also the scale of
  /// values, and v_scale must be 1.
  float k_scale = 1.0F;
  float v_scale = 1.0F;
  /// [1] or [num_kv_heads] float32, on the Plan's device, or empty: factors by which k_scale and
  /// v_scale are multiplied, one for all kv heads or one for each. Not checked on a GPU.
  TensorView k_scales, v_scales;
  /// Only with an 8-bit q_dtype: a query is q_scale * its stored number. q_scales has one factor
  /// for all kv heads, or one for each, which all of its query heads share.
  float q_scale = 1.0F;
  TensorView q_scales;
  /// Only for a Plan with a variant: all tensors and scalars that its description names, in the
  /// same order. If variant_scalars is null, the values of the description apply. run() reads both
  /// arrays before it returns; the contents of the tensors are read when the kernel runs.
  const TensorView* variant_tensors = nullptr;
  int32_t num_variant_tensors = 0;
  const float* variant_scalars = nullptr;
  int32_t num_variant_scalars = 0;
  /// Programmatic dependent launch, on GPUs of compute capability 9.0 and later: the kernel may
  /// begin while the kernel before it in the stream ends, which hides the latency of its launch.
  /// Results are the same: the kernel touches tensors only when all kernels before it have ended.
  /// In a captured graph the launches are linked likewise.
  bool pdl = false;
  /// At least Plan::workspace_bytes(), aligned to kWorkspaceAlignment; the contents do not matter.
  /// Plans may share a workspace if no two of their runs overlap; on a GPU use one stream for them.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

constexpr std::size_t kWorkspaceAlignment = 256;

/// The index tensors of run() and append_paged_kv(). Tensors that are not given are empty. Each
/// lies on the Plan's device or in host memory.
struct DeviceData {
  TensorView block_table;  // as in AttentionTensors
  TensorView page_indptr;
  TensorView page_indices;
  TensorView kv_lens;       // real lengths, as in AttentionTensors
  TensorView slot_mapping;  // [any] int64, as in AppendTensors
  int64_t num_pages = 0;    // pages of the cache, >= 0; not used for ragged k and v
};

/// Options, the kernels chosen for them, and the schedule of the last step. Use from one thread at
/// a time; different Plans are independent. Movable, not copyable.
class FLASHPLAN_API Plan {
 public:
  Plan() noexcept;
  ~Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;

  /// Checks the options, selects the kernels, and allocates all that later calls need, except for
  /// the workspace. On a GPU this includes device memory for the schedule, and the pinned memory
  /// from which the schedule is copied. Where batches of few query rows and batches of many rows
  /// are both within the bounds, a Plan may have a kernel for each kind; plan() takes one of them,
  /// or on Hopper both for some batches. Compiles the variant, if any, unless its code is in this
  /// process or in the cache on disk.
  ///   kInvalidArgument  an option is out of range, workspace_bytes is below the minimum, or a
  ///                     variant does not compile
  ///   kUnsupported      no kernel for these options, or for this GPU, or no compiler for a variant
  ///   kOutOfMemory      memory ran out; what had been allocated is freed
  static Status create(const AttentionOptions& options, Plan* plan) noexcept;

  /// Schedules one step (FlashInfer, Algorithm 1 and Appendix D, with the changes DESIGN.md
  /// gives). No allocation.
  /// GPU: copies the schedule to the device on `stream`, asynchronously; `stream` should be that of
  /// the runs. There is no synchronisation, unless four earlier copies are still under way: then
  /// plan() waits for the first of them. CPU: `stream` is ignored.
  ///   kInvalidArgument  a length is out of range or over the bounds, or a stream of another device
  ///   kNotReady         `stream` is being captured
  ///   kCudaError        a call of CUDA failed, or work that was on the device
  /// After an error the last plan stays valid; after kCudaError there may be none until the next
  /// plan(), and run() then gives kNotReady.
  Status plan(const Batch& batch, Stream stream = nullptr) noexcept;

  /// Runs the planned attention. A row with no visible key gets o = 0, lse = -inf; with sinks, lse
  /// is the sink.
  ///
  /// NaN and infinity raise no error. The result does not depend, up to rounding, on how the keys
  /// are split:
  /// - A visible logit of NaN or +inf makes lse and all of o NaN in its row, and so does a sink of
  ///   NaN or +inf. Logits are those after the softcap, which makes +-inf +-softcap.
  /// - A visible logit of -inf gives its key the weight 0. A row with no other logits is like a row
  ///   with no visible key, so lse = -inf always says that the weights of all keys are 0.
  /// - A visible value of NaN makes its dim of o NaN. One of +-inf makes its dim +-inf, or NaN if
  ///   its weight is 0 in float32, or if infinities of both signs are added.
  /// - What a row does not see does not change it, with one exception: on a GPU a value of NaN or
  ///   infinity within kv_len makes its dim of o NaN also in rows of the request that do not see
  ///   it, if their tile of 128 rows reads it as one of the up to 128 keys of a step.
  ///
  /// CPU: on the calling thread and the library's thread pool; returns when done.
  /// GPU: one launch on `stream`, or on Hopper two for some batches. plan() and run() calls of one
  /// Plan are executed in their order on the device, even on different streams. The stream of a
  /// plan() must exist until the next plan() on another stream, or until the Plan is destroyed:
  /// both wait for that stream, and CUDA crashes on the handle of a stream that was destroyed. A
  /// graph with captured runs refers to memory of the Plan and to its workspace: both must live as
  /// long as the graph, and nothing notices a replay after they are gone. A run may be captured
  /// into a graph and replayed for any later plan() with the same tensors. The caller orders each
  /// replay after that plan(), most simply by using one stream. If the bounds allow prompts
  /// (max_qo_tokens > max_batch_size), a captured run launches all kernels of the Plan, also one
  /// that has no work. Otherwise it launches the kernel that the last plan() took, and every later
  /// plan() takes the same one.
  ///   kInvalidArgument, kInvalidType  a tensor does not fit the plan, or o or lse shares memory
  ///                                   with another argument; nothing was written
  ///   kNotReady                       there was no plan() yet; on the CPU, another run is using
  ///                                   the workspace
  Status run(const AttentionTensors& tensors, Stream stream = nullptr) noexcept;

  /// Checks the values of index tensors against the last plan(), for debugging. Page ids are
  /// checked as run() checks them on the CPU, slots as append_paged_kv() does there. Each real
  /// length must be between 0 and the planned one. A page table may be left out where slots or
  /// lengths are given. Tensors on a GPU are copied to host memory that the call allocates: it
  /// waits for `stream` and all work on it. Nothing is written.
  ///   kInvalidArgument, kInvalidType  a tensor is malformed, or a value is out of range; the
  ///                                   message names its place
  ///   kNotReady                       there was no plan() yet, or `stream` is being captured
  ///   kOutOfMemory                    there is no host memory for the copies
  ///   kCudaError                      a copy, or work that was on the stream, failed
  Status check_device_data(const DeviceData& data, Stream stream = nullptr) const noexcept;

  /// Bytes of workspace that run() needs. They depend on the options alone, not on the batch.
  std::size_t workspace_bytes() const noexcept;

  /// The options that create() was given, with every default filled in.
  const AttentionOptions& options() const noexcept;
  /// The kernel that run() executes after the last plan(), such as "sm90_bf16_d128"; if run()
  /// executes two, the one for requests of many query rows. Valid as long as the Plan.
  const char* kernel_name() const noexcept;

  /// The schedule of the last plan() for the kernel that kernel_name() names; before the first
  /// plan() it has no tiles.
  ScheduleView schedule() const noexcept;

  /// A readable text about the last plan(): its kernel, why it has no kernel of another family, and
  /// the schedule. Empty if memory runs out.
  std::string describe() const noexcept;

  /// The schedule as a small SVG picture: one line per queue, one box per work tile, an axis and a
  /// legend. Of more than 64 queues it shows the first 64.
  std::string timeline_svg() const noexcept;

  struct Impl;  // the library's own; see src/api/plan_impl.h

 private:
  std::unique_ptr<Impl> impl_;
};

/// Whether Plan::create() would find a kernel, and a compiler if the options need one. The message
/// says what is missing.
FLASHPLAN_API Status is_supported(const AttentionOptions& options) noexcept;

/// Bytes of workspace that a Plan with these options uses; options.workspace_bytes is ignored. The
/// errors are those of is_supported(), and leave `bytes` as it is.
FLASHPLAN_API Status workspace_bytes(const AttentionOptions& options, std::size_t* bytes) noexcept;

}  // namespace flashplan
