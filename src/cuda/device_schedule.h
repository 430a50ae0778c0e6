// SPDX-License-Identifier: Apache-2.0
// The schedule of a Plan in device memory, and the order of everything that touches it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "abi/params.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "plan/schedule.h"

struct CUevent_st;

namespace flashplan::cuda {

/// One buffer at fixed addresses, filled by one copy per plan from a ring of pinned host buffers,
/// so that plans may be made ahead of the GPU. All memory is allocated by create().
///
/// Uploads and runs of a Plan are one after another on the device, whichever streams they are on:
/// they share the buffer and its counters. On one stream that costs nothing; a change of stream
/// costs an event. A run that is being captured takes no part in this.
class DeviceSchedule {
 public:
  /// Plans that may be made ahead: only if so many copies are under way, before_upload() waits.
  static constexpr int32_t kStagingBuffers = 4;

  DeviceSchedule() noexcept = default;
  ~DeviceSchedule();
  DeviceSchedule(const DeviceSchedule&) = delete;
  DeviceSchedule& operator=(const DeviceSchedule&) = delete;

  /// Allocates for schedules up to `bounds` on `device`. Called once.
  Status create(int32_t device, const ScheduleBounds& bounds, int32_t num_ctas) noexcept;

  /// Makes `stream` ready for upload(), and gives the buffer that the schedule is to be written to;
  /// or refuses before anything has changed.
  ///   kNotReady         a capture is under way
  ///   kInvalidArgument  a stream of another device
  Status before_upload(Stream stream, ScheduleMemory* memory) noexcept;

  /// Copies `schedule`, which is in that buffer, to the device on `stream`. No allocation.
  Status upload(const Schedule& schedule, Stream stream) noexcept;

  /// Around a launch on a stream that is not being captured; the plan's device is current.
  Status before_run(Stream stream) noexcept;
  Status after_run(Stream stream) noexcept;

  /// Where the schedule lies on the device: the same for every batch, so that a captured launch
  /// serves every later plan. Only addresses are set.
  ScheduleParams schedule() const noexcept;

 private:
  using Event = CUevent_st*;
  /// A handle alone would not do: it may be reused, and 0x2 is another stream in each thread.
  struct StreamId {
    Stream handle = nullptr;
    unsigned long long number = 0;
  };

  Status enter(Stream stream) noexcept;
  Status wait_for_staging() noexcept;
  std::byte* staging() const noexcept;
  void release() noexcept;

  int32_t device_ = -1;
  // Offsets in bytes; the merges come first, the tiles last.
  std::size_t merges_ = 0;
  std::size_t starts_ = 0;
  std::size_t segments_ = 0;
  std::size_t mask_begins_ = 0;
  std::size_t tiles_ = 0;
  std::size_t staging_bytes_ = 0;
  std::byte* buffer_ = nullptr;  // device memory: a schedule, then the counters of arrivals
  std::byte* ring_ = nullptr;    // pinned host memory, kStagingBuffers buffers
  std::array<Event, kStagingBuffers> copied_ = {};
  std::size_t next_staging_ = 0;

  bool used_ = false;  // by an upload
  StreamId upload_stream_;
  StreamId last_stream_;        // of the last upload or run, or that about to be
  Event last_event_ = nullptr;  // recorded after it, or null if none has been so far
  Event run_done_ = nullptr;
};

}  // namespace flashplan::cuda
