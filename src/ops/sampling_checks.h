// SPDX-License-Identifier: Apache-2.0
// Checks of logits, of the options that filter them, and of seeds, for the operators that draw or
// filter tokens.
#pragma once

#include "checks/tensor_checks.h"
#include "flashplan/sampling.h"
#include "ops/params.h"

namespace flashplan {

/// Checks logits: [any, vocab >= 1].
Status check_logits(const TensorArgument& logits) noexcept;

/// Checks a parameter or an output [batch] on the device of the logits, if it is given.
Status check_each(const TensorArgument& argument, DType dtype, const TensorView& logits,
                  int64_t batch) noexcept;

/// The options that filter logits, as arguments of a call.
struct FilterArguments {
  explicit FilterArguments(const SampleOptions& options)
      : temperatures{"temperature", options.temperatures},
        top_ks{"top_k", options.top_ks},
        top_ps{"top_p", options.top_ps},
        min_ps{"min_p", options.min_ps},
        bias{"logit_bias", options.logit_bias} {}

  TensorArgument temperatures, top_ks, top_ps, min_ps, bias;
};

/// Checks the options that filter checked logits, for `batch` requests.
Status check_filters(const TensorView& logits, const SampleOptions& options,
                     int64_t batch) noexcept;

/// Sets the parameters that follow from the logits and the options that filter them; `batch` is not
/// 0.
void set_filters(const TensorView& logits, const SampleOptions& options, int64_t batch,
                 SampleParams* params) noexcept;

/// The tensors that random numbers depend on, as arguments of a call; either may be empty.
struct RandomArguments {
  TensorArgument seeds, offsets;
};

/// Checks seeds and offsets: [batch], or [1] for all requests.
Status check_random(const RandomArguments& random, Device device, int64_t batch) noexcept;

void set_random(int64_t seed, int64_t offset, const RandomArguments& random,
                RandomParams* params) noexcept;

template <class Number>
Parameter<Number> make_parameter(Number all, const TensorView& each) {
  return {all, static_cast<const Number*>(each.data)};
}

}  // namespace flashplan
