// SPDX-License-Identifier: Apache-2.0
// Binds the operators on rows of a tensor: rotations, norms, activations, quantisation, gathering.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/operator_call.h"
#include "bindings/tensors/numbers.h"
#include "bindings/tensors/scale_arg.h"
#include "flashplan/flashplan.h"

namespace flashplan {
namespace {

using namespace nb::literals;

/// The arguments of a norm for its output: its dtype, and the scale that divides the result. Make
/// it before any tensor is imported: converting a number may run Python code, which could change an
/// imported tensor.
class NormOutput {
 public:
  /// `name`: the argument that the norm writes to, for messages.
  NormOutput(nb::handle out_dtype, nb::handle scale, const char* name = "out")
      : name_(name),
        is_given_(!out_dtype.is_none()),
        stored_(is_given_ ? nb::cast<DType>(out_dtype) : kStoredIn16Bits),
        scale_("scale", scale) {}

  TensorArg tensor(OperatorCall& call, nb::handle out) const {
    return call.output(name_, out, stored_);
  }
  /// Raises TypeError unless `out` has the dtype that the caller named.
  void check(const TensorArg& out) const {
    if (is_given_) check_stored("out_dtype", stored_, name_, out);
  }
  TensorArg scales(OperatorCall& call) const { return scale_.tensor(call.stream()); }
  float scale() const { return scale_.number(); }

 private:
  const char* name_;
  bool is_given_;
  DType stored_;
  ScaleArg scale_;
};

void rmsnorm_of(nb::handle x, nb::handle weight, nb::handle out, nb::handle eps, bool gemma,
                nb::handle out_dtype, nb::handle scale, nb::handle stream) {
  const float eps_arg = float_arg("eps", eps);
  const NormOutput output(out_dtype, scale);
  OperatorCall call("x", x, stream);
  const TensorArg x_arg = call.input("x", x);
  const TensorArg weight_arg = call.optional_input("weight", weight);
  const TensorArg out_arg = output.tensor(call, out);
  output.check(out_arg);
  const TensorArg scales = output.scales(call);
  const RmsNormOptions options{eps_arg, gemma, {output.scale(), scales.view()}};
  call.run([&](Stream on) {
    return rmsnorm(x_arg.view(), weight_arg.view(), out_arg.view(), options, on);
  });
}

/// add_rmsnorm(). Without `out` the result is written to x.
void add_rmsnorm_of(nb::handle x, nb::handle residual, nb::handle weight, nb::handle out,
                    nb::handle eps, bool gemma, nb::handle out_dtype, nb::handle scale,
                    nb::handle stream) {
  const float eps_arg = float_arg("eps", eps);
  const bool in_place = out.is_none() || out.is(x);
  const NormOutput output(out_dtype, scale, in_place ? "x" : "out");
  OperatorCall call("x", x, stream);
  const TensorArg x_arg = in_place ? output.tensor(call, x) : call.input("x", x);
  const TensorArg residual_arg = call.output("residual", residual);
  const TensorArg weight_arg = call.optional_input("weight", weight);
  const TensorArg out_arg =
      in_place ? call.optional_output("out", nb::none()) : output.tensor(call, out);
  output.check(in_place ? x_arg : out_arg);
  const TensorArg scales = output.scales(call);
  const RmsNormOptions options{eps_arg, gemma, {output.scale(), scales.view()}};
  const TensorView& to = in_place ? x_arg.view() : out_arg.view();
  call.run([&](Stream on) {
    return add_rmsnorm(x_arg.view(), residual_arg.view(), weight_arg.view(), to, options, on);
  });
}

void layernorm_of(nb::handle x, nb::handle weight, nb::handle bias, nb::handle out, nb::handle eps,
                  nb::handle out_dtype, nb::handle scale, nb::handle stream) {
  const float eps_arg = float_arg("eps", eps);
  const NormOutput output(out_dtype, scale);
  OperatorCall call("x", x, stream);
  const TensorArg x_arg = call.input("x", x);
  const TensorArg weight_arg = call.optional_input("weight", weight);
  const TensorArg bias_arg = call.optional_input("bias", bias);
  const TensorArg out_arg = output.tensor(call, out);
  output.check(out_arg);
  const TensorArg scales = output.scales(call);
  const LayerNormOptions options{eps_arg, {output.scale(), scales.view()}};
  call.run([&](Stream on) {
    return layernorm(x_arg.view(), weight_arg.view(), bias_arg.view(), out_arg.view(), options, on);
  });
}

void gated_activation_of(Activation activation, nb::handle x, nb::handle out, nb::handle out_dtype,
                         nb::handle scale, nb::handle stream) {
  const float scale_arg = float_arg("scale", scale);
  OperatorCall call("x", x, stream);
  const DType stored = out_dtype.is_none() ? kStoredIn16Bits : nb::cast<DType>(out_dtype);
  const TensorArg x_arg = call.input("x", x);
  const TensorArg out_arg = call.output("out", out, stored);
  if (!out_dtype.is_none()) check_stored("out_dtype", stored, "out", out_arg);
  call.run([&](Stream on) {
    return gated_activation(activation, x_arg.view(), out_arg.view(), scale_arg, on);
  });
}

/// The arguments of apply_rope() for its results: out_dtype is their dtype; q and k are divided by
/// q_scale and k_scale after they are rotated.
class RopeResults {
 public:
  /// `dtype`: the dtype of the results; None: that of q.
  RopeResults(nb::handle dtype, nb::handle q_scale, nb::handle k_scale)
      : given_(!dtype.is_none()),
        stored_(given_ ? nb::cast<DType>(dtype) : kStoredIn16Bits),
        q_scale_("q_scale", q_scale),
        k_scale_("k_scale", k_scale) {}

