// SPDX-License-Identifier: Apache-2.0
// A test registry and three assertions; include it from one file of each test program.
// Assertions may be used from any thread. Usage: test_x [part of a test's name].
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int> failures{0};

inline void fail(const char* file, int line, const std::string& text) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
  // A broken invariant fails in every round of a random test: the first reports say it all.
  if (++failures >= 20) std::_Exit(1);
}

template <class A, class B>
void equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " != " << b;
  fail(file, line, out.str());
}

struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

/// Of a test with thousands of random rounds, those to run. The address sanitizer takes five times
/// as long for a round, and the fuzzer, which has it too, makes tens of thousands of plans.
constexpr int rounds(int count) {
#ifdef __SANITIZE_ADDRESS__
  return count / 4;
#else
  return count;
#endif
}

}  // namespace check

#define TEST(name)                                                  \
  static void test_##name();                                        \
  static const check::Register register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(a, b) check::equal(__FILE__, __LINE__, #a " == " #b, (a), (b))

/// `text` is empty when all is well, else what went wrong.
#define CHECK_EMPTY(text)                                     \
  do {                                                        \
    const std::string what = (text);                          \
    if (!what.empty()) check::fail(__FILE__, __LINE__, what); \
  } while (false)

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  for (const check::Test& test : check::tests()) {
    if (std::string(test.name).find(filter) == std::string::npos) continue;
    std::cout << test.name << std::endl;
    test.body();
  }
  if (check::failures > 0) std::cerr << check::failures << " checks failed\n";
  return check::failures > 0 ? 1 : 0;
}
