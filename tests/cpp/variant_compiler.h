// SPDX-License-Identifier: Apache-2.0
// The compiler of variants, set up for tests that include this.
#pragma once

#include <cstdlib>

#include "variant/compiler_process.h"

namespace flashplan::test {

/// Variants are compiled anew, not taken from the user's cache; and quickly, since the speed of
/// their code does not matter here.
struct FreshVariants {
  TemporaryFolder cache;
  FreshVariants() {
    ::setenv("FLASHPLAN_CACHE_DIR", cache.path().c_str(), 1);
    ::setenv("FLASHPLAN_CXXFLAGS", "-O1", 1);
  }
};
inline const FreshVariants fresh_variants;

}  // namespace flashplan::test
