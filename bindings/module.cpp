// SPDX-License-Identifier: Apache-2.0
// The extension module: it calls each bind_ function, and adds the exceptions.
#include <nanobind/nanobind.h>

#include <cstdlib>
#include <string>

#include "bindings/bindings.h"
#include "bindings/tensors/tensor.h"

namespace flashplan {
namespace {

PyObject* unsupported_error = nullptr;
PyObject* cuda_error = nullptr;

PyObject* exception_of(StatusCode code) {
  switch (code) {
    case StatusCode::kInvalidArgument: return PyExc_ValueError;
    case StatusCode::kInvalidType: return PyExc_TypeError;
    case StatusCode::kUnsupported: return unsupported_error;
    case StatusCode::kOutOfMemory: return PyExc_MemoryError;
    case StatusCode::kCudaError: return cuda_error;
    case StatusCode::kNotReady:
    case StatusCode::kOk: break;
  }
  return PyExc_RuntimeError;
}

PyObject* add_exception(nb::module_& m, const char* name, const char* doc, PyObject* base) {
  PyObject* type =
      PyErr_NewExceptionWithDoc((std::string("flashplan.") + name).c_str(), doc, base, nullptr);
  if (type == nullptr) throw nb::python_error();
  m.attr(name) = nb::handle(type);
  return type;  // the module keeps it alive until the process ends
}

}  // namespace

void raise_status(const Status& status) {
  PyErr_SetString(exception_of(status.code), status.message);
  throw nb::python_error();
}

}  // namespace flashplan

NB_MODULE(_core, m) {
  // Types are registered for the life of the process, and the objects of a first module refer to
  // them, so a second module can not register its own.
  static bool is_loaded = false;
  if (is_loaded) {
    throw nanobind::import_error("flashplan: expected one import per process, got a second one");
  }
  is_loaded = true;
  m.doc() = "flashplan's C++ library; the documented surface is the package flashplan.";
  flashplan::unsupported_error = flashplan::add_exception(
      m, "UnsupportedError", "Valid, but no kernel of this build can do it.",
      PyExc_NotImplementedError);
  flashplan::cuda_error =
      flashplan::add_exception(m, "CudaError", "A CUDA call failed.", PyExc_RuntimeError);
  flashplan::bind_options(m);
  flashplan::bind_variant(m);
  flashplan::bind_plan(m);
  flashplan::bind_ops(m);
  flashplan::bind_row_ops(m);
  flashplan::bind_mla(m);
  flashplan::bind_sampling(m);
  flashplan::bind_xla(m);
  // PyTorch's registry of operators and the frames of daemon threads keep the caller's objects for
  // the life of the process. nanobind would report them at exit, on stderr, as leaked.
  nanobind::set_leak_warnings(std::getenv("FLASHPLAN_LEAK_WARNINGS") != nullptr);
}
