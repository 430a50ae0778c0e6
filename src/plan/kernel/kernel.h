// SPDX-License-Identifier: Apache-2.0
// A kernel as a value: the options it serves, its geometry, and the handle of its code. Such values
// can be compared and printed. select_kernel() alone chooses the kernels of a plan.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "abi/architecture.h"
#include "flashplan/plan.h"
#include "flashplan/tensor.h"
#include "plan/kernel/tuning.h"
#include "variant/gpu_code.h"

namespace flashplan {

struct AttentionParams;
struct Kernel;

/// The options by which a kernel may fail to serve a plan, in the order in which they are compared.
enum class Axis : int32_t {
  kKernels,
  kSharedKv,
  kQDType,
  kKvDType,
  kHeadDim,
  kSoftcap,
  kBatchInvariant,
  kVariant,
  kRope,
  kNone
};

/// The kinds of batches that kernels are made for. With few packed query rows in each request a
/// kernel is bound by memory. With tiles of many rows, as prompts and shared prefixes have, it is
/// bound by arithmetic.
enum class BatchKind : int32_t { kFewRows, kManyRows };

/// Kernels that are compiled from the same code, for different dtypes and head dims.
struct KernelFamily {
  const char* name;  // "sm80", as in kernels.json
  DeviceType device;
  KernelGroup group = KernelGroup::kGeneral;
  /// The code that is compiled at run time for plans with variants or rotations; null: the family
  /// serves no such plans.
  const DeviceProgram* program = nullptr;
  /// Whether the kernels run work tiles of shared prefixes, and their merges.
  bool shares_prefixes = false;
  /// true: the kernels are for plans with shared_kv; false: for plans without. CPU kernels are for
  /// both, and ignore this.
  bool shared_kv = false;
  /// Whether a CTA merges requests with their prefixes after all tiles of its queue, not after each
  /// tile.
  bool merges_readers_last = false;

  /// The first axis along which `kernel` does not serve `options`; kNone: it serves them. Requires
  /// options that allow the kernel's group.
  Axis (*first_unserved)(const Kernel& kernel, const AttentionOptions& options) noexcept;
  /// Bytes of the workspace that each queue needs for itself.
  std::size_t (*scratch_bytes)(const Kernel& kernel, const AttentionOptions& options) noexcept;
  /// Where several families serve the options, the one with the largest preference for a kind of
  /// batches is chosen.
  int32_t (*preference)(const AttentionOptions& options, BatchKind kind) noexcept;
};

/// The code of a kernel for work tiles of up to `rows` packed query rows.
struct KernelBody {
  int32_t rows = 0;
  int32_t stages = 0;  // tiles of keys that are in shared memory at once

  friend bool operator==(const KernelBody&, const KernelBody&) = default;
};

struct KernelGeometry {
  int32_t tile_q = 0;                     // packed query rows of the largest tile
  int32_t tile_kv = 0;                    // keys that are computed in one step
  int32_t paired_dims = 0;                // head dim with which decodes read two kv heads at once
  std::array<KernelBody, 3> bodies = {};  // in rising order of `rows`; unused ones have 0 rows
  int32_t queues_per_processor = 0;       // CTAs that an SM holds; on the CPU: queues for each core
  int32_t ctas_of_queue = 1;              // CTAs of the cluster that runs one queue
  int32_t threads = 0;                    // threads of a CTA
  int32_t smem_bytes = 0;                 // dynamic shared memory of a CTA
  bool uses_tensor_maps = false;          // reads AttentionParams::maps
  bool gathers = false;                   // copies keys and values row by row
  bool prepares_some = false;             // a batch may have prepared and unprepared keys
  int32_t prepared_key_bytes = 0;         // bytes of a prepared tile of keys; 0: there is none
  int32_t prepared_value_bytes = 0;       // bytes of a prepared tile of values; 0: none

  friend bool operator==(const KernelGeometry&, const KernelGeometry&) = default;
};

/// How the kernel is called. On a GPU: handles for cudaLaunchKernel, which are functions of this
/// library or a cudaKernel_t, such as one that was loaded from code made by NVRTC.
struct KernelCode {
  /// On the CPU: runs queue `cta` on the calling thread, with a worker's scratch memory.
  void (*run_queue)(const AttentionParams& params, int32_t cta,
                    std::byte* scratch) noexcept = nullptr;
  const void* few_rows_first = nullptr;   // the kernel with the body for few rows first in its code
  const void* many_rows_first = nullptr;  // the kernel with the body for many rows first
  // The kernel that replaces both of these where pairs_heads() is true. Null: they are used there.
  const void* short_rows_first = nullptr;
  // The kernel for plans without shared_kv whose keys have their last dims in a second tensor.
  // Null: there is no kernel for such keys.
  const void* key_tails = nullptr;

