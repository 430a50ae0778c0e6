// SPDX-License-Identifier: Apache-2.0
#include "bindings/run/run_args.h"

#include <string>

#include "bindings/tensors/numbers.h"

namespace flashplan {
namespace {

nb::handle required(const char* name, nb::handle object) {
  if (object.is_none()) raise_type(std::string(name) + ": expected a tensor, got None");
  return object;
}

}  // namespace

RunArgs::RunArgs(const AttentionOptions& options, const RunObjects& o, nb::handle stream)
    : variant_args_(options.variant, o.variant_arguments),
      k_scale_("k_scale", o.k_scale),
      v_scale_("v_scale", o.v_scale),
      pdl_(bool_arg("pdl", o.pdl)),
      producer_(producer_of(o.q)),
      call_(call_stream(stream, producer_, options.device)),
      q_("q", required("q", o.q), TensorKind::kFloat, call_, &options.q_dtype),
      k_("k", required("k", o.k), TensorKind::kFloat, call_, &options.kv_dtype),
      v_("v", options.shared_kv ? o.v : required("v", o.v), TensorKind::kFloat, call_,
         &options.kv_dtype),
      q_tail_("q_tail", o.q_tail, TensorKind::kFloat, call_, &options.q_dtype),
      k_tail_("k_tail", o.k_tail, TensorKind::kFloat, call_, &options.kv_dtype),
      block_table_("block_table", o.block_table, TensorKind::kInt32, call_),
      page_indptr_("page_indptr", o.page_indptr, TensorKind::kInt32, call_),
      page_indices_("page_indices", o.page_indices, TensorKind::kInt32, call_),
      kv_lens_("kv_lens", o.kv_lens, TensorKind::kInt32, call_),
      mask_("mask", o.mask, TensorKind::kUInt32, call_),
      sinks_("sinks", o.sinks, TensorKind::kFloat32, call_),
      k_scales_(k_scale_.tensor(call_)),
      v_scales_(v_scale_.tensor(call_)),
      out_("out", required("out", o.out), TensorKind::kFloat, call_, &options.o_dtype,
           Access::kWrite),
      lse_("lse", o.lse, TensorKind::kFloat32, call_, nullptr, Access::kWrite) {
  variant_args_.import(o.variant_arguments, call_, &tensors_);
  tensors_.k_scale = k_scale_.number();
  tensors_.v_scale = v_scale_.number();
  tensors_.pdl = pdl_;
  tensors_.q = q_.view();
  tensors_.k = k_.view();
  tensors_.v = v_.view();
  tensors_.q_tail = q_tail_.view();
  tensors_.k_tail = k_tail_.view();
  tensors_.block_table = block_table_.view();
  tensors_.page_indptr = page_indptr_.view();
  tensors_.page_indices = page_indices_.view();
  tensors_.kv_lens = kv_lens_.view();
  tensors_.mask = mask_.view();
  tensors_.sinks = sinks_.view();
  tensors_.k_scales = k_scales_.view();
  tensors_.v_scales = v_scales_.view();
  tensors_.o = out_.view();
  tensors_.lse = lse_.view();
}

}  // namespace flashplan
