// SPDX-License-Identifier: Apache-2.0
// A library that stands in for NVRTC: it compiles nothing. Its calls fail as those of fake_cuda do,
// whose functions the test program has.
#include <cstddef>
#include <cstring>

#include "fake_cuda.h"

namespace {

constexpr char kLog[] = "a log\n";
constexpr char kCode[] = "\177ELF of the fake NVRTC";

int result(const char* name) {
  constexpr int kCompilationError = 6;
  return fake_cuda::fails(name) ? kCompilationError : 0;
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return result("nvrtcVersion");
}

int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*,
                       const char* const*) {
  const int failed = result("nvrtcCreateProgram");
  if (failed == 0) {
    fake_cuda::count_program(1);
    *program = new char;
  }
  return failed;
}

int nvrtcDestroyProgram(void** program) {
  fake_cuda::count_program(-1);
  delete static_cast<char*>(*program);
  *program = nullptr;
  return result("nvrtcDestroyProgram");
}

int nvrtcAddNameExpression(void*, const char*) { return result("nvrtcAddNameExpression"); }

int nvrtcCompileProgram(void*, int, const char* const*) { return result("nvrtcCompileProgram"); }

int nvrtcGetProgramLogSize(void*, std::size_t* size) {
  *size = sizeof(kLog);
  return result("nvrtcGetProgramLogSize");
}

int nvrtcGetProgramLog(void*, char* log) {
  const int failed = result("nvrtcGetProgramLog");
  if (failed == 0) std::memcpy(log, kLog, sizeof(kLog));
  return failed;
}

int nvrtcGetCUBINSize(void*, std::size_t* size) {
  *size = sizeof(kCode);
  return result("nvrtcGetCUBINSize");
}

int nvrtcGetCUBIN(void*, char* code) {
  const int failed = result("nvrtcGetCUBIN");
  if (failed == 0) std::memcpy(code, kCode, sizeof(kCode));
  return failed;
}

int nvrtcGetLoweredName(void*, const char* expression, const char** name) {
  *name = expression;
  return result("nvrtcGetLoweredName");
}

int nvrtcSetFlowCallback(void*, int (*)(void*, void*), void*) {
  return result("nvrtcSetFlowCallback");
}

}  // extern "C"