  friend bool operator==(const KernelCode&, const KernelCode&) = default;
};

struct Kernel {
  std::string_view name;  // "sm80_bf16_e4m3_d128"; ends with NUL, lives as long as the code
  const KernelFamily* family = nullptr;
  Architecture architecture;  // what the code was compiled for
  DType q_dtype = DType::kFloat32;
  /// An 8-bit dtype of queries that the kernel also serves: it widens them to `q_dtype`.
  std::optional<DType> narrow_q_dtype;
  DType kv_dtype = DType::kFloat32;
  int32_t head_dim_qk = 0;  // the largest head dims that it serves; on the CPU there is no limit
  int32_t head_dim_vo = 0;
  bool softcap = false;  // whether it applies a softcap
  KernelGeometry geometry;
  /// The geometry of the code with a rotation, if it differs from `geometry`.
  std::optional<KernelGeometry> rotating_geometry;
  /// The geometry of the code that is compiled at run time for batches of few rows, if it differs
  /// from `geometry`.
  std::optional<KernelGeometry> few_rows_geometry;
  KernelTuning tuning;
  KernelCode code;

  friend bool operator==(const Kernel&, const Kernel&) = default;
  /// The first axis along which the kernel does not serve `options`; kNone: it serves them.
  Axis first_unserved(const AttentionOptions& options) const noexcept {
    const KernelGroup group = options.kernels;
    if (group != KernelGroup::kAll && group != family->group) return Axis::kKernels;
    return family->first_unserved(*this, options);
  }
  bool supports(const AttentionOptions& options) const noexcept {
    return first_unserved(options) == Axis::kNone;
  }
};

/// A text like "tiles of 16/64/128 rows x 64 keys, 6/3/2 stages, 128 threads, 112 KB, 2 queues per
/// processor".
std::string to_string(const KernelGeometry& geometry);
/// A text like "sm80_bf16_d128 for 90a: tiles of ...".
std::string to_string(const Kernel& kernel);

/// The architectures of all kernels, each once, as "80;90a". What does not fit is cut off.
struct ArchitectureNames {
  char text[128] = {};
};
ArchitectureNames architectures_of(std::span<const Kernel> kernels) noexcept;

/// The first axis, from kSharedKv to kSoftcap, along which `kernel` does not serve `options`, or
/// kNone. KernelFamily::first_unserved may compare further axes.
Axis first_unserved_axis(const Kernel& kernel, const AttentionOptions& options) noexcept;
/// Whether the kernel reads kv heads two at a time in decodes. Plans with a variant, a rotation, a
/// mask of bits or batch invariance use code that does not.
bool pairs_heads(const Kernel& kernel, const AttentionOptions& options) noexcept;
/// Whether the code of the chosen kernel is compiled at run time: for variants, and on GPUs for
/// rotations, which the compiled-in kernels of the CPU can do.
bool needs_compiler(const AttentionOptions& options) noexcept;
/// Whether tensor maps can bring the keys: each page consists of whole boxes, which have 8 rows, or
/// there are no pages.
bool has_boxes(const AttentionOptions& options) noexcept;
/// KernelFamily::preference of families that are neither preferred nor avoided: always 0.
int32_t no_preference(const AttentionOptions& options, BatchKind kind) noexcept;
/// KernelFamily::scratch_bytes of kernels whose queues need no memory of their own.
std::size_t no_scratch_bytes(const Kernel& kernel, const AttentionOptions& options) noexcept;
/// KernelFamily::scratch_bytes of kernels whose queues keep the merged state of a batch-invariant
/// tile.
std::size_t merged_state_bytes(const Kernel& kernel, const AttentionOptions& options) noexcept;

/// The kernel that was chosen for a Plan and a kind of batches.
struct KernelChoice {
  Kernel kernel;
  int32_t num_ctas = 0;  // number of work queues
  /// In batch-invariant mode, the keys of a chunk. 0: a work tile has one state for all of its
  /// keys. In batch-invariant mode it then has all keys of its rows, because no row tile is cut.
  int32_t chunk_kv = 0;

  friend bool operator==(const KernelChoice&, const KernelChoice&) = default;
};

}  // namespace flashplan
