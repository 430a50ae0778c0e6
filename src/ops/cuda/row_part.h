// SPDX-License-Identifier: Apache-2.0
// A CTA's part of a row of logits. A cluster keeps a row in the shared memory of its CTAs, so that
// the row is read from memory once. A row that does not fit is read again.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/cluster.h"
#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"

namespace flashplan::cuda {

constexpr int kRowThreads = 512;  // of a CTA
constexpr int kRowWarps = kRowThreads / 32;

/// The row of this CTA's cluster.
__device__ inline int32_t row_of_cluster() {
  return static_cast<int32_t>(blockIdx.x / static_cast<unsigned>(cluster_size()));
}

/// How a row is divided. Parts begin at multiples of 8 elements, so that they consist of whole
/// words.
struct RowSplit {
  int32_t part = 0;   // elements of a CTA
  bool held = false;  // whether the parts are kept in shared memory
};

/// The values of a part as float32. All threads of the cluster call load() together. It ends with a
/// barrier, after which all CTAs have started, so that their shared memory can be written to.
template <DType kDType>
class RowPart {
 public:
  __device__ RowPart(const char* row, const float* bias, int32_t size, const RowSplit& split,
                     float* memory)
      : row_(reinterpret_cast<const Storage*>(row)),
        bias_(bias),
        memory_(memory),
        begin_(min(cluster_rank() * split.part, size)),
        count_(min(split.part, size - begin_)),
        held_(split.held) {}

  __device__ int32_t begin() const { return begin_; }
  __device__ int32_t count() const { return count_; }

  /// Calls body(value) for each element of this thread, and keeps the values if the part is held.
  template <class Body>
  __device__ void load(const Body& body) {
    constexpr int kVec = kWordElements<kDType>;
    const int thread = static_cast<int>(threadIdx.x);
    const bool by_word = bias_ == nullptr && (reinterpret_cast<uint64_t>(row_ + begin_) & 15) == 0;
    const int num_words = by_word ? count_ / kVec : 0;
    constexpr int kUnroll = 4;
    for (int first = thread; first < num_words; first += kRowThreads * kUnroll) {
      Word<kDType, kVec> words[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int word = first + u * kRowThreads;
        if (word < num_words) {
          words[u] = __ldcs(reinterpret_cast<const Word<kDType, kVec>*>(row_ + begin_) + word);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int word = first + u * kRowThreads;
        if (word >= num_words) break;
        float values[kVec];
        unpack<kDType, kVec>(words[u], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          values[i] = __fadd_rn(values[i], 0.0F);  // -0 becomes +0
          body(values[i]);
        }
        if (held_) {
#pragma unroll
          for (int i = 0; i < kVec; i += 4) {
            reinterpret_cast<float4*>(memory_)[(word * kVec + i) / 4] =
                make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
          }
        }
      }
    }
    for (int i = num_words * kVec + thread; i < count_; i += kRowThreads) {
      const float value = read(i);
      body(value);
      if (held_) memory_[i] = value;
    }
    cluster_sync();
  }

  __device__ bool is_held() const { return held_; }

  /// Replaces element i of a part that is held.
  __device__ void set(int32_t i, float value) { memory_[i] = value; }

  /// Element i of the part.
  __device__ float at(int32_t i) const { return held_ ? memory_[i] : read(i); }

 private:
  using Storage = typename Format<kDType>::Storage;

  __device__ float read(int32_t i) const {
    float value = Format<kDType>::load(row_[begin_ + i]);
    if (bias_ != nullptr) value = __fadd_rn(value, bias_[begin_ + i]);
    return __fadd_rn(value, 0.0F);
  }

  const Storage* row_;
  const float* bias_;
  float* memory_;
  int32_t begin_;
  int32_t count_;
  bool held_;
};

/// The grid for rows of `vocab` elements: a cluster for each row, whose size depends on the length
/// of the row.
inline Grid split_rows(int32_t num_rows, int32_t vocab, Device device, RowSplit* split) {
  // With fewer elements for each CTA, the barriers of a larger cluster cost more than it saves.
  constexpr int32_t kElementsOfCta = 8 * 1024;
  constexpr int32_t kMaxHeld = 24 * 1024;  // 96 KB, so that two CTAs fit on an SM
  const bool has_clusters = device_facts(device.index).major >= 9;
  int cluster = 1;
  while (has_clusters && cluster < kMaxCluster && vocab > cluster * kElementsOfCta) cluster *= 2;
  const int32_t part = static_cast<int32_t>((int64_t{vocab} + cluster - 1) / cluster);
  split->part = (part + 7) / 8 * 8;
  // GPUs without clusters may have 100 KB for an SM, in which 40 KB fit twice.
  const int32_t most = has_clusters ? kMaxHeld : 10 * 1024;
  split->held = split->part <= most;
  return {.ctas = dim3(static_cast<unsigned>(cluster) * static_cast<unsigned>(num_rows)),
          .threads = dim3(kRowThreads),
          .cluster = cluster,
          .smem_bytes = split->held ? split->part * static_cast<int>(sizeof(float)) : 0};
}

}  // namespace flashplan::cuda
