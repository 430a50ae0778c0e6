// SPDX-License-Identifier: Apache-2.0
// Options and Plan.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "api/check_lengths.h"
#include "bindings.h"
#include "common/error.h"
#include "flashplan/plan.h"
#include "flashplan/prefixes.h"
#include "gil.h"
#include "numbers.h"
#include "plan_run.h"
#include "stream.h"
#include "tensor.h"
#include "variant/disk_cache.h"
#include "variant/gpu_code.h"
#include "variant/nvrtc.h"
#include "variant/variant_impl.h"
#include "workspace.h"

namespace flashplan {
namespace {

using namespace nb::literals;

void check_size(const char* name, const IntsArg& indptr, const IntsArg& lens) {
  if (indptr.size == lens.size + 1) return;
  raise_value(std::string(name) + ": expected " + std::to_string(lens.size + 1) +
              " entries (one more than kv_lens), got " + std::to_string(indptr.size));
}

TensorKind kind_of(DType dtype) {
  switch (dtype) {
    case DType::kInt32: return TensorKind::kInt32;
    case DType::kInt64: return TensorKind::kInt64;
    case DType::kUInt32: return TensorKind::kUInt32;
    default: return TensorKind::kFloat;
  }
}

/// Tensors and scalars of a variant, in the order of its description, as a pair of tuples; None
/// without a variant.
class VariantArgs {
 public:
  /// First the scalars, which may be objects whose conversion runs Python code.
  VariantArgs(const Variant& variant, nb::handle arguments) : variant_(variant.impl()) {
    if (variant_ == nullptr) return;
    const auto scalars = nb::cast<nb::tuple>(arguments[1]);
    for (size_t i = 0; i < variant_->scalars.size(); ++i) {
      scalars_.push_back(float_arg(variant_->scalars[i].name.c_str(), scalars[i]));
    }
  }

  void import(nb::handle arguments, CallStream& call, AttentionTensors* to) {
    if (variant_ == nullptr) return;
    const auto tensors = nb::cast<nb::tuple>(arguments[0]);
    for (size_t i = 0; i < variant_->tensors.size(); ++i) {
      const auto& [name, dtype] = variant_->tensors[i];
      args_.emplace_back(name.c_str(), tensors[i], kind_of(dtype), call);
      views_.push_back(args_.back().view());
    }
    to->variant_tensors = views_.data();
    to->num_variant_tensors = static_cast<int32_t>(views_.size());
    to->variant_scalars = scalars_.data();
    to->num_variant_scalars = static_cast<int32_t>(scalars_.size());
  }

 private:
  const Variant::Impl* variant_;
  std::vector<float> scalars_;
  std::list<TensorArg> args_;  // which do not move
  std::vector<TensorView> views_;
};

/// Whether a scale is a number; tensors without dimensions on the host are. Other tensors are read
/// by the kernels.
bool is_number(nb::handle scale) {
  if (PyFloat_Check(scale.ptr()) != 0 || PyLong_Check(scale.ptr()) != 0) return true;
  const Producer producer = producer_of(scale);
  if (producer.traced) return false;
  if (producer.exchange == nullptr && attribute(scale, "__dlpack__").is_none()) return true;
  const nb::object ndim = attribute(scale, "ndim");
  return PyLong_Check(ndim.ptr()) != 0 && PyLong_AsLong(ndim.ptr()) == 0 &&
         device_of(scale, producer).type == DeviceType::kCpu;
}

/// Raises the exception of a failed status, with the compiler's log if a variant did not compile.
void check_compiled(const Status& status, const Variant& variant) {
  if (std::string_view(status.message).starts_with("variant: expected source")) {
    raise_value(std::string(status.message) + "\n" + variant.compile_log());
  }
  check(status);
}

/// A Plan and what belongs to it in Python: the workspace, buffers for host lengths, and the
/// framework whose stream plan() follows.
class PyPlan {
 public:
  PyPlan(const AttentionOptions& options, nb::object workspace) {
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
    const std::string warning = take_cache_warning();
    if (!warning.empty() && PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 2) != 0) {
      throw nb::python_error();
    }
    if (workspace_.data() == nullptr) workspace_.allocate(plan_.workspace_bytes(), options.device);
  }

