// SPDX-License-Identifier: Apache-2.0
// A CTA's part of a row of logits. A cluster keeps a row in the shared memory of its CTAs, so that
// the row is read from memory once. A row that does not fit is read again.
//
// Loops over the words of a part are not unrolled: a CTA runs through most of its code once, and
// fetching more instructions costs more than the loop's own instructions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/cuda/formats.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/sample/bulk_copy.h"
#include "ops/cuda/sample/cluster.h"
#include "ops/sampling_math.h"

namespace flashplan::cuda {

constexpr int kRowThreads = 384;  // threads of a CTA
constexpr int kRowWarps = kRowThreads / 32;
constexpr int kBulks = 4;        // copies that load a part, one after another
constexpr int kRowCtasOfSm = 3;  // CTAs of an SM, so that one loads while the others compute

/// The row of this CTA's cluster.
__device__ inline int32_t row_of_cluster() {
  return static_cast<int32_t>(blockIdx.x / static_cast<unsigned>(cluster_size()));
}

/// How a row is divided. Parts begin at multiples of 8 elements, so that they consist of whole
/// words.
struct RowSplit {
  int32_t part = 0;   // elements of a CTA's part
  bool held = false;  // whether the parts are kept in shared memory
};

/// The argument of a kernel that works on rows.
template <class Params>
struct RowParams {
  Params p;
  RowSplit split;
};

/// The rows of a tensor of logits or probabilities, and a bias. It has no address of one row, which
/// would take registers: these members stay in the constant memory of the kernel's parameters.
struct RowSource {
  const char* data;
  int64_t stride;     // bytes from row to row
  const float* bias;  // null: there is none
  int64_t bias_stride;
};

/// The values of a part as float32. `kHeld`: they are kept in shared memory.
template <DType kDType, bool kHeld>
class RowPart {
 public:
  __device__ RowPart(const RowSource& source, int32_t row, int32_t size, const RowSplit& split,
                     float* memory, float after_end)
      : source_(source),
        row_(row),
        memory_(memory),
        begin_(min(cluster_rank() * split.part, size)),
        count_(min(split.part, size - begin_)),
        after_end_(after_end) {}
  /// The whole row as a part, which is not held.
  __device__ RowPart(const RowSource& source, int32_t row, int32_t size, float after_end)
      : source_(source),
        row_(row),
        memory_(nullptr),
        begin_(0),
        count_(size),
        after_end_(after_end) {}

  __device__ int32_t begin() const { return begin_; }
  __device__ int32_t count() const { return count_; }

  /// If is_bulk(), starts to load the part by bulk copies, which go on while the threads do other
  /// work. finish_load() must follow in any case.
  __device__ void start_load(BulkBarrier (&arrived)[kBulks]) {
    if (!is_bulk()) return;
    if (threadIdx.x == 0) {
#pragma unroll
      for (BulkBarrier& barrier : arrived) barrier.init();
      BulkBarrier::fence_init();
      const int num_words = count_ / 4;
#pragma unroll 1
      for (int b = 0; b < kBulks; ++b) {
        const int first = b * words_of_bulk();
        const int words = min(words_of_bulk(), num_words - first);
        if (words <= 0) break;
        arrived[b].copy(memory_ + first * 4, data() + first * 4, static_cast<uint32_t>(words) * 16);
      }
    }
    __syncthreads();
  }

  /// Does what load() does, where start_load() was called before.
  template <class Body>
  __device__ void finish_load(BulkBarrier (&arrived)[kBulks], const Body& body) {
    if (!is_bulk()) {
      load(body);
      return;
    }
    const int num_words = count_ / 4;
#pragma unroll 1
    for (int b = 0; b * words_of_bulk() < num_words; ++b) {
      const int end = min((b + 1) * words_of_bulk(), num_words);
      arrived[b].wait();
#pragma unroll 1
      for (int i = b * words_of_bulk() + static_cast<int>(threadIdx.x); i < end; i += kRowThreads) {
        const float4 word = reinterpret_cast<const float4*>(memory_)[i];
        body(word.x);
        body(word.y);
        body(word.z);
        body(word.w);
      }
    }
    load_rest(num_words * 4, body);
  }

