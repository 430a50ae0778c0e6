// SPDX-License-Identifier: Apache-2.0
// Variants of users from C++: descriptions, compiling, running. Results of every body are tested
// from Python.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/sha256.h"
#include "flashplan/flashplan.h"
#include "variant/compiler_process.h"
#include "variant_compiler.h"
#include "variant_options.h"

namespace flashplan::test {
namespace {

std::string hex_of(const std::string& text) {
  Sha256 hash;
  // In pieces of different sizes.
  hash.add(text.data(), text.size() / 3);
  hash.add(text.data() + text.size() / 3, text.size() - text.size() / 3);
  return to_hex(hash.digest());
}

// The examples of FIPS 180-2, appendix B, and a text that ends where its length has no more room.
TEST(sha256) {
  CHECK_EQ(hex_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(hex_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(hex_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(hex_of(std::string(1000000, 'a')),
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  for (const std::size_t size : {55U, 56U, 63U, 64U, 65U, 119U, 120U}) {
    Sha256 whole;
    const std::string text(size, 'x');
    for (const char c : text) whole.add(&c, 1);
    CHECK_EQ(to_hex(whole.digest()), hex_of(text));
  }
}

VariantDescription shifted() {
  static constexpr VariantTensor kTensors[] = {{"shifts", DType::kFloat32}};
  static constexpr VariantScalar kScalars[] = {{"gain", 1.0F}};
  VariantDescription description;
  description.name = "shifted";
  description.value = "return gain * x + shifts[head];";
  description.tensors = kTensors;
  description.num_tensors = 1;
  description.scalars = kScalars;
  description.num_scalars = 1;
  return description;
}

TEST(descriptions) {
  Variant variant;
  CHECK(variant.empty());
  CHECK_EQ(std::string(variant.name()), "");
  const auto refuses = [](const char* argument, StatusCode code, auto change) {
    VariantDescription description = shifted();
    change(description);
    Variant unused;
    const Status status = Variant::create(description, &unused);
    CHECK(status.code == code);
    CHECK(std::string(status.message).starts_with(std::string(argument) + ":"));
    CHECK(unused.empty());
  };
  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
  refuses("name", kInvalid, [](auto& d) { d.name = nullptr; });
  refuses("name", kInvalid, [](auto& d) { d.name = "two words"; });
  refuses("query, key, value, output, logits, mask", kInvalid, [](auto& d) { d.value = nullptr; });
  refuses("value", kInvalid, [](auto& d) { d.value = "return x; // #"; });
  refuses("tensors", kInvalid, [](auto& d) { d.num_tensors = 9; });
  refuses("tensors", kInvalid, [](auto& d) { d.num_tensors = -1; });
  refuses("tensors", kInvalid, [](auto& d) { d.tensors = nullptr; });
  refuses("scalars", kInvalid, [](auto& d) { d.scalars = nullptr; });
  static constexpr VariantTensor kNameless[] = {{nullptr, DType::kFloat32}};
  refuses("tensors", kInvalid, [](auto& d) { d.tensors = kNameless; });
  static constexpr VariantTensor kHalf[] = {{"halves", DType::kFloat16}};
  refuses("tensors", StatusCode::kInvalidType, [](auto& d) { d.tensors = kHalf; });
  static constexpr VariantScalar kSame[] = {{"shifts", 1.0F}};
  refuses("scalars", kInvalid, [](auto& d) { d.scalars = kSame; });
  CHECK(!Variant::create(shifted(), nullptr).ok());
  CHECK(Variant::create(shifted(), &variant).ok());
  CHECK_EQ(std::string(variant.name()), "shifted");
}

// A Plan holds its variant; scalars have defaults; counts and places of arguments are checked.
TEST(a_plan_with_a_variant) {
  Plan plan;
  {
    Variant variant;
    CHECK(Variant::create(shifted(), &variant).ok());
    CHECK(is_supported(options_with(variant)).ok());
    const Status status = Plan::create(options_with(variant), &plan);
    CHECK(status.ok());
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n%s\n", status.message, variant.compile_log().c_str());
      return;
    }
  }
  CHECK_EQ(std::string(plan.options().variant.name()), "shifted");
  CHECK(std::string(plan.kernel_name()).ends_with("_shifted"));

  const int32_t qo_indptr[] = {0, 1};
  const int32_t kv_lens[] = {3};
  CHECK(plan.plan({qo_indptr, kv_lens, nullptr, 1}).ok());
  std::vector<float> q(8, 1.0F), kv(12, 2.0F), o(8), shifts = {0.5F};
  alignas(256) static std::byte workspace[1 << 20];
  AttentionTensors t;
  t.q = contiguous(q.data(), DType::kFloat32, {}, {1, 2, 4});
  t.k = t.v = contiguous(kv.data(), DType::kFloat32, {}, {3, 1, 4});
  t.o = contiguous(o.data(), DType::kFloat32, {}, {1, 2, 4});
  t.workspace = workspace;
  t.workspace_bytes = sizeof(workspace);
  CHECK(!plan.run(t).ok());  // without its tensor
  const TensorView tensors[] = {contiguous(shifts.data(), DType::kFloat32, {}, {1})};
  t.variant_tensors = tensors;
  t.num_variant_tensors = 1;
  CHECK(plan.run(t).ok());
  for (const float x : o) CHECK_EQ(x, 2.5F);
  // Only the first key is in the range, and is read.
  std::fill(kv.begin() + 4, kv.end(), 9.0F);
  const int32_t key_range[] = {-5, 1};
  Batch batch = {qo_indptr, kv_lens, nullptr, 1};
  batch.key_ranges = key_range;
  CHECK(plan.plan(batch).ok());
  t.kv_lens = contiguous(const_cast<int32_t*>(kv_lens), DType::kInt32, {}, {1});
  CHECK(std::string(plan.run(t).message).starts_with("kv_lens: expected none with key ranges"));
  t.kv_lens = {};
  CHECK(plan.run(t).ok());
  for (const float x : o) CHECK_EQ(x, 2.5F);
  const float scalars[] = {3.0F};
  t.variant_scalars = scalars;
  CHECK(!plan.run(t).ok());  // none of them
  t.num_variant_scalars = 1;
  CHECK(plan.run(t).ok());
  for (const float x : o) CHECK_EQ(x, 6.5F);
  const TensorView overlapping[] = {contiguous(o.data(), DType::kFloat32, {}, {1})};
  t.variant_tensors = overlapping;
  CHECK(!plan.run(t).ok());
  TensorView of_any_rank[] = {tensors[0]};
  t.variant_tensors = of_any_rank;
  for (const int32_t rank : {INT32_MIN, -1, 0, 5, 40, 100000, INT32_MAX}) {
    of_any_rank[0].rank = rank;
    CHECK(std::string(plan.run(t).message).starts_with("shifts: expected 1 to 4 dimensions, got "));
  }
  t.variant_tensors = nullptr;
  CHECK(std::string(plan.run(t).message).starts_with("variant_tensors: expected 1, got a null"));
  t.variant_tensors = tensors;

  Plan standard;
  CHECK(Plan::create(options_with({}), &standard).ok());
  CHECK(standard.plan({qo_indptr, kv_lens, nullptr, 1}).ok());
  CHECK(!standard.run(t).ok());  // it has no variant
  CHECK(std::string(standard.plan(batch).message).starts_with("key_ranges: expected none"));
}

/// Makes a variant of the description and a plan with it, which compiles the variant. Returns the
/// status of that.
Status compiled(const VariantDescription& description) {
  Variant variant;
  Plan plan;
  CHECK(Variant::create(description, &variant).ok());
  return Plan::create(options_with(variant), &plan);
}

TEST(threads_compile_once) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] { CHECK(compiled(shifted()).ok()); });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(what_does_not_compile) {
  VariantDescription description = shifted();
  description.value = "return\n  nonsense;";
  Variant variant;
  Plan plan;
  CHECK(Variant::create(description, &variant).ok());
  const Status status = Plan::create(options_with(variant), &plan);
  CHECK(status.code == StatusCode::kInvalidArgument);
  CHECK(std::string(status.message).find("shifted.value:2:3: error:") != std::string::npos);
  CHECK(variant.compile_log().find("nonsense") != std::string::npos);
}

// How the compiler ended is unknown, but not whether it has made a library.
TEST(what_does_not_compile_where_children_are_ignored) {
  ::signal(SIGCHLD, SIG_IGN);
  VariantDescription description = shifted();
  description.value = "return more_nonsense;";
  const Status status = compiled(description);
  description.value = "return x + 7.0f;";
  CHECK(compiled(description).ok());
  ::signal(SIGCHLD, SIG_DFL);
  CHECK(status.code == StatusCode::kInvalidArgument);
  CHECK(std::string(status.message).find("shifted.value:1:8: error:") != std::string::npos);
}

TEST(a_compiler_that_makes_nothing) {
  ::setenv("CXX", "true", 1);
  const Status status = compiled(shifted());
  ::unsetenv("CXX");
  CHECK(status.code == StatusCode::kUnsupported);
  CHECK(
      std::string(status.message).starts_with("variant: expected a compiler of C++20 that works"));
}

TEST(code_that_lacks_a_function) {
  VariantDescription description = shifted();
  description.value = "extern int no_such_function(); return no_such_function();";
  const Status status = compiled(description);
  CHECK(!status.ok());
  CHECK(std::string(status.message).find("no_such_function") != std::string::npos);
}

TEST(programs_of_relative_paths) {
  const TemporaryFolder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  const char* path = std::getenv("PATH");
  const std::string old_path = path != nullptr ? path : "";
  std::filesystem::create_symlink(find_program("true"), folder.path() / "here");
  std::filesystem::current_path(folder.path());
  ::setenv("PATH", ".", 1);
  for (const char* name : {"./here", "here"}) {
    const std::string found = find_program(name);
    CHECK(found.starts_with('/'));
    CHECK(run_process({found}, "/", 60).succeeded);
  }
  ::setenv("PATH", old_path.c_str(), 1);
  std::filesystem::current_path(before);
}

TEST(what_a_program_leaves_running_is_not_waited_for) {
  const TemporaryFolder folder;
  const auto start = std::chrono::steady_clock::now();
  const ProcessResult result =
      run_process({find_program("sh"), "-c", "sleep 20 & echo done"}, folder.path(), 15);
  CHECK(result.succeeded);
  CHECK_EQ(result.output, "done\n");
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
}

TEST(processes) {
  const TemporaryFolder folder;
  const std::string sleep = find_program("sleep");
  CHECK(!sleep.empty());
  CHECK(find_program("/nonexistent").empty());
  CHECK(find_program("no such program").empty());
  const ProcessResult slow = run_process({sleep, "100"}, folder.path(), 0.05);
  CHECK(slow.outcome == ProcessResult::Outcome::kTimeout);
  CHECK(!slow.succeeded);
  const ProcessResult failed = run_process({find_program("false")}, folder.path(), 60);
  CHECK(failed.outcome == ProcessResult::Outcome::kEnded && !failed.succeeded);
  const ProcessResult none = run_process({"/nonexistent"}, folder.path(), 60);
  CHECK(none.outcome == ProcessResult::Outcome::kNotStarted && none.error != 0);
  const ProcessResult echo = run_process(
      {find_program("sh"), "-c", "echo to stdout; echo to stderr >&2; pwd"}, folder.path(), 60);
  CHECK(echo.succeeded);
  CHECK_EQ(echo.output, "to stdout\nto stderr\n" + folder.path().string() + "\n");
  const ProcessResult chatty =
      run_process({find_program("head"), "-c", "300000", "/dev/zero"}, folder.path(), 60);
  CHECK(chatty.succeeded);
  CHECK_EQ(chatty.output.size(), std::size_t{64 << 10});
}

}  // namespace
}  // namespace flashplan::test
