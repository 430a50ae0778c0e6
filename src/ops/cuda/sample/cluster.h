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
/// The two halves of a barrier of all threads of the cluster. What a thread wrote to shared memory
/// before it arrived is visible to all threads that have waited.
__device__ inline void cluster_arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
__device__ inline void cluster_wait() { cooperative_groups::this_cluster().barrier_wait(); }
/// cluster_arrive() where nothing that was written need be visible: it does not wait for memory.
__device__ inline void cluster_arrive_relaxed() {
#ifdef __CUDA_ARCH__
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#else
  cluster_arrive();
#endif
}
/// The address, in the shared memory of CTA `rank`, of the variable that is `own` in this CTA.
template <class T>
__device__ T* shared_of(T* own, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(own, rank);
}
#else
__device__ inline int cluster_size() { return 1; }
__device__ inline int cluster_rank() { return 0; }
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_arrive_relaxed() {}
__device__ inline void cluster_wait() { __syncthreads(); }
template <class T>
__device__ T* shared_of(T* own, int /*rank*/) {
  return own;
}
#endif

__device__ inline bool is_first_thread_of_cluster() {
  return cluster_rank() == 0 && threadIdx.x == 0;
}

__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

}  // namespace flashplan::cuda
