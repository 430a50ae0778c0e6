// SPDX-License-Identifier: Apache-2.0
#include "plan/kernel/kernel.h"

#include <algorithm>
#include <cstdio>

#include "common/error.h"
#include "flashplan/plan.h"

namespace flashplan {

Axis first_unserved_axis(const Kernel& kernel, const AttentionOptions& options) noexcept {
  if (options.shared_kv != kernel.family->shared_kv) return Axis::kSharedKv;
  if (kernel.q_dtype != options.q_dtype && kernel.narrow_q_dtype != options.q_dtype) {
    return Axis::kQDType;
  }
  if (kernel.kv_dtype != options.kv_dtype) return Axis::kKvDType;
  if (kernel.head_dim_qk < options.head_dim_qk || kernel.head_dim_vo < options.head_dim_vo) {
    return Axis::kHeadDim;
  }
  return kernel.softcap == (options.softcap > 0.0F) ? Axis::kNone : Axis::kSoftcap;
}

bool pairs_heads(const Kernel& kernel, const AttentionOptions& options) noexcept {
  const int32_t dims = kernel.geometry.paired_dims;
  return options.head_dim_qk == dims && options.head_dim_vo == dims &&
         options.variant.impl() == nullptr && !options.rope && !options.batch_invariant &&
         !options.custom_mask;
}

bool needs_compiler(const AttentionOptions& options) noexcept {
  return !options.variant.empty() || (options.rope && options.device.type != DeviceType::kCpu);
}

bool has_boxes(const AttentionOptions& options) noexcept {
  constexpr int32_t kBoxRows = 8;
  return options.page_size % kBoxRows == 0;
}

int32_t no_preference(const AttentionOptions& /*options*/, BatchKind /*kind*/) noexcept {
  return 0;
}

std::size_t no_scratch_bytes(const Kernel& /*kernel*/,
                             const AttentionOptions& /*options*/) noexcept {
  return 0;
}

std::size_t merged_state_bytes(const Kernel& kernel, const AttentionOptions& options) noexcept {
  // Only batch-invariant kernels need this memory: the states of chunks are merged into it, one
  // after the other. Each thread merges four dims of a row, and keeps its own copy of the row's
  // maximum and sum beside them.
  if (!options.batch_invariant) return 0;
  const auto quads = static_cast<std::size_t>(kernel.geometry.tile_q) *
                     static_cast<std::size_t>(kernel.head_dim_vo) / 4;
  const std::size_t bytes = quads * (4 + 2) * sizeof(float);
  return (bytes + 15) / 16 * 16;
}

ArchitectureNames architectures_of(std::span<const Kernel> kernels) noexcept {
  ArchitectureNames names;
  std::size_t used = 0;
  for (const Kernel& kernel : kernels) {
    const Architecture architecture = kernel.architecture;
    if (&kernel != &*std::ranges::find(kernels, architecture, &Kernel::architecture)) continue;
    const int length =
        std::snprintf(names.text + used, sizeof(names.text) - used, "%s%d%.1s", used > 0 ? ";" : "",
                      architecture.number, &architecture.suffix);
    used = std::min(used + static_cast<std::size_t>(length), sizeof(names.text) - 1);
  }
  return names;
}

std::string to_string(const KernelGeometry& geometry) {
  std::string rows;
  std::string stages;
  for (const KernelBody& body : geometry.bodies) {
    if (body.rows == 0) break;
    const char* separator = rows.empty() ? "" : "/";
    rows.append(separator).append(std::to_string(body.rows));
    stages.append(separator).append(std::to_string(body.stages));
  }
  std::string text = "tiles of ";
  text.append(rows).append(" rows x ").append(std::to_string(geometry.tile_kv)).append(" keys");
  if (geometry.threads > 0) {
    text.append(", ").append(stages).append(" stages, ").append(std::to_string(geometry.threads));
    text.append(" threads, ").append(std::to_string(geometry.smem_bytes / 1024)).append(" KB");
  }
  if (geometry.ctas_of_queue > 1) {
    text.append(", ").append(std::to_string(geometry.ctas_of_queue)).append(" CTAs per queue");
  }
  text.append(", ").append(std::to_string(geometry.queues_per_processor));
  return text.append(" queues per processor");
}

std::string to_string(const Kernel& kernel) {
  const bool on_cpu = kernel.architecture.number == 0;
  std::string text(kernel.name);
  text.append(" for ").append(on_cpu ? "cpu" : architectures_of({&kernel, 1}).text);
  return text.append(": ").append(to_string(kernel.geometry));
}

}  // namespace flashplan
