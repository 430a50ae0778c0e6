// SPDX-License-Identifier: Apache-2.0
// Binds sampling, its filters, verification of drafts, penalties and softmax.
#include "bindings/bindings.h"
#include "bindings/operator_call.h"
#include "flashplan/flashplan.h"

namespace flashplan {
namespace {

using namespace nb::literals;

/// A parameter of sample(): a number, already converted by the Python layer, or a tensor with a
/// number for each request.
template <class Number>
class ParameterArg {
 public:
  ParameterArg(const char* name, nb::handle value, TensorKind kind, Number* number,
               OperatorCall& call)
      : tensor_(call.optional_input(name, is_number(value) ? nb::none() : value, kind)) {
    if (is_number(value)) *number = nb::cast<Number>(value);
  }
  const TensorView& view() const { return tensor_.view(); }

 private:
  static bool is_number(nb::handle value) {
    return PyFloat_Check(value.ptr()) != 0 || PyLong_Check(value.ptr()) != 0;
  }
  TensorArg tensor_;
};

/// The parameters of filters, each a number or a tensor. Imported tensors stay valid as long as
/// this object.
class FilterArgs {
 public:
  FilterArgs(nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p,
             nb::handle logit_bias, SampleOptions* options, OperatorCall& call)
      : temperature_("temperature", temperature, TensorKind::kFloat32, &options->temperature, call),
        top_k_("top_k", top_k, TensorKind::kInt32, &options->top_k, call),
        top_p_("top_p", top_p, TensorKind::kFloat32, &options->top_p, call),
        min_p_("min_p", min_p, TensorKind::kFloat32, &options->min_p, call),
        bias_(call.optional_input("logit_bias", logit_bias, TensorKind::kFloat32)) {
    options->temperatures = temperature_.view();
    options->top_ks = top_k_.view();
    options->top_ps = top_p_.view();
    options->min_ps = min_p_.view();
    options->logit_bias = bias_.view();
  }