  /// Calls body(value) for each element of this thread, and keeps the values of a part that is
  /// held. Other threads may read them after a barrier.
  template <class Body>
  __device__ void load(const Body& body) {
    const int thread = static_cast<int>(threadIdx.x);
    const Storage* from = data();
    const int num_words = is_word_aligned() ? count_ / kVec : 0;
    constexpr int kUnroll = 4;  // words that a thread loads before it uses one
#pragma unroll 1
    for (int first = thread; first < num_words; first += kRowThreads * kUnroll) {
      Word<kDType, kVec> words[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int word = first + u * kRowThreads;
        if (word < num_words) {
          words[u] = __ldcs(reinterpret_cast<const Word<kDType, kVec>*>(from) + word);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int word = first + u * kRowThreads;
        if (word >= num_words) break;
        float values[kVec];
        unpack<kDType, kVec>(words[u], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) body(values[i]);
        if (kHeld) {
#pragma unroll
          for (int i = 0; i < kVec; i += 4) {
            reinterpret_cast<float4*>(memory_)[(word * kVec + i) / 4] =
                make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
          }
        }
      }
    }
    load_rest(num_words * kVec, body);
  }

  static constexpr int kVec = kWordElements<kDType>;  // elements of a word
  static constexpr int kUnroll = 6;  // words that a thread loads before it uses one
  static constexpr int kBlock = 32 * kUnroll * kVec;  // elements that a warp loads at once
  /// Reads the part up to `end`, which is a multiple of kBlock or the part's end, and keeps nothing
  /// of it. Each warp reads blocks of kBlock neighbouring elements. All its threads call
  /// body(values, i) together, with kVec values of which the first is element i; behind the part's
  /// end these are `after_end`. After each block they call end_block(block).
  template <class Body, class EndBlock>
  __device__ void stream(int32_t end, const Body& body, const EndBlock& end_block) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
    for (int block = warp; block * kBlock < end; block += kRowThreads / 32) {
      read_block(block, body);
      end_block(block);
    }
  }
  template <class Body>
  __device__ void stream(int32_t end, const Body& body) const {
    stream(end, body, [](int /*block*/) {});
  }

  /// Reads one block, as stream() does. The threads of one warp call it.
  template <class Body>
  __device__ void read_block(int block, const Body& body) const {
    const int first = block * kBlock + static_cast<int>(threadIdx.x) % 32 * kVec;
    if (!has_words(block * kBlock, kBlock)) {
#pragma unroll 1
      for (int u = 0; u < kUnroll; ++u) {
        const int i = first + u * 32 * kVec;
        float values[kVec];
        read_elements(i, values);
        body(values, i);
      }
      return;
    }
    Word<kDType, kVec> words[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) words[u] = __ldcs(words_at(first) + u * 32);
    __syncwarp();  // without it, the compiler loads some words only after the first has come
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float values[kVec];
      unpack<kDType, kVec>(words[u], values);
      body(values, first + u * 32 * kVec);
    }
  }

  /// Whether `count` elements from element `first` on are whole words of memory.
  __device__ bool has_words(int first, int count) const {
    return is_word_aligned() && first + count <= count_;
  }
  /// The words from element i on, which is the first of a word. See has_words().
  __device__ const Word<kDType, kVec>* words_at(int i) const {
    return reinterpret_cast<const Word<kDType, kVec>*>(data() + i);
  }
  /// Reads kVec elements, from any element i on. Those past the part's end are `after_end`.
  __device__ void read_elements(int i, float (&values)[kVec]) const {
#pragma unroll
    for (int e = 0; e < kVec; ++e) values[e] = i + e < count_ ? read(i + e) : after_end_;
  }

  /// Starts to fetch the first `count` elements of the part into L2. One thread calls it.
  __device__ void prefetch(int32_t count) const {
    if (is_word_aligned()) bulk_prefetch(data(), min(count, count_) / kVec * 16);
  }

  /// Elements i to i + 3 of the part, where i is a multiple of 4; `after_end` in place of elements
  /// after its end.
  __device__ float4 word(int32_t i) const {
    if (kHeld) return *reinterpret_cast<const float4*>(memory_ + i);
    const auto at = [&](int32_t e) { return e < count_ ? read(e) : after_end_; };
    return make_float4(at(i), at(i + 1), at(i + 2), at(i + 3));
  }

  /// Element i of the part; -0 becomes +0.
  __device__ float at(int32_t i) const { return __fadd_rn(kHeld ? memory_[i] : read(i), 0.0F); }
  /// Replaces elements i to i + 3 of a part that is held.
  __device__ void replace(int32_t i, const float4& values) {
    *reinterpret_cast<float4*>(memory_ + i) = values;
  }
  __device__ float after_end() const { return after_end_; }

 private:
  using Storage = typename Format<kDType>::Storage;

  __device__ bool is_word_aligned() const {
    return source_.bias == nullptr && (reinterpret_cast<uint64_t>(data()) & 15) == 0;
  }
  /// Whether bulk copies can load the part: they convert nothing and add no bias.
  __device__ bool is_bulk() const {
    return kHasBulkCopies && kHeld && kDType == DType::kFloat32 && is_word_aligned();
  }
  /// Words of one bulk copy: equally many for each thread.
  __device__ int words_of_bulk() const {
    constexpr int kThreadsOfAll = kRowThreads * kBulks;
    return (count_ / 4 + kThreadsOfAll - 1) / kThreadsOfAll * kRowThreads;
  }