  const DType& stored() const { return stored_; }
  TensorArg q_scales(OperatorCall& call) const { return q_scale_.tensor(call.stream()); }
  TensorArg k_scales(OperatorCall& call) const { return k_scale_.tensor(call.stream()); }

  /// The scales as numbers and tensors. Checks that the outputs have the dtype that was given.
  RopeScales scales(const TensorArg& q_scales, const TensorArg& k_scales, const TensorArg& out_q,
                    const TensorArg& out_k) const {
    if (given_) {
      check_stored("out_dtype", stored_, "out_q", out_q);
      check_stored("out_dtype", stored_, "out_k", out_k);
    }
    return {q_scale_.number(), k_scale_.number(), q_scales.view(), k_scales.view()};
  }

 private:
  bool given_;
  DType stored_;
  ScaleArg q_scale_, k_scale_;
};

void gather_rows_of(nb::handle x, nb::handle indices, nb::handle out, nb::handle stream) {
  OperatorCall call("x", x, stream);
  const TensorArg x_arg = call.input("x", x);
  const TensorArg indices_arg = call.input("indices", indices, TensorKind::kInt);
  const TensorArg out_arg = call.output("out", out);
  call.run(
      [&](Stream on) { return gather_rows(x_arg.view(), indices_arg.view(), out_arg.view(), on); });
}

void apply_rope_of(nb::handle q, nb::handle k, nb::handle positions, const Rope& rope,
                   nb::handle out_q, nb::handle out_k, nb::handle out_dtype, nb::handle q_scale,
                   nb::handle k_scale, nb::handle stream) {
  const Rope copy = rope;  // another thread may change it during the call
  const RopeResults results(out_dtype, q_scale, k_scale);
  OperatorCall call("q", q, stream);
  const TensorArg q_arg = call.input("q", q);
  const TensorArg k_arg = call.input("k", k);
  const TensorArg positions_arg = call.input("positions", positions, TensorKind::kInt);
  const TensorArg out_q_arg = call.output("out_q", out_q, results.stored());
  const TensorArg out_k_arg = call.output("out_k", out_k, results.stored());
  const TensorArg q_scales = results.q_scales(call);
  const TensorArg k_scales = results.k_scales(call);
  const RopeScales scales = results.scales(q_scales, k_scales, out_q_arg, out_k_arg);
  call.run([&](Stream on) {
    return apply_rope(q_arg.view(), k_arg.view(), positions_arg.view(), copy, out_q_arg.view(),
                      out_k_arg.view(), on, scales);
  });
}

void apply_rope_table_of(nb::handle q, nb::handle k, nb::handle positions, nb::handle table,
                         bool interleaved, nb::handle out_q, nb::handle out_k, nb::handle out_dtype,
                         nb::handle q_scale, nb::handle k_scale, nb::handle stream) {
  const RopeResults results(out_dtype, q_scale, k_scale);
  OperatorCall call("q", q, stream);
  const TensorArg q_arg = call.input("q", q);
  const TensorArg k_arg = call.input("k", k);
  const TensorArg positions_arg = call.input("positions", positions, TensorKind::kInt);
  const TensorArg table_arg = call.input("cos_sin_cache", table, TensorKind::kFloat32);
  const TensorArg out_q_arg = call.output("out_q", out_q, results.stored());
  const TensorArg out_k_arg = call.output("out_k", out_k, results.stored());
  const TensorArg q_scales = results.q_scales(call);
  const TensorArg k_scales = results.k_scales(call);
  const RopeScales scales = results.scales(q_scales, k_scales, out_q_arg, out_k_arg);
  call.run([&](Stream on) {
    return apply_rope(q_arg.view(), k_arg.view(), positions_arg.view(), table_arg.view(),
                      interleaved, out_q_arg.view(), out_k_arg.view(), on, scales);
  });
}

/// quantize_fp8(). `scale`: a number, a tensor, or None to compute the scale from x. Unless `scale`
/// is a tensor, the scale that was used is written to `found`.
void quantize_fp8_of(nb::handle x, nb::handle out, DType dtype, nb::handle scale, nb::handle found,
                     nb::handle stream) {
  std::optional<ScaleArg> given;
  if (!scale.is_none()) given.emplace("scale", scale);
  const bool is_tensor = given && !given->object().is_none();
  OperatorCall call("x", x, stream);
  const TensorArg x_arg = call.input("x", x);
  const TensorArg out_arg = call.output("out", out, dtype);
  check_stored("dtype", dtype, "out", out_arg);
  const TensorArg scale_arg =
      is_tensor ? given->tensor(call.stream()) : call.output("scale", found);
  const ScaleSource source = is_tensor ? ScaleSource::kTensor
                             : given   ? ScaleSource::kNumber
                                       : ScaleSource::kValues;
  call.run([&](Stream on) {
    return quantize_fp8(x_arg.view(), out_arg.view(), scale_arg.view(), source,
                        given ? given->number() : 1.0F, on);
  });
}

}  // namespace

void bind_row_ops(nb::module_& m) {
  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::kSilu)
      .value("gelu", Activation::kGelu)
      .value("gelu_tanh", Activation::kGeluTanh);
  nb::enum_<RopeScaling>(m, "RopeScaling")
      .value("linear", RopeScaling::kLinear)
      .value("llama3", RopeScaling::kLlama3)
      .value("yarn", RopeScaling::kYarn);
  nb::class_<Rope>(m, "Rope")
      .def(nb::init<>())
      .def_rw("theta", &Rope::theta)
      .def_rw("scale", &Rope::scale)
      .def_rw("rotary_dim", &Rope::rotary_dim)
      .def_rw("interleaved", &Rope::interleaved)
      .def_rw("scaling", &Rope::scaling)
      .def_rw("original_length", &Rope::original_length)
      .def_rw("low_freq_factor", &Rope::low_freq_factor)
      .def_rw("high_freq_factor", &Rope::high_freq_factor)
      .def_rw("beta_fast", &Rope::beta_fast)
      .def_rw("beta_slow", &Rope::beta_slow)
      .def_rw("truncate", &Rope::truncate)
      .def_rw("attention_factor", &Rope::attention_factor)
      .def("set_frequencies", [](Rope& rope, const std::vector<double>& frequencies) {
        if (frequencies.size() > rope.frequencies.size()) {
          raise_value("rope.frequencies: expected at most " +
                      std::to_string(rope.frequencies.size()) + " numbers, got " +
                      std::to_string(frequencies.size()));
        }
        std::copy(frequencies.begin(), frequencies.end(), rope.frequencies.begin());
        rope.num_frequencies = static_cast<int32_t>(frequencies.size());
      });
  m.def("apply_rope", &apply_rope_of, "q"_a.none(), "k"_a.none(), "positions"_a.none(), "rope"_a,
        "out_q"_a.none(), "out_k"_a.none(), "out_dtype"_a.none(), "q_scale"_a.none(),
        "k_scale"_a.none(), "stream"_a.none());
  m.def("apply_rope_table", &apply_rope_table_of, "q"_a.none(), "k"_a.none(), "positions"_a.none(),
        "cos_sin_cache"_a.none(), "interleaved"_a, "out_q"_a.none(), "out_k"_a.none(),
        "out_dtype"_a.none(), "q_scale"_a.none(), "k_scale"_a.none(), "stream"_a.none());
  m.def("rmsnorm", &rmsnorm_of, "x"_a.none(), "weight"_a.none(), "out"_a.none(), "eps"_a.none(),
        "gemma"_a, "out_dtype"_a.none(), "scale"_a.none(), "stream"_a.none());
  m.def("add_rmsnorm", &add_rmsnorm_of, "x"_a.none(), "residual"_a.none(), "weight"_a.none(),
        "out"_a.none(), "eps"_a.none(), "gemma"_a, "out_dtype"_a.none(), "scale"_a.none(),
        "stream"_a.none());
  m.def("layernorm", &layernorm_of, "x"_a.none(), "weight"_a.none(), "bias"_a.none(),
        "out"_a.none(), "eps"_a.none(), "out_dtype"_a.none(), "scale"_a.none(), "stream"_a.none());
  m.def("quantize_fp8", &quantize_fp8_of, "x"_a.none(), "out"_a.none(), "dtype"_a, "scale"_a.none(),
        "found"_a.none(), "stream"_a.none());
  m.def("gated_activation", &gated_activation_of, "activation"_a, "x"_a.none(), "out"_a.none(),
        "out_dtype"_a.none(), "scale"_a.none(), "stream"_a.none());
  m.def("gather_rows", &gather_rows_of, "x"_a.none(), "indices"_a.none(), "out"_a.none(),
        "stream"_a.none());
}

}  // namespace flashplan
