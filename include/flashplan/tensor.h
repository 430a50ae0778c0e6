// SPDX-License-Identifier: Apache-2.0
// Element types, devices and the non-owning tensor that every call takes.
#pragma once

#include <cstdint>
#ifndef __CUDACC_RTC__  // NVRTC has no C++ standard library
#include <initializer_list>
#endif

// The driver's stream type. Declared here so that no CUDA header is needed: a cudaStream_t or a
// CUstream converts without a cast.
struct CUstream_st;

namespace flashplan {

using Stream = CUstream_st*;

enum class DType : int32_t {
  kFloat32 = 0,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,  // "float8_e4m3fn": finite, no infinity, NaN = 0x7f
  kFloat8E5M2,
  kInt32,  // kInt32 and kInt64: indices only
  kInt64,
  kUInt32,  // words of masks only
  /// "fp8_ds_mla", the bytes of DeepSeek V3.2's keys. A key has 656: 512 float8_e4m3fn, 4 float32
  /// scales, each for 128 of these, and 64 bfloat16. Only in caches with shared_kv.
  kFp8DsMla,
};

/// The numbers of a key in an fp8_ds_mla cache: its bytes, its dims that have scales, and all of
/// its dims.
constexpr int32_t kDsMlaBytes = 656;
constexpr int32_t kDsMlaScaledDims = 512;
constexpr int32_t kDsMlaDims = 576;

/// Bytes of one element.
constexpr int64_t item_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kInt64: return 8;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kFp8DsMla: return 1;
  }
  return 1;  // for a number that is no DType; every call refuses it
}

enum class DeviceType : int32_t { kCpu = 0, kCuda = 1 };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;

  friend constexpr bool operator==(Device a, Device b) noexcept {
    return a.type == b.type && a.index == b.index;
  }
  friend constexpr bool operator!=(Device a, Device b) noexcept { return !(a == b); }
};

constexpr int kMaxRank = 4;

/// A strided view of the caller's memory; contiguous() makes a view of memory without gaps. It owns
/// nothing. The memory must live until the call returns (on CUDA: until the stream has done the
/// work).
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  int32_t rank = 0;
  int64_t shape[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};  // in elements; the last must be 1 unless noted
  bool read_only = false;         // calls refuse the view as an output

  /// An argument that was not given.
  constexpr bool empty() const noexcept { return rank == 0; }
};

#ifndef __CUDACC_RTC__
/// A row-major view without gaps. More than kMaxRank sizes give a rank that every call refuses.
inline TensorView contiguous(void* data, DType dtype, Device device,
                             std::initializer_list<int64_t> shape) noexcept {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int32_t>(shape.size());
  int32_t d = 0;
  for (const int64_t size : shape) {
    if (d == kMaxRank) break;
    view.shape[d++] = size;
  }
  int64_t stride = 1;
  while (d > 0) {
    --d;
    view.stride[d] = stride;
    // The product is unsigned, because it may overflow.
    stride =
        static_cast<int64_t>(static_cast<uint64_t>(stride) * static_cast<uint64_t>(view.shape[d]));
  }
  return view;
}

/// A read-only row-major view without gaps: calls refuse it as an output.
inline TensorView contiguous(const void* data, DType dtype, Device device,
                             std::initializer_list<int64_t> shape) noexcept {
  TensorView view = contiguous(const_cast<void*>(data), dtype, device, shape);
  view.read_only = true;
  return view;
}
#endif

}  // namespace flashplan
