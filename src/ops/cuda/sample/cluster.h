// SPDX-License-Identifier: Apache-2.0
// A cluster of CTAs that share a row. GPUs before compute capability 9.0 have no clusters; there a
// cluster is one CTA.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace flashplan::cuda {

constexpr int kMaxCluster = 16;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ inline int cluster_size() {
  return static_cast<int>(cooperative_groups::this_cluster().num_blocks());
}
__device__ inline int cluster_rank() {
  return static_cast<int>(cooperative_groups::this_cluster().block_rank());
}
/// The two halves of a barrier of all threads of the cluster. It does not make their writes to
/// memory visible, and so does not wait for these.
__device__ inline void cluster_arrive_relaxed() {
#ifdef __CUDA_ARCH__
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#else
  cooperative_groups::this_cluster().barrier_arrive();
#endif
}
__device__ inline void cluster_wait() { cooperative_groups::this_cluster().barrier_wait(); }
#else
__device__ inline int cluster_size() { return 1; }
__device__ inline int cluster_rank() { return 0; }
__device__ inline void cluster_arrive_relaxed() {}
__device__ inline void cluster_wait() { __syncthreads(); }
#endif

__device__ inline bool is_first_thread_of_cluster() {
  return cluster_rank() == 0 && threadIdx.x == 0;
}

}  // namespace flashplan::cuda
