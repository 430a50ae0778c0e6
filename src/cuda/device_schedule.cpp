// SPDX-License-Identifier: Apache-2.0
#include "cuda/device_schedule.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "cuda/device.h"
#include "cuda/runtime.h"

namespace flashplan::cuda {
namespace {

Status check_no_capture(Stream stream) noexcept {
  bool capturing = false;
  FLASHPLAN_RETURN_IF_ERROR(is_capturing(stream, &capturing));
  if (!capturing) return {};
  return error(StatusCode::kNotReady,
               "stream: expected no capture under way, got a capturing stream");
}

/// Writes the QueueStarts of a schedule. `tiles`: where the work tiles of all schedules begin.
/// `first_prepared`: the first prepared tile of each segment; null: nothing is prepared.
void write_starts(const Schedule& schedule, const WorkTile* tiles, const int32_t* first_prepared,
                  QueueStart* starts) {
  const auto tiles_before = static_cast<int32_t>(schedule.tiles.data() - tiles);
  const auto last = static_cast<int32_t>(schedule.tiles.size()) - 1;
  for (std::size_t cta = 0; cta + 1 < schedule.cta_indptr.size(); ++cta) {
    QueueStart& start = starts[cta];
    const int32_t begin = schedule.cta_indptr[cta];
    start.begin = tiles_before + begin;
    start.end = tiles_before + schedule.cta_indptr[cta + 1];
    start.first_prepared[0] = kNotPrepared;
    if (last < 0) continue;
    // Two tiles are always copied. If the queue has fewer, any other tile takes the free place,
    // because kernels use none beyond the queue's end.
    for (int32_t i = 0; i < 2; ++i) {
      const WorkTile& tile = schedule.tiles[static_cast<std::size_t>(std::min(begin + i, last))];
      start.tiles[i] = tile;
      start.segments[i] = schedule.segments[static_cast<std::size_t>(tile.segment)];
      start.first_prepared[i] =
          first_prepared != nullptr ? first_prepared[tile.segment] : kNotPrepared;
    }
  }
}

}  // namespace

DeviceSchedule::~DeviceSchedule() { release(); }

Status DeviceSchedule::create(int32_t device, const ScheduleBounds& bounds, int32_t num_kv_heads,
                              std::span<const int32_t> num_ctas) noexcept {
  const auto add = [this](int32_t count, std::size_t item) {
    constexpr std::size_t kAlignment = 128;
    const std::size_t offset = staging_bytes_;
    staging_bytes_ += (static_cast<std::size_t>(count) * item + kAlignment - 1) & -kAlignment;
    return offset;
  };
  merges_ = add(bounds.merges, sizeof(Merge));
  for (std::size_t i = 0; i < num_ctas.size(); ++i) {
    num_ctas_[i] = num_ctas[i];
    starts_[i] = add(num_ctas[i], sizeof(QueueStart));
  }
  segments_ = add(bounds.segments, sizeof(Segment));
  mask_begins_ = add(bounds.mask_begins, sizeof(int32_t));
  prepares_keys_ = bounds.prepared_tiles > 0;
  if (prepares_keys_) {
    num_prepared_ = add(1 + bounds.segments, sizeof(int32_t));
  }
  tiles_ = add(bounds.work_tiles, sizeof(WorkTile));
  const std::size_t arrivals = static_cast<std::size_t>(bounds.merges) * sizeof(Arrivals);
  std::size_t counters = arrivals;
  if (prepares_keys_) {
    // A warp loads the states of 32 tiles at once, and may begin at the last tile. The states of
    // 32 more tiles are allocated, so that the warp reads nothing behind the array.
    const auto tiles = static_cast<std::size_t>(bounds.prepared_tiles) + 32;
    counters = (arrivals + alignof(PreparedState) - 1) & -alignof(PreparedState);
    prepared_states_ = staging_bytes_ + counters;
    counters += (1 + tiles * static_cast<std::size_t>(num_kv_heads)) * sizeof(PreparedState);
  }

  const DeviceGuard guard(device);
  FLASHPLAN_RETURN_IF_ERROR(guard.status());
  const ApartFromCaptures apart;
  device_ = device;  // from here on the destructor frees what was allocated
  void* memory = nullptr;
  FLASHPLAN_CUDA_CALL(cudaMalloc, &memory, staging_bytes_ + counters);
  buffer_ = static_cast<std::byte*>(memory);
  // The counters are zero between runs, because the CTA that arrives last resets them. So they are
  // set to zero only here.
  FLASHPLAN_CUDA_CALL(cudaMemset, buffer_ + staging_bytes_, 0, counters);
  FLASHPLAN_CUDA_CALL(cudaStreamSynchronize, nullptr);
  FLASHPLAN_CUDA_CALL(cudaHostAlloc, &memory, kStagingBuffers * staging_bytes_,
                      cudaHostAllocDefault);
  ring_ = static_cast<std::byte*>(memory);
  // An upload also copies unused records, which no kernel reads but which should be defined.
  std::memset(ring_, 0, kStagingBuffers * staging_bytes_);
  for (Event& event : copied_) {
    FLASHPLAN_CUDA_CALL(cudaEventCreateWithFlags, &event, cudaEventDisableTiming);
  }
  FLASHPLAN_CUDA_CALL(cudaEventCreateWithFlags, &run_done_, cudaEventDisableTiming);
  return {};
}

void DeviceSchedule::release() noexcept {
  if (device_ < 0) return;
  const DeviceGuard guard(device_);
  const ApartFromCaptures apart;
  // cudaFree waits until the device no longer uses the memory.
  if (buffer_ != nullptr) succeeded(cudaFree(buffer_));
  if (ring_ != nullptr) succeeded(cudaFreeHost(ring_));
  for (const Event event : copied_) {
    if (event != nullptr) succeeded(cudaEventDestroy(event));
  }
  if (run_done_ != nullptr) succeeded(cudaEventDestroy(run_done_));
}

// Makes `stream` wait for the last upload or run, if that was on another stream.
Status DeviceSchedule::enter(Stream stream) noexcept {
  StreamId id{stream};
  FLASHPLAN_CUDA_CALL(cudaStreamGetId, stream, &id.number);
  if (used_ && id.number == last_stream_.number) return {};
  int on_device = -1;
  FLASHPLAN_CUDA_CALL(cudaStreamGetDevice, stream, &on_device);
  if (on_device != device_) {
    return error(StatusCode::kInvalidArgument,
                 "stream: expected a stream of cuda:%d, got one of cuda:%d", device_, on_device);
  }
  if (used_) {
    if (last_event_ == nullptr) {
      FLASHPLAN_RETURN_IF_ERROR(check_no_capture(last_stream_.handle));
      FLASHPLAN_CUDA_CALL(cudaEventRecord, run_done_, last_stream_.handle);
      last_event_ = run_done_;
    }
    FLASHPLAN_CUDA_CALL(cudaStreamWaitEvent, stream, last_event_, 0);
  }
  last_stream_ = id;
  return {};
}

std::byte* DeviceSchedule::staging() const noexcept {
  return ring_ + next_staging_ * staging_bytes_;
}

// Copies finish in the order of their starts, so the next buffer is the first to be free.
Status DeviceSchedule::wait_for_staging() noexcept {
  const ApartFromCaptures apart;
  const Event copied = copied_[next_staging_];
  const cudaError_t state = cudaEventQuery(copied);
  if (succeeded(state)) return {};
  if (state != cudaErrorNotReady) return cuda_error("cudaEventQuery", state);
  FLASHPLAN_CUDA_CALL(cudaEventSynchronize, copied);
  return {};
}

Status DeviceSchedule::before_upload(Stream stream, ScheduleMemory* memory) noexcept {
  const DeviceGuard guard(device_);
  FLASHPLAN_RETURN_IF_ERROR(guard.status());
  FLASHPLAN_RETURN_IF_ERROR(check_no_capture(stream));
  FLASHPLAN_RETURN_IF_ERROR(enter(stream));
  FLASHPLAN_RETURN_IF_ERROR(wait_for_staging());
  memory->segments = reinterpret_cast<Segment*>(staging() + segments_);
  memory->merges = reinterpret_cast<Merge*>(staging() + merges_);
  memory->tiles = reinterpret_cast<WorkTile*>(staging() + tiles_);
  memory->mask_begins = reinterpret_cast<int32_t*>(staging() + mask_begins_);
  if (prepares_keys_) {
    auto* const num_tiles = reinterpret_cast<int32_t*>(staging() + num_prepared_);
    memory->prepared = {num_tiles + 1, num_tiles};
  }
  return {};
}

Status DeviceSchedule::upload(const Schedules& schedules, Stream stream) noexcept {
  const DeviceGuard guard(device_);
  FLASHPLAN_RETURN_IF_ERROR(guard.status());
  const ApartFromCaptures apart;
  const auto* const tiles = reinterpret_cast<const WorkTile*>(staging() + tiles_);
  const auto* const first_prepared =
      prepares_keys_ ? reinterpret_cast<const int32_t*>(staging() + num_prepared_) + 1 : nullptr;
  // Merges are numbered down from the last one and tiles up from the first, so all records in use
  // are neighbours and one copy is enough.
  std::size_t begin = starts_[0];
  std::size_t end = tiles_;
  for (std::size_t k = 0; k < schedules.size(); ++k) {
    auto* const starts = reinterpret_cast<QueueStart*>(staging() + starts_[k]);
    // A staging buffer still holds the queues of its last upload, so the queues of a kernel without
    // a schedule must be emptied.
    bool& has_work = has_work_[next_staging_][k];
    const Schedule* const schedule = schedules[k];
    if (schedule != nullptr) {
      write_starts(*schedule, tiles, first_prepared, starts);
      begin = std::min(begin,
                       merges_ + static_cast<std::size_t>(schedule->first_merge) * sizeof(Merge));
      const auto tiles_end = schedule->tiles.data() + schedule->tiles.size() - tiles;
      end = std::max(end, tiles_ + static_cast<std::size_t>(tiles_end) * sizeof(WorkTile));
    } else if (has_work) {
      for (int32_t cta = 0; cta < num_ctas_[k]; ++cta) {
        starts[cta].begin = starts[cta].end = 0;
        starts[cta].first_prepared[0] = kNotPrepared;
      }
    }
    has_work = schedule != nullptr;
  }
  FLASHPLAN_CUDA_CALL(cudaMemcpyAsync, buffer_ + begin, staging() + begin, end - begin,
                      cudaMemcpyHostToDevice, stream);
  used_ = true;
  upload_stream_ = last_stream_;
  last_event_ = nullptr;
  const cudaError_t failed = cudaEventRecord(copied_[next_staging_], stream);
  if (failed != cudaSuccess) {
    // Without the event nothing tells when the staging buffer may be written again, so this waits
    // until the copy is done.
    succeeded(cudaStreamSynchronize(stream));
    return cuda_error("cudaEventRecord", failed);
  }
  last_event_ = copied_[next_staging_];
  next_staging_ = (next_staging_ + 1) % kStagingBuffers;
  return {};
}

Status DeviceSchedule::before_run(Stream stream) noexcept { return enter(stream); }

Status DeviceSchedule::after_run(Stream stream) noexcept {
  last_event_ = nullptr;
  // Most runs are on the stream of the upload. They record no event, because it would cost as much
  // as the launch. After a run on another stream an event is recorded at once, because that stream
  // may be destroyed before an upload or a run on a third stream has to wait for this run.
  if (last_stream_.number == upload_stream_.number) return {};
  FLASHPLAN_CUDA_CALL(cudaEventRecord, run_done_, stream);
  last_event_ = run_done_;
  return {};
}

ScheduleParams DeviceSchedule::schedule(int32_t kernel) const noexcept {
  ScheduleParams params;
  params.starts =
      reinterpret_cast<const QueueStart*>(buffer_ + starts_[static_cast<std::size_t>(kernel)]);
  params.segments = reinterpret_cast<const Segment*>(buffer_ + segments_);
  params.tiles = reinterpret_cast<const WorkTile*>(buffer_ + tiles_);
  params.merges = reinterpret_cast<const Merge*>(buffer_ + merges_);
  params.arrivals = reinterpret_cast<Arrivals*>(buffer_ + staging_bytes_);
  params.mask_begins = reinterpret_cast<const int32_t*>(buffer_ + mask_begins_);
  return params;
}

void DeviceSchedule::place(PreparedKv* kv) const noexcept {
  kv->num_tiles = reinterpret_cast<const int32_t*>(buffer_ + num_prepared_);
  kv->first_tiles = kv->num_tiles + 1;
  kv->num_left = reinterpret_cast<int32_t*>(buffer_ + prepared_states_);
  kv->states = reinterpret_cast<PreparedState*>(kv->num_left) + 1;
}

}  // namespace flashplan::cuda
