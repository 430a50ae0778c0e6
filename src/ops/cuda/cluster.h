// SPDX-License-Identifier: Apache-2.0
// A cluster of CTAs that share a row. GPUs before compute capability 9.0 have no clusters; there a
// cluster is one CTA.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace flashplan::cuda {

constexpr int kMaxCluster = 8;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ inline int cluster_size() {
  return static_cast<int>(cooperative_groups::this_cluster().num_blocks());
}
__device__ inline int cluster_rank() {
  return static_cast<int>(cooperative_groups::this_cluster().block_rank());
}
/// A barrier of all threads of the cluster. It makes their earlier writes to shared memory visible.
__device__ inline void cluster_sync() { cooperative_groups::this_cluster().sync(); }
/// The address, in the shared memory of CTA `rank`, of the variable that is `own` in this CTA.
template <class T>
__device__ T* shared_of(T* own, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(own, rank);
}
#else
__device__ inline int cluster_size() { return 1; }
__device__ inline int cluster_rank() { return 0; }
__device__ inline void cluster_sync() { __syncthreads(); }
template <class T>
__device__ T* shared_of(T* own, int /*rank*/) {
  return own;
}
#endif

}  // namespace flashplan::cuda