 private:
  ParameterArg<float> temperature_;
  ParameterArg<int32_t> top_k_;
  ParameterArg<float> top_p_, min_p_;
  TensorArg bias_;
};

void sample_of(nb::handle logits, nb::handle temperature, nb::handle top_k, nb::handle top_p,
               nb::handle min_p, nb::handle seed, nb::handle offset, bool from_probs, bool joint,
               nb::handle logit_bias, nb::handle rows, nb::handle out, nb::handle logprobs,
               nb::handle status, bool raw, nb::handle top_ids, nb::handle top_logprobs,
               nb::handle stream) {
  OperatorCall call("logits", logits, stream);
  SampleOptions options;
  options.from_probs = from_probs;
  options.joint = joint;
  const TensorArg logits_arg = call.input("logits", logits);
  const FilterArgs filters(temperature, top_k, top_p, min_p, logit_bias, &options, call);
  const ParameterArg seed_arg("seed", seed, TensorKind::kInt64, &options.seed, call);
  const ParameterArg offset_arg("offset", offset, TensorKind::kInt64, &options.offset, call);
  const TensorArg rows_arg = call.optional_input("rows", rows, TensorKind::kInt);
  options.seeds = seed_arg.view();
  options.offsets = offset_arg.view();
  options.rows = rows_arg.view();
  const TensorArg out_arg = call.int_output("out", out);
  const TensorArg logprobs_arg = call.optional_output("logprobs", logprobs);
  const TensorArg status_arg = call.int_output("status", status);
  const TensorArg top_ids_arg = call.int_output("top_ids", top_ids);
  const TensorArg top_logprobs_arg = call.optional_output("top_logprobs", top_logprobs);
  const SampleOutputs outputs{out_arg.view(),     logprobs_arg.view(),
                              status_arg.view(),  raw ? LogprobsOf::kRaw : LogprobsOf::kFiltered,
                              top_ids_arg.view(), top_logprobs_arg.view()};
  call.run([&](Stream on) { return sample(logits_arg.view(), options, outputs, on); });
}

void filtered_probs_of(nb::handle logits, nb::handle temperature, nb::handle top_k,
                       nb::handle top_p, nb::handle min_p, bool from_probs, bool joint,
                       nb::handle logit_bias, nb::handle out, nb::handle status,
                       nb::handle stream) {
  OperatorCall call("logits", logits, stream);
  SampleOptions options;
  options.from_probs = from_probs;
  options.joint = joint;
  const TensorArg logits_arg = call.input("logits", logits);
  const FilterArgs filters(temperature, top_k, top_p, min_p, logit_bias, &options, call);
  const TensorArg out_arg = call.output("out", out);
  const TensorArg status_arg = call.int_output("status", status);
  call.run([&](Stream on) {
    return filtered_probs(logits_arg.view(), options, out_arg.view(), status_arg.view(), on);
  });
}

void top_k_mask_of(nb::handle logits, nb::handle top_k, nb::handle out, nb::handle stream) {
  OperatorCall call("logits", logits, stream);
  int32_t number = 1;
  const TensorArg logits_arg = call.input("logits", logits);
  const ParameterArg top_k_arg("top_k", top_k, TensorKind::kInt32, &number, call);
  const TensorArg out_arg = call.output("out", out);
  call.run([&](Stream on) {
    return top_k_mask(logits_arg.view(), number, top_k_arg.view(), out_arg.view(), on);
  });
}

void softmax_of(nb::handle logits, nb::handle temperature, nb::handle out, nb::handle stream) {
  OperatorCall call("logits", logits, stream);
  float number = 1.0F;
  const TensorArg logits_arg = call.input("logits", logits);
  const ParameterArg temperature_arg("temperature", temperature, TensorKind::kFloat32, &number,
                                     call);
  const TensorArg out_arg = call.output("out", out);
  call.run([&](Stream on) {
    return softmax(logits_arg.view(), number, temperature_arg.view(), out_arg.view(), on);
  });
}

void speculative_verify_of(nb::handle draft_tokens, nb::handle draft_probs, nb::handle target_probs,
                           nb::handle draft_parents, nb::handle seed, nb::handle offset,
                           nb::handle out, nb::handle num_accepted, nb::handle nodes,
                           nb::handle status, nb::handle stream) {
  OperatorCall call("target_probs", target_probs, stream);
  VerifyOptions options;
  const TensorArg tokens_arg = call.input("draft_tokens", draft_tokens, TensorKind::kInt);
  const TensorArg draft_arg = call.optional_input("draft_probs", draft_probs);
  const TensorArg target_arg = call.input("target_probs", target_probs);
  const TensorArg parents_arg =
      call.optional_input("draft_parents", draft_parents, TensorKind::kInt32);
  const ParameterArg seed_arg("seed", seed, TensorKind::kInt64, &options.seed, call);
  const ParameterArg offset_arg("offset", offset, TensorKind::kInt64, &options.offset, call);
  const TensorArg out_arg = call.int_output("out", out);
  const TensorArg num_accepted_arg = call.int_output("num_accepted", num_accepted);
  const TensorArg nodes_arg = call.int_output("nodes", nodes);
  const TensorArg status_arg = call.int_output("status", status);
  options.seeds = seed_arg.view();
  options.offsets = offset_arg.view();
  const Drafts drafts{tokens_arg.view(), draft_arg.view(), target_arg.view(), parents_arg.view()};
  const VerifyOutputs outputs{out_arg.view(), num_accepted_arg.view(), nodes_arg.view(),
                              status_arg.view()};
  call.run([&](Stream on) { return speculative_verify(drafts, options, outputs, on); });
}

void apply_penalties_of(nb::handle logits, nb::handle history, nb::handle history_lens,
                        nb::handle repetition, nb::handle presence, nb::handle frequency,
                        nb::handle stream) {
  OperatorCall call("logits", logits, stream);
  PenaltyOptions options;
  const TensorArg logits_arg = call.output("logits", logits);
  const TensorArg history_arg = call.input("history", history, TensorKind::kInt);
  const TensorArg lens_arg = call.input("history_lens", history_lens, TensorKind::kInt32);
  const ParameterArg repetition_arg("repetition", repetition, TensorKind::kFloat32,
                                    &options.repetition, call);
  const ParameterArg presence_arg("presence", presence, TensorKind::kFloat32, &options.presence,
                                  call);
  const ParameterArg frequency_arg("frequency", frequency, TensorKind::kFloat32, &options.frequency,
                                   call);
  options.repetitions = repetition_arg.view();
  options.presences = presence_arg.view();
  options.frequencies = frequency_arg.view();
  call.run([&](Stream on) {
    return apply_penalties(logits_arg.view(), history_arg.view(), lens_arg.view(), options, on);
  });
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("sample", &sample_of, "logits"_a.none(), "temperature"_a.none(), "top_k"_a.none(),
        "top_p"_a.none(), "min_p"_a.none(), "seed"_a.none(), "offset"_a.none(), "from_probs"_a,
        "joint"_a, "logit_bias"_a.none(), "rows"_a.none(), "out"_a.none(), "logprobs"_a.none(),
        "status"_a.none(), "raw"_a, "top_ids"_a.none(), "top_logprobs"_a.none(), "stream"_a.none());
  m.def("filtered_probs", &filtered_probs_of, "logits"_a.none(), "temperature"_a.none(),
        "top_k"_a.none(), "top_p"_a.none(), "min_p"_a.none(), "from_probs"_a, "joint"_a,
        "logit_bias"_a.none(), "out"_a.none(), "status"_a.none(), "stream"_a.none());
  m.def("top_k_mask", &top_k_mask_of, "logits"_a.none(), "top_k"_a.none(), "out"_a.none(),
        "stream"_a.none());
  m.def("speculative_verify", &speculative_verify_of, "draft_tokens"_a.none(),
        "draft_probs"_a.none(), "target_probs"_a.none(), "draft_parents"_a.none(), "seed"_a.none(),
        "offset"_a.none(), "out"_a.none(), "num_accepted"_a.none(), "nodes"_a.none(),
        "status"_a.none(), "stream"_a.none());
  m.def("apply_penalties", &apply_penalties_of, "logits"_a.none(), "history"_a.none(),
        "history_lens"_a.none(), "repetition"_a.none(), "presence"_a.none(), "frequency"_a.none(),
        "stream"_a.none());
  m.def("softmax", &softmax_of, "logits"_a.none(), "temperature"_a.none(), "out"_a.none(),
        "stream"_a.none());
}

}  // namespace flashplan
