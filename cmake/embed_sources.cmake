# SPDX-License-Identifier: Apache-2.0
# cmake -D OUT=... -D FILES=... -D ROOT=... -P embed_sources.cmake: writes the text of FILES, paths below
# ROOT/src or ROOT/include, as src/variant/embedded_sources.h declares it.
set(text "// Written by cmake/embed_sources.cmake.\n#include \"variant/embedded_sources.h\"\n")
# The literals are views: a compiler would count their characters one by one, and give up.
string(APPEND text "\nnamespace flashplan {\nnamespace {\nusing namespace std::string_view_literals;\n\n"
  "constexpr EmbeddedSource kSources[] = {\n")
foreach(file IN LISTS FILES)
  file(READ "${ROOT}/${file}" content)
  string(REGEX REPLACE "^(src|include)/" "" path "${file}")
  string(APPEND text "{\"${path}\", R\"flashplan(${content})flashplan\"sv},\n")
endforeach()
string(APPEND text "};\n}\nstd::span<const EmbeddedSource> embedded_sources() noexcept { return kSources; }\n}\n")
file(WRITE "${OUT}" "${text}")
