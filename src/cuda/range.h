// SPDX-License-Identifier: Apache-2.0
// Ranges of NVTX, by which profilers such as Nsight Systems show the calls of the library.
// nvtx/present.cpp makes them; in a build that finds no header of NVTX, nvtx/absent.cpp does
// nothing.
#pragma once

namespace flashplan::cuda {

/// A range on the calling thread until the end of the scope. Where no profiler listens it takes a
/// few nanoseconds.
class Range {
 public:
  explicit Range(const char* name) noexcept;
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace flashplan::cuda
