// SPDX-License-Identifier: Apache-2.0
// The ways in which sample() draws on CUDA. The kernels of each way are in a file of their own, so
// that several compilers work on them at the same time.
#pragma once

#include <cstdint>

#include "ops/cuda/launch.h"
#include "ops/cuda/sample/row_part.h"
#include "ops/operators.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {

/// Draws without filters, or takes each row's largest logit. A row has at most kMostEntries blocks.
template <DType kDType>
Status sample_plain(const SampleParams& p, Device device, Stream stream) noexcept;
/// Draws with top-p or a large top-k alone, or without filters. is_countable() must be true.
template <DType kDType>
Status sample_counted(const SampleParams& p, Device device, Stream stream) noexcept;
/// Draws from logits, with filters that are likely to keep few tokens: one CTA for each row reads
/// the row without holding it. A row has at most kMostEntries blocks.
template <DType kDType>
Status sample_stream(const SampleParams& p, Device device, Stream stream) noexcept;
/// Draws with any filters: a cluster holds the row in its shared memory.
template <DType kDType>
Status sample_cluster(const SampleParams& p, Device device, Stream stream) noexcept;

/// Elements that give each warp of a CTA one block. A CTA with fewer is not worth its exchanges.
constexpr int32_t kLeastOfCta = kRowWarps * sampling::kBlock;

/// How many CTAs share a row that is read once. A row gets several only if the launch then has at
/// most one CTA for each SM, and if there are blocks for the warps of all of them.
inline int ctas_of_row(const SampleParams& p, Device device) noexcept {
  const int max_cluster = row_limits(device).max_cluster;
  int ctas = 1;
  while (ctas < max_cluster && p.vocab > ctas * kLeastOfCta &&
         int64_t{p.num_rows} * ctas * 2 <= num_sms(device)) {
    ctas *= 2;
  }
  return ctas;
}
inline Grid grid_of_rows(const SampleParams& p, int cluster, Device device, int smem_bytes = 0) {
  return {.ctas = dim3(static_cast<unsigned>(p.num_rows) * static_cast<unsigned>(cluster)),
          .threads = dim3(kRowThreads),
          .cluster = has_clusters(device) ? cluster : 0,
          .smem_bytes = smem_bytes};
}

}  // namespace flashplan::cuda
