// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace flashplan {

void bind_options(nanobind::module_& m);
void bind_variant(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_ops(nanobind::module_& m);
void bind_mla(nanobind::module_& m);
void bind_row_ops(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_xla(nanobind::module_& m);

}  // namespace flashplan
