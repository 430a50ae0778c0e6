// SPDX-License-Identifier: Apache-2.0
// The operators on rows of a tensor.
#include "bindings.h"
#include "flashplan/flashplan.h"
#include "operator_call.h"

namespace flashplan {
namespace {

using namespace nb::literals;

void rmsnorm_of(nb::handle x, nb::handle weight, nb::handle out, nb::handle eps, bool gemma,
                nb::handle stream) {
  const RmsNormOptions options{float_arg("eps", eps), gemma};
  OperatorCall call("x", x, stream);
  const TensorArg x_arg = call.input("x", x);
  const TensorArg weight_arg = call.input("weight", weight);
  const TensorArg out_arg = call.output("out", out);
  call.run([&](Stream on) {
    return rmsnorm(x_arg.view(), weight_arg.view(), out_arg.view(), options, on);
  });
}

void add_rmsnorm_of(nb::handle x, nb::handle residual, nb::handle weight, nb::handle eps,
                    bool gemma, nb::handle stream) {
  const RmsNormOptions options{float_arg("eps", eps), gemma};
  OperatorCall call("x", x, stream);
  const TensorArg x_arg = call.output("x", x);
  const TensorArg residual_arg = call.output("residual", residual);
  const TensorArg weight_arg = call.input("weight", weight);
  call.run([&](Stream on) {
    return add_rmsnorm(x_arg.view(), residual_arg.view(), weight_arg.view(), options, on);
  });
}

void layernorm_of(nb::handle x, nb::handle weight, nb::handle bias, nb::handle out, nb::handle eps,
                  nb::handle stream) {
  const float eps_arg = float_arg("eps", eps);
  OperatorCall call("x", x, stream);
  const TensorArg x_arg = call.input("x", x);
  const TensorArg weight_arg = call.input("weight", weight);
  const TensorArg bias_arg = call.optional_input("bias", bias);
  const TensorArg out_arg = call.output("out", out);
  call.run([&](Stream on) {
    return layernorm(x_arg.view(), weight_arg.view(), bias_arg.view(), out_arg.view(), eps_arg, on);
  });
}

void gated_activation_of(Activation activation, nb::handle x, nb::handle out, nb::handle out_dtype,
                         nb::handle scale, nb::handle stream) {
  const float scale_arg = float_arg("scale", scale);
  OperatorCall call("x", x, stream);
  const DType stored = out_dtype.is_none() ? kStoredIn16Bits : nb::cast<DType>(out_dtype);
  const TensorArg x_arg = call.input("x", x);
  const TensorArg out_arg = call.output("out", out, stored);
  call.run([&](Stream on) {
    return gated_activation(activation, x_arg.view(), out_arg.view(), scale_arg, on);
  });
}

}  // namespace

void bind_row_ops(nb::module_& m) {
  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::kSilu)
      .value("gelu", Activation::kGelu)
      .value("gelu_tanh", Activation::kGeluTanh);
  m.def("rmsnorm", &rmsnorm_of, "x"_a.none(), "weight"_a.none(), "out"_a.none(), "eps"_a.none(),
        "gemma"_a, "stream"_a.none());
  m.def("add_rmsnorm", &add_rmsnorm_of, "x"_a.none(), "residual"_a.none(), "weight"_a.none(),
        "eps"_a.none(), "gemma"_a, "stream"_a.none());
  m.def("layernorm", &layernorm_of, "x"_a.none(), "weight"_a.none(), "bias"_a.none(),
        "out"_a.none(), "eps"_a.none(), "stream"_a.none());
  m.def("gated_activation", &gated_activation_of, "activation"_a, "x"_a.none(), "out"_a.none(),
        "out_dtype"_a.none(), "scale"_a.none(), "stream"_a.none());
}

}  // namespace flashplan