  /// Loads the elements from `first` on, and fills up the last word of a held part with after_end_.
  template <class Body>
  __device__ void load_rest(int first, const Body& body) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int i = first + thread; i < count_; i += kRowThreads) {
      const float value = read(i);
      body(value);
      if (kHeld) memory_[i] = value;
    }
    const int end = (count_ + 3) / 4 * 4;
    if (kHeld && thread < end - count_) memory_[count_ + thread] = after_end_;
  }

  __device__ const Storage* data() const {
    return reinterpret_cast<const Storage*>(source_.data + row_ * source_.stride) + begin_;
  }

  __device__ float read(int32_t i) const {
    const float value = Format<kDType>::load(data()[i]);
    if (source_.bias == nullptr) return value;
    return __fadd_rn(value, source_.bias[row_ * source_.bias_stride + begin_ + i]);
  }

  RowSource source_;
  int32_t row_;
  float* memory_;
  int32_t begin_;
  int32_t count_;
  float after_end_;
};

/// What a GPU allows the CTAs that share a row.
struct RowLimits {
  int max_cluster;   // CTAs of a row
  int32_t max_held;  // elements that a CTA keeps in shared memory
};

/// Elements of 96 KB, so that an SM has memory for two CTAs (but not for two of the very longest
/// rows, which are shared by 16 CTAs).
constexpr int32_t kMaxHeld = 32 * sampling::kBlock;

inline RowLimits row_limits(Device device) noexcept {
  const int major = device_facts(device.index).major;
  // Before 9.0 there are no clusters, and SMs may have 100 KB of shared memory, of which two CTAs
  // hold 39 KB each. From 12.0 on a CTA has at most 99 KB, and it may be that clusters have no more
  // CTAs than all GPUs allow.
  if (major < 9) return {1, 13 * sampling::kBlock};
  if (major >= 12) return {kMaxCluster / 2, 26 * sampling::kBlock};
  return {kMaxCluster, kMaxHeld};
}
inline bool has_clusters(Device device) noexcept { return row_limits(device).max_cluster > 1; }
inline int num_sms(Device device) noexcept { return device_facts(device.index).num_sms; }

/// How many CTAs share a row that they hold: the smallest number, from `least` on, that can hold
/// the row. It is doubled while CTAs have more than kElementsOfCta elements and the launch has at
/// most `most_of_launch` CTAs.
inline int ctas_that_hold(int32_t num_rows, int32_t vocab, Device device, int most_of_launch,
                          int least = 1) {
  // If a CTA had fewer elements than these, the exchanges in the larger cluster would cost more
  // time than its CTAs save.
  constexpr int32_t kElementsOfCta = 8 * 1024;
  const RowLimits limits = row_limits(device);
  int ctas = std::min(least, limits.max_cluster);
  while (ctas < limits.max_cluster &&
         (vocab > ctas * limits.max_held ||
          (vocab > ctas * kElementsOfCta && int64_t{num_rows} * ctas * 2 <= most_of_launch))) {
    ctas *= 2;
  }
  return ctas;
}

/// How launch_rows() divides rows.
struct RowDivision {
  int cluster;            // CTAs of a row
  int bytes_of_rank = 0;  // shared memory behind a part, in bytes for each CTA of the cluster
  int32_t multiple = 8;   // divides the number of elements of a part; a multiple of 8 itself
};

/// The grid for rows of `vocab` elements: a cluster of CTAs for each row. The dynamic shared memory
/// of a CTA begins with its part, if parts are held.
inline Grid split_rows(int32_t num_rows, int32_t vocab, Device device, const RowDivision& division,
                       RowSplit* split) {
  const int cluster = division.cluster;
  const int32_t part = static_cast<int32_t>((int64_t{vocab} + cluster - 1) / cluster);
  split->part = (part + division.multiple - 1) / division.multiple * division.multiple;
  split->held = split->part <= row_limits(device).max_held;
  const int held_bytes = split->held ? split->part * static_cast<int>(sizeof(float)) : 0;
  return {.ctas = dim3(static_cast<unsigned>(cluster) * static_cast<unsigned>(num_rows)),
          .threads = dim3(kRowThreads),
          .cluster = has_clusters(device) ? cluster : 0,
          .smem_bytes = held_bytes + cluster * division.bytes_of_rank};
}

/// A kernel for parts that are held in shared memory, and one for parts that are read again.
template <class Params>
struct RowKernels {
  void (*held)(RowParams<Params>);
  void (*read_again)(RowParams<Params>);
};

/// Launches a kernel on the grid of split_rows().
template <class Params>
Status launch_rows(const RowKernels<Params>& kernels, const Params& p, Device device, Stream stream,
                   const RowDivision& division) noexcept {
  RowParams<Params> params{p, {}};
  const Grid grid = split_rows(p.num_rows, p.vocab, device, division, &params.split);
  return launch(params.split.held ? kernels.held : kernels.read_again, grid, device, stream,
                params);
}

}  // namespace flashplan::cuda