  void plan(nb::handle qo_indptr, nb::handle kv_lens, nb::handle kv_indptr,
            nb::handle shared_prefixes, nb::handle mask_begin, nb::handle stream,
            nb::handle make_key_ranges) {
    const Planning planning(planning_);
    const IntsArg kv("kv_lens", kv_lens, plan_.options().max_batch_size, "max_batch_size",
                     kv_lens_);
    const int64_t most = int64_t{kv.size} + 1;
    const IntsArg qo("qo_indptr", qo_indptr, most, "one more than kv_lens", qo_indptr_);
    check_size("qo_indptr", qo, kv);
    Batch batch{qo.data, kv.data, nullptr, kv.size};
    if (!kv_indptr.is_none()) {
      const IntsArg rows("kv_indptr", kv_indptr, most, "one more than kv_lens", kv_indptr_);
      check_size("kv_indptr", rows, kv);
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
      const GilRelease released;  // plan() waits if too many copies are under way
      status = plan_.plan(batch, call.handle);
    }
    check(status);
    stream_of_plan_ = std::move(call.owner);
  }

  void run(nb::handle q, nb::handle k, nb::handle v, nb::handle block_table, nb::handle page_indptr,
           nb::handle page_indices, nb::handle kv_lens, nb::handle mask, nb::handle sinks,
           nb::handle out, nb::handle lse, nb::handle k_scale, nb::handle v_scale,
           nb::handle stream, nb::handle variant_arguments) {
    const AttentionOptions& options = plan_.options();
    VariantArgs variant_args(options.variant, variant_arguments);
    AttentionTensors tensors;
    // Numbers are converted first, since that may run Python code.
    const bool k_scale_is_number = is_number(k_scale);
    const bool v_scale_is_number = is_number(v_scale);
    if (k_scale_is_number) tensors.k_scale = float_arg("k_scale", k_scale);
    if (v_scale_is_number) tensors.v_scale = float_arg("v_scale", v_scale);
    const Producer producer = producer_of(q);
    CallStream call = call_stream(stream, producer, device());
    const TensorArg q_arg("q", required("q", q), TensorKind::kFloat, call, &options.q_dtype);
    const TensorArg k_arg("k", required("k", k), TensorKind::kFloat, call, &options.kv_dtype);
    const TensorArg v_arg("v", required("v", v), TensorKind::kFloat, call, &options.kv_dtype);
    const TensorArg block_table_arg("block_table", block_table, TensorKind::kInt32, call);
    const TensorArg page_indptr_arg("page_indptr", page_indptr, TensorKind::kInt32, call);
    const TensorArg page_indices_arg("page_indices", page_indices, TensorKind::kInt32, call);
    const TensorArg kv_lens_arg("kv_lens", kv_lens, TensorKind::kInt32, call);
    const TensorArg mask_arg("mask", mask, TensorKind::kUInt32, call);
    const TensorArg sinks_arg("sinks", sinks, TensorKind::kFloat, call);
    const TensorArg k_scales_arg("k_scale", k_scale_is_number ? nb::none() : k_scale,
                                 TensorKind::kScales, call);
    const TensorArg v_scales_arg("v_scale", v_scale_is_number ? nb::none() : v_scale,
                                 TensorKind::kScales, call);
    const TensorArg out_arg("out", required("out", out), TensorKind::kFloat, call, &options.o_dtype,
                            Access::kWrite);
    const TensorArg lse_arg("lse", lse, TensorKind::kFloat, call, nullptr, Access::kWrite);
    variant_args.import(variant_arguments, call, &tensors);
    tensors.q = q_arg.view();
    tensors.k = k_arg.view();
    tensors.v = v_arg.view();
    tensors.block_table = block_table_arg.view();
    tensors.page_indptr = page_indptr_arg.view();
    tensors.page_indices = page_indices_arg.view();
    tensors.kv_lens = kv_lens_arg.view();
    tensors.mask = mask_arg.view();
    tensors.sinks = sinks_arg.view();
    tensors.k_scales = k_scales_arg.view();
    tensors.v_scales = v_scales_arg.view();
    tensors.o = out_arg.view();
    tensors.lse = lse_arg.view();
    check(run_views(tensors, call.handle));
    if (call.on_cuda()) {
      last_producer_ = producer;
      call.finish();
    }
  }

