// SPDX-License-Identifier: Apache-2.0
// plan() and run() are ranges of NVTX, seen by a profiler that is part of this program.
#include <nvtx3/nvToolsExt.h>

#include <string>

#include "check.h"
#include "flashplan/flashplan.h"
#include "problem.h"
#include "small_options.h"

namespace {

std::string seen;

int push(const char* name) {
  seen += std::string(name) + "(";
  return 0;
}

int pop() {
  seen += ")";
  return 0;
}

/// NVTX calls this at the first range, in place of a profiler's library.
int begin_profile(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(&push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
  return 1;
}
const bool is_told = (InitializeInjectionNvtx2_fnptr = &begin_profile) != nullptr;

}  // namespace

namespace flashplan::test {
namespace {

TEST(plan_and_run_are_ranges) {
  CHECK(is_told);
  Problem p;
  p.options = small_options();
  p.batch.add(1, 9);
  Random random(1);
  fill_problem(random, p);
  Outputs out(p);
  CHECK_EQ(run_problem(p, out), std::string());
  CHECK_EQ(seen, "flashplan plan()flashplan run()");
  seen.clear();
  Plan plan;
  CHECK(Plan::create(p.options, &plan).ok());
  CHECK(!plan.run({}).ok());  // an error ends the range, too
  CHECK_EQ(seen, "flashplan run()");
}

}  // namespace
}  // namespace flashplan::test
