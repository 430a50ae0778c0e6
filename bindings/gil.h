// SPDX-License-Identifier: Apache-2.0
// Releases Python's global lock (the GIL) and takes it back, safely even while the interpreter
// shuts down.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <exception>

namespace flashplan {

/// Calls `function`, which may take the GIL or run Python code, and is safe while the interpreter
/// shuts down.
///
/// Before Python 3.14, a daemon thread that takes the GIL during shutdown is ended by
/// pthread_exit(). On Linux this unwinds the stack: destructors would change Python objects without
/// the GIL, and the first noexcept function, of which nanobind has many, would abort the process.
/// Here such a thread sleeps until the process ends, as in Python 3.14.
template <class Function>
auto surviving_exit(Function function) {
  try {
    return function();
  } catch (std::exception&) {
    throw;
  } catch (...) {  // pthread_exit() unwinds: all other exceptions here are std::exceptions
    while (true) pause();
  }
}

/// Releases the GIL for its lifetime.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    surviving_exit([this] { PyEval_RestoreThread(state_); });
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace flashplan