  /// Runs on tensors that are views already, in the plan's workspace.
  Status run_views(AttentionTensors& tensors, Stream stream) {
    tensors.workspace = workspace_.data();
    tensors.workspace_bytes = plan_.workspace_bytes();
    const GilRelease released;
    return plan_.run(tensors, stream);
  }

  const Plan& get() const { return plan_; }

  /// For functions that read the schedule: raises while another thread is planning.
  const Plan& planned() const {
    if (planning_.test(std::memory_order_acquire)) raise_busy();
    return plan_;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(workspace_.owner().ptr());
    Py_VISIT(stream_of_plan_.ptr());
    return 0;
  }

  /// Called when the garbage collector breaks a cycle; the object refuses to run afterwards.
  void clear() {
    plan_ = Plan();
    workspace_.release();
    stream_of_plan_.reset();
  }

 private:
  [[noreturn]] static void raise_busy() {
    throw std::runtime_error("plan: expected one thread at a time, got a second one");
  }

  /// Raises in a second thread, before it overwrites the lengths that the first one reads.
  class Planning {
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

  Device device() const { return plan_.options().device; }

  /// The ranges of keys that a Python function returns for valid lengths; null where plan() will
  /// refuse them. The function gets qo_indptr and kv_lens as bytes.
  const int32_t* key_ranges_of(const Batch& batch, nb::handle function) {
    check(check_lengths(batch));
    const int32_t num_tokens = batch.qo_indptr[batch.batch_size];
    if (num_tokens > plan_.options().max_qo_tokens) return nullptr;
    const auto bytes_of = [](const int32_t* numbers, int32_t count) {
      return nb::bytes(reinterpret_cast<const char*>(numbers),
                       static_cast<size_t>(count) * sizeof(int32_t));
    };
    const nb::object ranges = function(bytes_of(batch.qo_indptr, batch.batch_size + 1),
                                       bytes_of(batch.kv_lens, batch.batch_size));
    return IntsArg("key_range", ranges, num_tokens, "one for each query", key_ranges_, 2).data;
  }

  /// The producer of the last run(); before the first run(), imported_producer().
  Producer producer_to_follow(nb::handle stream) {
    if (!stream.is_none() || device().type == DeviceType::kCpu) return {};
    if (!last_producer_) {
      const Producer imported = imported_producer();
      if (imported.framework == Framework::kOther) return imported;
      last_producer_ = imported;
    }
    return *last_producer_;
  }

  static nb::handle required(const char* name, nb::handle object) {
    if (object.is_none()) raise_type(std::string(name) + ": expected a tensor, got None");
    return object;
  }

