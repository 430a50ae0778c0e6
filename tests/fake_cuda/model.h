// SPDX-License-Identifier: Apache-2.0
// What the fake runtime knows. All but fake_cuda::thread is guarded by State::mutex.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "fake_cuda.h"

/// The work that something comes after: for each stream, by its number, how much of it.
using Progress = std::map<unsigned long long, int64_t>;

struct CUstream_st {
  int device = 0;
  unsigned long long number = 0;
  bool is_capturing = false;
  int64_t num_operations = 0;
  Progress after;  // work that its next operation waits for
};

struct CUevent_st {
  Progress after;
};

namespace fake_cuda {

struct Operation {
  unsigned long long stream = 0;
  int64_t number = 0;
};

/// A copy to the device from pinned memory that is under way.
struct PinnedCopy {
  Operation operation;
  const char* from;
  char* to;
  std::vector<char> content;  // of the pinned memory when the copy was asked for
};

struct State {
  std::mutex mutex;
  int64_t calls_left = -1;  // before the one that fails; < 0: none does
  bool is_failing = false;  // all calls, for ever
  bool for_ever = false;
  cudaError_t code = cudaErrorUnknown;
  int64_t num_failed = 0;
  std::string first_failed;
  bool failed_to_restore = false;
  std::string mistakes;

  CUstream_st legacy;
  unsigned long long last_stream = 0;
  std::set<cudaStream_t> streams;
  std::set<cudaEvent_t> events;
  std::map<const char*, std::vector<char>> device_memory;
  std::map<const char*, std::vector<char>> pinned_memory;
  std::map<const char*, Operation> last_use;  // of device memory
  Alive others;                               // libraries and programs
  std::vector<PinnedCopy> copies;
  Progress host;  // work that the host has waited for
  bool is_query_late = false;
  const void* (*memory_of_launch)(void**) = nullptr;
};

State& state();

struct Thread {
  int device = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  cudaError_t last_error = cudaSuccess;
};
inline thread_local Thread thread;

// These must be called with the lock.

/// Keeps a text for take_mistakes().
void mistake(const std::string& text);
/// Counts a call of CUDA or NVRTC. True: it is to fail.
bool fails_now(const char* name);
/// Counts a call of the runtime. The error that it is to fail with, or success.
cudaError_t result_of(const char* name);

/// The memory that an address lies in, or null.
const char* memory_of(const std::map<const char*, std::vector<char>>& all, const void* address);
/// The stream, or the default one if it does not exist, which is a mistake.
CUstream_st* checked(cudaStream_t stream);
/// False if the event does not exist, which is a mistake.
bool check_event(cudaEvent_t event);

/// Adds the work of `from`.
void merge(const Progress& from, Progress* into);
bool comes_after(const Progress& progress, const Operation& operation);
/// A new operation on a stream.
Operation begin_operation(CUstream_st* stream);
/// Device memory is used by an operation on a stream. The previous use must come before it.
void use(const void* address, CUstream_st* stream, const Operation& operation, const char* what);
/// The host waits for work: the copies that belong to it arrive.
void wait_for(const Progress& progress);
void wait_for_all();

}  // namespace fake_cuda
