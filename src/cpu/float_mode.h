// SPDX-License-Identifier: Apache-2.0
// Sets the mode of floating-point arithmetic: how to round, and what to do with subnormal numbers.
#pragma once

#if defined(__SSE__)
#include <cstdint>
#else
#include <cfenv>
#endif

namespace flashplan::cpu {

/// Gives the thread the default mode for the lifetime of this object: rounding to nearest, and
/// subnormal numbers as they are. A caller may have another mode, as threads of XLA have, which
/// flush subnormals to 0: small numbers of float16 and of 8-bit formats would be lost as they are
/// converted. Threads that are started meanwhile inherit the default mode.
class DefaultFloatMode {
 public:
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

#if defined(__SSE__)
  DefaultFloatMode() noexcept : saved_(__builtin_ia32_stmxcsr()) {
    if (is_other()) __builtin_ia32_ldmxcsr(kDefault);
  }
  ~DefaultFloatMode() {
    if (is_other()) __builtin_ia32_ldmxcsr(saved_);
  }

 private:
  static constexpr uint32_t kDefault = 0x1f80;  // MXCSR in which only the exception masks are set
  static constexpr uint32_t kFlags = 0x3f;      // bits that tell which exceptions have occurred
  bool is_other() const noexcept { return (saved_ & ~kFlags) != kDefault; }

  uint32_t saved_;
#else
  DefaultFloatMode() noexcept {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

}  // namespace flashplan::cpu
