// SPDX-License-Identifier: Apache-2.0
// The device that computes a model. Besides flashplan's operators it offers memory, products of
// matrices, and copies to and from the host.
#pragma once

#include <flashplan/flashplan.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace engine {

/// Computes y[i][j] = x[i] . w[j] for x [m, k] and w [n, k] without gaps, of the device's dtype.
/// Rows of y are y_stride apart.
struct Product {
  const void* x = nullptr;
  int64_t m = 0, k = 0;
  const void* w = nullptr;
  int64_t n = 0;
  void* y = nullptr;
  int64_t y_stride = 0;
  flashplan::DType y_dtype = flashplan::DType::kFloat32;  // float32 or the device's dtype
};

/// Seconds since a device was made.
struct DeviceTimes {
  double busy = 0;  // from the begin of a step to its end
  double idle = 0;  // from the end of a step to the begin of the next, if there was work meanwhile
};

/// Calls that take or give memory of the device are executed in the order in which they are made,
/// together with the operators that run on stream(). Errors are std::runtime_error.
class Device {
 public:
  virtual ~Device() = default;

  virtual flashplan::Device place() const = 0;
  virtual flashplan::DType dtype() const = 0;  // the dtype of weights and activations
  virtual flashplan::Stream stream() const = 0;

  /// Allocates memory filled with zeros, aligned to flashplan::kWorkspaceAlignment. It lives as
  /// long as anybody has the pointer.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;
  /// Returns weights in the device's memory and dtype. On a CPU they stay where they are.
  virtual std::shared_ptr<const void> place_weights(const std::shared_ptr<const float>& values,
                                                    int64_t count) = 0;
  virtual void multiply(const Product& product) = 0;
  /// How many rows of x and y multiply() may read and write for a product of m rows.
  virtual int64_t padded_rows(int64_t m) const { return m; }

  /// Copies from the host. `from` may be changed when the call returns.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  virtual void copy_on_device(void* to, const void* from, std::size_t bytes) = 0;
  /// Host memory for the inputs of the next step. Waits while a copy still reads it.
  virtual std::byte* stage(std::size_t bytes) = 0;
  /// Begins a step: begins to copy the first `bytes` of the memory that stage() returned.
  /// `has_paused`: whether there was no work before, so that DeviceTimes::idle does not grow.
  virtual void send(void* to, std::size_t bytes, bool has_paused) = 0;
  /// Ends a step: begins to copy memory of the device to the host, without waiting. At most two of
  /// these copies are under way.
  virtual void fetch(const void* from, std::size_t bytes) = 0;
  /// Waits for the oldest copy of fetch(), and returns its memory, which is valid until the next
  /// call.
  virtual const std::byte* wait() = 0;

  /// Waits until all work is done. Later calls report its errors.
  virtual void synchronize() noexcept {}

  /// Whether record() makes graphs.
  virtual bool has_graphs() const { return false; }
  /// Does the work. From the second call with a key on, it may replay a graph of the work of the
  /// second call, so the work for a key must always make the same calls with the same arguments.
  virtual void record(int32_t /*key*/, const std::function<void()>& work) { work(); }

  virtual DeviceTimes times() const { return {}; }
};

}  // namespace engine