  // These two outlive the plan.
  nb::object stream_of_plan_;  // must exist until the next plan() on another stream
  Workspace workspace_;
  Plan plan_;
  std::optional<Producer> last_producer_;
  std::vector<int32_t> qo_indptr_, kv_lens_, kv_indptr_, shared_prefixes_, mask_begin_, key_ranges_;
  std::atomic_flag planning_;
};

/// Finds shared prefixes, as tuples (first_request, num_requests, num_tokens).
std::vector<std::tuple<int, int, int>> find_groups(nb::handle qo_indptr, nb::handle kv_lens,
                                                   int page_size, nb::handle block_table,
                                                   nb::handle page_indptr,
                                                   nb::handle page_indices) {
  std::vector<int32_t> qo_buffer, kv_buffer;
  const IntsArg kv("kv_lens", kv_lens, INT32_MAX / 8, "of any batch", kv_buffer);
  const IntsArg qo("qo_indptr", qo_indptr, int64_t{kv.size} + 1, "one more than kv_lens",
                   qo_buffer);
  check_size("qo_indptr", qo, kv);
  CallStream host;
  const TensorArg table("block_table", block_table, TensorKind::kInt32, host);
  const TensorArg indptr("page_indptr", page_indptr, TensorKind::kInt32, host);
  const TensorArg indices("page_indices", page_indices, TensorKind::kInt32, host);
  Batch batch;
  batch.qo_indptr = qo.data;
  batch.kv_lens = kv.data;
  batch.batch_size = kv.size;
  std::vector<int32_t> rows(3 * static_cast<size_t>(kv.size));
  int32_t count = 0;
  Status status;
  {
    const GilRelease released;
    status = find_shared_prefixes(batch, page_size, {table.view(), indptr.view(), indices.view()},
                                  rows.data(), &count);
  }
  check(status);
  std::vector<std::tuple<int, int, int>> groups;
  groups.reserve(static_cast<size_t>(count));
  for (size_t i = 0; i < 3 * static_cast<size_t>(count); i += 3) {
    groups.emplace_back(rows[i], rows[i + 1], rows[i + 2]);
  }
  return groups;
}

nb::bytes gpu_code(const Variant& variant, const std::string& architecture, DType q_dtype,
                   DType kv_dtype, int head_dim_qk, int head_dim_vo, bool softcap,
                   const std::string& family) {
  const bool has_suffix = !architecture.empty() && architecture.back() > '9';
  const GpuKernelTraits traits = {
      family,      {std::atoi(architecture.c_str()), has_suffix ? architecture.back() : '\0'},
      q_dtype,     kv_dtype,
      head_dim_qk, head_dim_vo,
      softcap,     false};
  std::string key;
  check(gpu_code_key(*variant.impl(), traits, &key));
  GpuCode code;
  check_compiled(make_gpu_code(*variant.impl(), traits, key, &code), variant);
  return nb::bytes(code.cubin.data(), code.cubin.size());
}

int traverse_plan(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<PyPlan>(self)->traverse(visit, arg) : 0;
}

int clear_plan(PyObject* self) {
  nb::inst_ptr<PyPlan>(self)->clear();
  return 0;
}

PyType_Slot plan_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse_plan)},
                            {Py_tp_clear, reinterpret_cast<void*>(&clear_plan)},
                            {0, nullptr}};

using Bodies = std::vector<std::optional<std::string>>;

/// `bodies`: in the order of query, key, value, output, logits, mask.
void make_variant(Variant* self, const std::string& name, const Bodies& bodies, bool softmax,
                  const std::vector<std::tuple<std::string, std::string>>& tensors,
                  const std::vector<std::tuple<std::string, float>>& scalars) {
  const auto text = [&](size_t i) { return bodies.at(i) ? bodies[i]->c_str() : nullptr; };
  // A NUL would end a text early.
  for (const auto& body : bodies) {
    if (body && body->find('\0') != std::string::npos) {
      raise_value("variant: expected bodies without NUL characters, got one");
    }
  }
  std::vector<VariantTensor> c_tensors;
  for (const auto& [tensor, dtype] : tensors) {
    DType type = DType::kFloat16;  // which is refused
    for (const DType known : {DType::kFloat32, DType::kInt32, DType::kInt64, DType::kUInt32}) {
      if (dtype == to_string(known)) type = known;
    }
    c_tensors.push_back({tensor.c_str(), type});
  }
  std::vector<VariantScalar> c_scalars;
  for (const auto& [scalar, value] : scalars) c_scalars.push_back({scalar.c_str(), value});
  Variant variant;
  check(Variant::create({name.c_str(), text(0), text(1), text(2), text(3), text(4), text(5),
                         softmax, c_tensors.data(), static_cast<int32_t>(c_tensors.size()),
                         c_scalars.data(), static_cast<int32_t>(c_scalars.size())},
                        &variant));
  new (self) Variant(std::move(variant));
}

