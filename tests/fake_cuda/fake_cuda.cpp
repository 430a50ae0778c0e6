// SPDX-License-Identifier: Apache-2.0
#include "fake_cuda.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "model.h"

namespace fake_cuda {

State& state() {
  static State the_state;
  return the_state;
}

void mistake(const std::string& text) { state().mistakes += text + "\n"; }

bool fails_now(const char* name) {
  State& s = state();
  if (!s.is_failing && s.calls_left-- != 0) return false;
  s.is_failing = s.for_ever;
  if (s.num_failed++ == 0) s.first_failed = name;
  return true;
}

cudaError_t result_of(const char* name) {
  if (!fails_now(name)) return cudaSuccess;
  thread.last_error = state().code;
  return state().code;
}

const char* memory_of(const std::map<const char*, std::vector<char>>& all, const void* address) {
  const auto* byte = static_cast<const char*>(address);
  auto next = all.upper_bound(byte);
  if (next == all.begin()) return nullptr;
  --next;
  return byte < next->first + next->second.size() ? next->first : nullptr;
}

void merge(const Progress& from, Progress* into) {
  for (const auto& [stream, number] : from) {
    int64_t& known = (*into)[stream];
    known = std::max(known, number);
  }
}

bool comes_after(const Progress& progress, const Operation& operation) {
  const auto found = progress.find(operation.stream);
  return found != progress.end() && found->second >= operation.number;
}

CUstream_st* checked(cudaStream_t stream) {
  if (stream == nullptr) return &state().legacy;
  if (state().streams.count(stream) == 0) {
    mistake("a stream is used that does not exist");
    return &state().legacy;
  }
  return stream;
}

Operation begin_operation(CUstream_st* stream) {
  merge(state().host, &stream->after);
  const Operation operation = {stream->number, ++stream->num_operations};
  stream->after[stream->number] = operation.number;
  return operation;
}

void use(const void* address, CUstream_st* stream, const Operation& operation, const char* what) {
  const char* memory = memory_of(state().device_memory, address);
  if (memory == nullptr) return mistake(std::string(what) + " uses memory that does not exist");
  const auto last = state().last_use.find(memory);
  if (last != state().last_use.end() && !comes_after(stream->after, last->second)) {
    mistake(std::string(what) + " does not wait for the work that used its memory before");
  }
  state().last_use[memory] = operation;
}

void wait_for(const Progress& progress) {
  State& s = state();
  merge(progress, &s.host);
  std::vector<PinnedCopy> left;
  for (PinnedCopy& copy : s.copies) {
    if (!comes_after(s.host, copy.operation)) {
      left.push_back(std::move(copy));
      continue;
    }
    if (std::memcmp(copy.from, copy.content.data(), copy.content.size()) != 0) {
      mistake("pinned memory has changed while a copy from it was under way");
    }
    if (memory_of(s.device_memory, copy.to) != nullptr) {
      std::memcpy(copy.to, copy.content.data(), copy.content.size());
    }
  }
  s.copies = std::move(left);
}

void wait_for_all() {
  Progress all;
  for (const CUstream_st* stream : state().streams) merge(stream->after, &all);
  merge(state().legacy.after, &all);
  wait_for(all);
}

bool check_event(cudaEvent_t event) {
  if (state().events.count(event) != 0) return true;
  mistake("an event is used that does not exist");
  return false;
}

Alive alive() {
  const std::scoped_lock lock(state().mutex);
  Alive alive = state().others;
  alive.device_memory = static_cast<int>(state().device_memory.size());
  alive.pinned_memory = static_cast<int>(state().pinned_memory.size());
  alive.events = static_cast<int>(state().events.size());
  alive.streams = static_cast<int>(state().streams.size());
  return alive;
}

void fail_after(int64_t num_calls, bool for_ever, cudaError_t code) {
  const std::scoped_lock lock(state().mutex);
  State& s = state();
  s.calls_left = num_calls;
  s.is_failing = false;
  s.for_ever = for_ever;
  s.code = code;
  s.num_failed = 0;
  s.first_failed.clear();
  s.failed_to_restore = false;
}

void stop_failing() {
  const std::scoped_lock lock(state().mutex);
  state().calls_left = -1;
  state().is_failing = false;
}

bool is_working() {
  const std::scoped_lock lock(state().mutex);
  return state().calls_left < 0 && !state().is_failing;
}

int64_t num_failed() {
  const std::scoped_lock lock(state().mutex);
  return state().num_failed;
}

std::string first_failed() {
  const std::scoped_lock lock(state().mutex);
  return state().first_failed;
}

bool failed_to_restore() {
  const std::scoped_lock lock(state().mutex);
  return state().failed_to_restore;
}

bool fails(const char* name) {
  const std::scoped_lock lock(state().mutex);
  return fails_now(name);
}

void count_program(int change) {
  const std::scoped_lock lock(state().mutex);
  state().others.programs += change;
}

void set_capturing(cudaStream_t stream, bool is_capturing) {
  const std::scoped_lock lock(state().mutex);
  checked(stream)->is_capturing = is_capturing;
}

void set_memory_of_launch(const void* (*memory)(void** arguments)) {
  state().memory_of_launch = memory;
}

int current_device() { return thread.device; }
cudaStreamCaptureMode capture_mode() { return thread.mode; }
void reset_thread() { thread = {}; }

std::string take_mistakes() {
  const std::scoped_lock lock(state().mutex);
  return std::exchange(state().mistakes, {});
}

}  // namespace fake_cuda
