// SPDX-License-Identifier: Apache-2.0
#include "bindings/run/py_plan.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "api/batch_checks.h"
#include "bindings/gil.h"
#include "bindings/run/variant_args.h"
#include "bindings/tensors/numbers.h"
#include "bindings/tensors/stream.h"
#include "bindings/tensors/tensor.h"
#include "variant/disk_cache.h"

namespace flashplan {
namespace {

[[noreturn]] void raise_busy() {
  throw std::runtime_error("plan: expected one thread at a time, got a second one");
}

/// Issues the warning about the disk cache of variants, if creating the Plan left one. The warning
/// names the cache's folder. A folder's name may have any bytes, so bytes that are not UTF-8 are
/// escaped.
void warn_of_cache() {
  const std::string warning = take_cache_warning();
  if (warning.empty()) return;
  const auto size = static_cast<Py_ssize_t>(warning.size());
  const nb::object text = nb::steal(PyUnicode_DecodeUTF8(warning.data(), size, "backslashreplace"));
  if (!text.is_valid() || PyErr_WarnFormat(PyExc_RuntimeWarning, 2, "%U", text.ptr()) != 0) {
    throw nb::python_error();
  }
}

}  // namespace

/// Exists while a thread is in plan(). If a second thread makes one meanwhile, the constructor
/// raises, before the second thread overwrites the lengths that the first one reads.
class PyPlan::Planning {
 public:
  explicit Planning(std::atomic_flag& flag) : flag_(flag) {
    if (flag.test_and_set(std::memory_order_acquire)) raise_busy();
  }
  ~Planning() { flag_.clear(std::memory_order_release); }
  Planning(const Planning&) = delete;
  Planning& operator=(const Planning&) = delete;

 private:
  std::atomic_flag& flag_;
};

PyPlan::PyPlan(const AttentionOptions& options, nb::object workspace) {
  AttentionOptions wanted = options;
  if (!workspace.is_none()) {
    workspace_.borrow(std::move(workspace), options.device);
    wanted.workspace_bytes = workspace_.size();
  }
  Status status;
  {
    const GilRelease released;  // a variant takes seconds to compile
    status = Plan::create(wanted, &plan_);
  }
  check_compiled(status, wanted.variant);
  warn_of_cache();
  if (workspace_.data() == nullptr) workspace_.allocate(plan_.workspace_bytes(), options.device);
}

void PyPlan::plan(nb::handle qo_indptr, nb::handle kv_lens, nb::handle kv_indptr,
                  nb::handle shared_prefixes, nb::handle mask_begin, nb::handle stream,
                  nb::handle make_key_ranges) {
  const Planning planning(planning_);
  const IntsArg kv("kv_lens", kv_lens, plan_.options().max_batch_size, "max_batch_size", kv_lens_);
  const int64_t most = int64_t{kv.size} + 1;
  const IntsArg qo("qo_indptr", qo_indptr, most, "one more than kv_lens", qo_indptr_);
  check_indptr_size("qo_indptr", qo, kv);
  Batch batch{qo.data, kv.data, nullptr, kv.size};
  if (!kv_indptr.is_none()) {
    const IntsArg rows("kv_indptr", kv_indptr, most, "one more than kv_lens", kv_indptr_);
    check_indptr_size("kv_indptr", rows, kv);
    batch.kv_indptr = rows.data;
  }
  if (!shared_prefixes.is_none()) {
    const IntsArg groups("shared_prefixes", shared_prefixes,
                         2 * int64_t{plan_.options().max_batch_size}, "2 * max_batch_size",
                         shared_prefixes_, 3);
    batch.shared_prefixes = groups.data;
    batch.num_shared_prefixes = groups.size;
  }
  if (!mask_begin.is_none()) {
    const IntsArg begins("mask_begin", mask_begin, most - 1, "as many as kv_lens", mask_begin_);
    if (begins.size != kv.size) {
      raise_value("mask_begin: expected " + std::to_string(kv.size) +
                  " entries (as many as kv_lens), got " + std::to_string(begins.size));
    }
    batch.mask_begin = begins.data;
  }
  if (!make_key_ranges.is_none()) batch.key_ranges = key_ranges_of(batch, make_key_ranges);
  CallStream call = call_stream(stream, producer_to_follow(stream), device());
  Status status;
  {
    const GilRelease released;  // plan() may wait for earlier copies to the GPU
    status = plan_.plan(batch, call.handle);
  }
  check(status);
  stream_of_plan_ = std::move(call.owner);
}

void PyPlan::run(RunArgs& args, const CallStream& call) {
  check(run_views(args.tensors(), call.handle));
  if (!call.on_cuda()) return;
  last_producer_ = args.producer();
  call.finish();
}

Status PyPlan::run_views(AttentionTensors& tensors, Stream stream) {
  tensors.workspace = workspace_.data();
  tensors.workspace_bytes = plan_.workspace_bytes();
  const GilRelease released;
  return plan_.run(tensors, stream);
}

const Plan& PyPlan::planned() const {
  if (planning_.test(std::memory_order_acquire)) raise_busy();
  return plan_;
}

int PyPlan::traverse(visitproc visit, void* arg) const {
  Py_VISIT(workspace_.owner().ptr());
  Py_VISIT(stream_of_plan_.ptr());
  return 0;
}

void PyPlan::clear() {
  plan_ = Plan();
  workspace_.release();
  stream_of_plan_.reset();
}

/// Calls the Python function that computes the range of keys of each query, with qo_indptr and
/// kv_lens as bytes, and returns the ranges. Returns null without a call if there are more tokens
/// than max_qo_tokens, which plan() is going to refuse.
const int32_t* PyPlan::key_ranges_of(const Batch& batch, nb::handle function) {
  check(check_lengths(batch));
  const int32_t num_tokens = batch.qo_indptr[batch.batch_size];
  if (num_tokens > plan_.options().max_qo_tokens) return nullptr;
  const auto bytes_of = [](const int32_t* numbers, int32_t count) {
    return nb::bytes(reinterpret_cast<const char*>(numbers),
                     static_cast<size_t>(count) * sizeof(int32_t));
  };
  const nb::object ranges = function(bytes_of(batch.qo_indptr, batch.batch_size + 1),
                                     bytes_of(batch.kv_lens, batch.batch_size));
  const IntsArg arg("key_range", ranges, num_tokens, "one for each query", key_ranges_, 2);
  if (arg.size != num_tokens) {
    raise_value("key_range: expected " + std::to_string(num_tokens) +
                " ranges, one for each query, got " + std::to_string(arg.size));
  }
  return arg.data;
}

/// The producer whose current stream plan() uses: that of the last run(), or before the first run()
/// imported_producer(). An empty Producer if a stream is given, or on the CPU, where none is
/// needed.
Producer PyPlan::producer_to_follow(nb::handle stream) {
  if (!stream.is_none() || device().type == DeviceType::kCpu) return {};
  if (!last_producer_) {
    const Producer imported = imported_producer();
    if (imported.framework == Framework::kOther) return imported;
    last_producer_ = imported;
  }
  return *last_producer_;
}

}  // namespace flashplan