/// Refuses to copy or pickle an object: a copy would share what it points to.
[[noreturn]] void refuse_copy(nb::handle self, nb::args) {
  raise_type(std::string(nb::type_name(self.type()).c_str()) +
             ": expected to stay one object, got a request to copy or pickle it");
}

using WorkTileTuple = std::tuple<int, int, int, int, int, int, int, int>;

std::vector<WorkTileTuple> work_tiles(const PyPlan& plan) {
  const ScheduleView schedule = plan.planned().schedule();
  std::vector<WorkTileTuple> tuples;
  for (int32_t c = 0; c < schedule.num_ctas; ++c) {
    for (int32_t i = schedule.cta_indptr[c]; i < schedule.cta_indptr[c + 1]; ++i) {
      const WorkTile& t = schedule.tiles[i];
      tuples.emplace_back(c, t.segment, t.row_tile, t.kv_head, t.num_kv_heads, t.kv_begin, t.kv_end,
                          t.partial_row);
    }
  }
  return tuples;
}

std::string repr_html(const PyPlan& plan) {
  return "<div><pre>" + plan.planned().describe() + "</pre>" + plan.planned().timeline_svg() +
         "</div>";
}

}  // namespace

Status run_views(nb::handle plan, AttentionTensors& tensors, Stream stream) {
  return nb::inst_ptr<PyPlan>(plan)->run_views(tensors, stream);
}

