// SPDX-License-Identifier: Apache-2.0
// From a description to source that both engines compile.
#pragma once

#include <string>

#include "variant/variant_impl.h"

namespace flashplan {

/// `struct UserVariant`, for a place where Standard, Softcap and OwnLogits of an engine are seen,
/// and the functions of abi/variant_math.h. `softcap`: of the plan.
std::string variant_source(const Variant::Impl& variant, bool softcap);

/// "DType::kFloat16".
const char* dtype_constant(DType dtype);

}  // namespace flashplan
