// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime without a GPU, for tests of host code: two devices, memory from malloc(), and
// kernels that do nothing. Any call can be made to fail. Copies from pinned memory are under way
// until something waits for them, and the runtime checks that
//   - memory is freed once, and not while a copy from it is under way,
//   - pinned memory does not change while a copy from it is under way,
//   - copies to a piece of device memory, and launches that use it, follow one another.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace fake_cuda {

constexpr int kNumDevices = 2;
constexpr int kNumProcessors = 4;  // of each

/// What exists. `programs` are those of NVRTC.
struct Alive {
  int device_memory = 0;
  int pinned_memory = 0;
  int events = 0;
  int streams = 0;
  int libraries = 0;
  int programs = 0;

  friend bool operator==(const Alive&, const Alive&) = default;
};
Alive alive();

/// How many calls are made before one fails, counted from now on: 0 fails the next one. `for_ever`:
/// all later ones fail too.
void fail_after(int64_t num_calls, bool for_ever = false, cudaError_t code = cudaErrorUnknown);
void stop_failing();
/// Whether no call is going to fail.
bool is_working();
/// Calls that failed since fail_after().
int64_t num_failed();
/// The first of them, such as "cudaMalloc"; empty: none.
std::string first_failed();
/// Whether a call failed that would have restored the thread's device or capture mode.
bool failed_to_restore();

/// Counts a call of CUDA or NVRTC. True: it is to fail.
bool fails(const char* name);
/// Counts a program that NVRTC made (1) or destroyed (-1).
void count_program(int change);

/// While `is_capturing`, work on the stream goes to a graph.
void set_capturing(cudaStream_t stream, bool is_capturing);
/// Tells the runtime which device memory a launch uses: any address in it, or null.
void set_memory_of_launch(const void* (*memory)(void** arguments));

/// The calling thread's state.
int current_device();
cudaStreamCaptureMode capture_mode();
void reset_thread();

/// What the program did wrong since the last call, a line each.
std::string take_mistakes();

}  // namespace fake_cuda