void bind_plan(nb::module_& m) {
  nb::enum_<DType>(m, "DType", "Element types.")
      .value("float32", DType::kFloat32)
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16)
      .value("float8_e4m3fn", DType::kFloat8E4M3)
      .value("float8_e5m2", DType::kFloat8E5M2);

  nb::class_<Variant>(m, "Variant", "Variant of include/flashplan/variant.h.")
      .def("__init__", &make_variant, "name"_a, "bodies"_a, "softmax"_a, "tensors"_a, "scalars"_a)
      .def("compile_log", &Variant::compile_log)
      .def("gpu_code", &gpu_code, "architecture"_a, "q_dtype"_a, "kv_dtype"_a, "head_dim_qk"_a,
           "head_dim_vo"_a, "softcap"_a, "family"_a = "sm80",
           "The cubin for an architecture, as 90 or 90a, without a GPU. For tests.");
  m.def("set_nvrtc_path", &set_nvrtc_path, "path"_a);

  nb::class_<AttentionOptions>(m, "Options", "AttentionOptions of include/flashplan/plan.h.")
      .def(nb::init<>())
      .def_rw("num_qo_heads", &AttentionOptions::num_qo_heads)
      .def_rw("num_kv_heads", &AttentionOptions::num_kv_heads)
      .def_rw("head_dim_qk", &AttentionOptions::head_dim_qk)
      .def_rw("head_dim_vo", &AttentionOptions::head_dim_vo)
      .def_rw("page_size", &AttentionOptions::page_size)
      .def_rw("q_dtype", &AttentionOptions::q_dtype)
      .def_rw("kv_dtype", &AttentionOptions::kv_dtype)
      .def_rw("o_dtype", &AttentionOptions::o_dtype)
      .def_rw("causal", &AttentionOptions::causal)
      .def_rw("window_left", &AttentionOptions::window_left)
      .def_rw("custom_mask", &AttentionOptions::custom_mask)
      .def_rw("softmax_scale", &AttentionOptions::softmax_scale)
      .def_rw("softcap", &AttentionOptions::softcap)
      .def_rw("rope", &AttentionOptions::rope, nb::arg().none())
      .def_rw("variant", &AttentionOptions::variant)
      .def_rw("max_batch_size", &AttentionOptions::max_batch_size)
      .def_rw("max_qo_tokens", &AttentionOptions::max_qo_tokens)
      .def_rw("num_ctas", &AttentionOptions::num_ctas)
      .def_rw("batch_invariant", &AttentionOptions::batch_invariant)
      .def_prop_rw(
          "hnd", [](const AttentionOptions& o) { return o.kv_layout == KvLayout::kHND; },
          [](AttentionOptions& o, bool hnd) {
            o.kv_layout = hnd ? KvLayout::kHND : KvLayout::kNHD;
          })
      .def_prop_rw(
          "cuda_device",
          [](const AttentionOptions& o) -> std::optional<int> {
            if (o.device.type == DeviceType::kCpu) return std::nullopt;
            return o.device.index;
          },
          [](AttentionOptions& o, std::optional<int> index) {
            o.device = index ? Device{DeviceType::kCuda, *index} : Device{};
          },
          nb::arg().none());

  nb::class_<PyPlan>(m, "Plan", nb::type_slots(plan_slots),
                     "The schedule of the last plan(), and the means to run it.")
      .def(nb::init<const AttentionOptions&, nb::object>(), "options"_a, "workspace"_a = nb::none())
      .def("plan", &PyPlan::plan, "qo_indptr"_a.none(), "kv_lens"_a.none(),
           "kv_indptr"_a.none() = nb::none(), "shared_prefixes"_a.none() = nb::none(),
           "mask_begin"_a.none() = nb::none(), "stream"_a.none() = nb::none(),
           "make_key_ranges"_a.none() = nb::none())
      .def("run", &PyPlan::run, "q"_a.none(), "k"_a.none(), "v"_a.none(), "block_table"_a.none(),
           "page_indptr"_a.none(), "page_indices"_a.none(), "kv_lens"_a.none(), "mask"_a.none(),
           "sinks"_a.none(), "out"_a.none(), "lse"_a.none(), "k_scale"_a.none(), "v_scale"_a.none(),
           "stream"_a.none(), "variant_arguments"_a.none())
      .def(
          "describe", [](const PyPlan& p) { return p.planned().describe(); },
          "The schedule as text: totals, then the first queues.")
      .def("_repr_html_", &repr_html)
      .def("__reduce_ex__", &refuse_copy)
      .def_prop_ro("options", [](const PyPlan& p) { return p.get().options(); })
      .def_prop_ro("workspace_bytes", [](const PyPlan& p) { return p.get().workspace_bytes(); })
      .def_prop_ro("kernel_name", [](const PyPlan& p) { return p.get().kernel_name(); })
      .def_prop_ro("num_tokens", [](const PyPlan& p) { return p.planned().schedule().num_tokens; })
      .def_prop_ro("tile_q", [](const PyPlan& p) { return p.planned().schedule().tile_q; })
      .def_prop_ro("num_ctas", [](const PyPlan& p) { return p.planned().schedule().num_ctas; })
      .def_prop_ro("num_partial_rows",
                   [](const PyPlan& p) { return p.planned().schedule().num_partial_rows; })
      .def_prop_ro(
          "cta_costs",
          [](const PyPlan& p) {
            const ScheduleView schedule = p.planned().schedule();
            return std::vector<int64_t>(schedule.cta_cost, schedule.cta_cost + schedule.num_ctas);
          },
          "Predicted cost of each queue.")
      .def_prop_ro("work_tiles", &work_tiles,
                   "Tuples (cta, request, row_tile, kv_head, num_kv_heads, kv_begin, kv_end, "
                   "partial_row), in the order of the queues.");

  m.def("find_shared_prefixes", &find_groups, "qo_indptr"_a, "kv_lens"_a, "page_size"_a,
        "block_table"_a.none(), "page_indptr"_a.none(), "page_indices"_a.none());

  m.def(
      "is_supported",
      [](const AttentionOptions& options) {
        const Status status = is_supported(options);
        if (status.code != StatusCode::kUnsupported) check(status);
        return std::make_tuple(status.ok(), std::string(status.message));
      },
      "options"_a);
  m.def(
      "workspace_bytes",
      [](const AttentionOptions& options) {
        std::size_t bytes = 0;
        check(workspace_bytes(options, &bytes));
        return bytes;
      },
      "options"_a);
}

}  // namespace flashplan
