// SPDX-License-Identifier: Apache-2.0
// Variants that are compiled by processes of their own.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "check.h"
#include "flashplan/flashplan.h"
#include "variant_options.h"

namespace flashplan::test {

inline Variant shifted(const char* name, const char* value = "return x + 1.0f;") {
  VariantDescription description;
  description.name = name;
  description.value = value;
  Variant variant;
  CHECK(Variant::create(description, &variant).ok());
  return variant;
}

inline bool compiles(const Variant& variant) {
  Plan plan;
  const Status status = Plan::create(options_with(variant), &plan);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n%s\n", status.message, variant.compile_log().c_str());
  }
  return status.ok();
}

/// The result for one key whose values are 2.
inline float value_of(Plan& plan) {
  const int32_t qo_indptr[] = {0, 1};
  const int32_t kv_lens[] = {1};
  CHECK(plan.plan({qo_indptr, kv_lens, nullptr, 1}).ok());
  float q[8] = {}, kv[4] = {2, 2, 2, 2}, o[8] = {};
  alignas(256) static std::byte workspace[1 << 20];
  AttentionTensors t;
  t.q = contiguous(q, DType::kFloat32, {}, {1, 2, 4});
  t.k = t.v = contiguous(kv, DType::kFloat32, {}, {1, 1, 4});
  t.o = contiguous(o, DType::kFloat32, {}, {1, 2, 4});
  t.workspace = workspace;
  t.workspace_bytes = sizeof(workspace);
  CHECK(plan.run(t).ok());
  return o[0];
}

/// Starts a child that ends with 0 if `body` returns true.
template <typename Body>
pid_t start_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  return child;
}

inline int end_of(pid_t child) {
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

template <typename Body>
int in_a_child(Body body) {
  return end_of(start_child(body));
}

inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

}  // namespace flashplan::test
