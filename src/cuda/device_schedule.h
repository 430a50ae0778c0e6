// SPDX-License-Identifier: Apache-2.0
// The schedule of a Plan in device memory. Keeps uploads and runs in their order on the device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "abi/params.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "plan/kernel/select_kernel.h"
#include "plan/schedule/schedule.h"

struct CUevent_st;

namespace flashplan::cuda {

/// The schedule lies in one device buffer at a fixed address. Each plan fills it by one copy from a
/// ring of pinned host buffers, so that plans can be made ahead of the GPU. create() allocates all
/// memory.
///
/// Uploads and runs of a Plan share the buffer and its counters, so they must follow one another on
/// the device, whichever streams they are on. On one stream they do so at no cost; a change of
/// stream costs an event. A captured run is not ordered: the caller orders its replays.
class DeviceSchedule {
 public:
  /// The number of copies that may be under way. before_upload() waits until there are fewer.
  static constexpr int32_t kStagingBuffers = 4;

  DeviceSchedule() noexcept = default;
  ~DeviceSchedule();
  DeviceSchedule(const DeviceSchedule&) = delete;
  DeviceSchedule& operator=(const DeviceSchedule&) = delete;

  /// Allocates memory for schedules up to `bounds` on `device`. `num_ctas`: the number of queues of
  /// each kernel of the plan. Called once.
  Status create(int32_t device, const ScheduleBounds& bounds, int32_t num_kv_heads,
                std::span<const int32_t> num_ctas) noexcept;

  /// Makes `stream` ready for upload(), and returns the buffer to write the schedule to. After an
  /// error nothing has changed.
  ///   kNotReady         `stream` is being captured, or would break a capture
  ///   kInvalidArgument  a stream of another device
  Status before_upload(Stream stream, ScheduleMemory* memory) noexcept;

  using Schedules = std::array<const Schedule*, KernelChoices::kMost>;
  /// Copies the schedules of the plan's kernels to the device on `stream`, from the buffer that
  /// before_upload() returned. At least one is not null. The queues of kernels without a schedule
  /// become empty. No allocation.
  Status upload(const Schedules& schedules, Stream stream) noexcept;

  /// before_run() must be called before the launches of a run, and after_run() after them, if
  /// `stream` is not being captured. The plan's device must be current.
  Status before_run(Stream stream) noexcept;
  Status after_run(Stream stream) noexcept;

  /// The addresses of the schedule of a kernel on the device. They are the same for every batch, so
  /// that a captured launch serves every later plan.
  ScheduleParams schedule(int32_t kernel) const noexcept;
  /// Sets the pointers of `kv` to memory of this schedule: first_tiles, num_tiles, states,
  /// num_left.
  void place(PreparedKv* kv) const noexcept;

 private:
  using Event = CUevent_st*;
  /// Identifies a stream. The handle is not enough: it may be reused, and 0x2 means another stream
  /// in each thread.
  struct StreamId {
    Stream handle = nullptr;
    unsigned long long number = 0;
  };

  Status enter(Stream stream) noexcept;
  Status wait_for_staging() noexcept;
  std::byte* staging() const noexcept;
  void release() noexcept;

  int32_t device_ = -1;
  // Offsets of the records in a buffer, in bytes. Merges come first and tiles last, so that one
  // copy brings all records that are used.
  std::size_t merges_ = 0;
  std::array<std::size_t, KernelChoices::kMost> starts_ = {};  // QueueStarts of each kernel
  std::array<int32_t, KernelChoices::kMost> num_ctas_ = {};
  std::size_t segments_ = 0;
  std::size_t mask_begins_ = 0;
  // If keys are prepared: where the members of PreparedKv begin.
  std::size_t num_prepared_ = 0;     // num_tiles, and first_tiles behind it
  std::size_t prepared_states_ = 0;  // num_left, and states behind it
  bool prepares_keys_ = false;
  std::size_t tiles_ = 0;
  std::size_t staging_bytes_ = 0;
  std::byte* buffer_ = nullptr;  // device memory: a schedule, then counters
  std::byte* ring_ = nullptr;    // pinned host memory, kStagingBuffers buffers
  std::array<Event, kStagingBuffers> copied_ = {};
  /// Whether the queues of each kernel in a staging buffer have work.
  std::array<std::array<bool, KernelChoices::kMost>, kStagingBuffers> has_work_ = {};
  std::size_t next_staging_ = 0;

  bool used_ = false;  // whether there was an upload
  StreamId upload_stream_;
  StreamId last_stream_;        // of the last upload or run, or of the one about to start
  Event last_event_ = nullptr;  // recorded after the last upload or run; null: none was recorded
  Event run_done_ = nullptr;
};

}  // namespace flashplan::cuda
