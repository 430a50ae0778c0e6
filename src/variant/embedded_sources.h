// SPDX-License-Identifier: Apache-2.0
// The library's own headers as text, for compilers at run time. cmake/embed_sources.cmake writes
// the definition.
#pragma once

#include <span>
#include <string_view>

namespace flashplan {

struct EmbeddedSource {
  const char* path;  // as in #include: "abi/params.h"
  std::string_view text;
};

std::span<const EmbeddedSource> embedded_sources() noexcept;

}  // namespace flashplan
