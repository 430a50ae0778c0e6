# SPDX-License-Identifier: Apache-2.0
"""The operators torch.ops.flashplan.*, which the functions of `flashplan.torch` call.

They write to memory of their caller and return nothing, which compilers can analyse and CUDA graphs
can capture. An operator takes an object as its handle (handles.py), and a parameter that may be a
number or a tensor as two arguments.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashplan import _core, filtering, ops, penalties, rope, rows, sampling
from flashplan.handles import attention_of, rope_of
from flashplan.quantize import narrow_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashplan.attention import Attention


def _run(attention: int, *arguments: Any) -> None:
    *tensors, q_scale, k_scale, v_scale, pdl, variant_tensors, variant_scalars = arguments
    *inputs, q_scales, k_scales, v_scales, out, lse = tensors
    attn: Attention = attention_of(attention)
    attn._plan.run(
        (
            *inputs,
            _either(q_scale, q_scales),
            _either(k_scale, k_scales),
            _either(v_scale, v_scales),
            out,
            lse,
        ),
        None,
        pdl,
        attn._variant and (tuple(variant_tensors), tuple(variant_scalars)),
    )


def _either(number: float, tensor: Tensor | None) -> float | Tensor:
    return number if tensor is None else tensor


def _append_paged_kv(*arguments: Any) -> None:
    *tensors, kv_layout, kv_dtype, k_scale, k_scales, v_scale, v_scales = arguments
    k, v, k_cache, v_cache, indptr, kv_lens, *pages = tensors
    names = (
        "block_table",
        "page_indptr",
        "page_indices",
        "slot_mapping",
        "batch_indices",
        "positions",
    )
    ops.append_paged_kv(
        k,
        v,
        k_cache,
        v_cache,
        indptr,
        kv_lens,
        **dict(zip(names, pages, strict=True)),
        kv_layout=kv_layout,
        kv_dtype=kv_dtype,
        k_scale=_either(k_scale, k_scales),
        v_scale=_either(v_scale, v_scales),
    )


def _rope_append_paged_kv(*arguments: Any) -> None:
    *tensors, turns, out_q, kv_layout, kv_dtype, k_scale, k_scales, v_scale, v_scales = arguments
    q, k, v, k_cache, v_cache, indptr, kv_lens, block_table, page_indptr, page_indices = tensors
    ops.rope_append_paged_kv(
        q,
        k,
        v,
        k_cache,
        v_cache,
        indptr,
        kv_lens,
        rope_of(turns),
        block_table=block_table,
        page_indptr=page_indptr,
        page_indices=page_indices,
        kv_layout=kv_layout,
        kv_dtype=kv_dtype,
        k_scale=_either(k_scale, k_scales),
        v_scale=_either(v_scale, v_scales),
        out_q=out_q,
    )


def _merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any, lse: Any, b2: bool) -> None:
    ops.merge_states(o_a, lse_a, o_b, lse_b, out=out, lse=lse, base2=b2)


def _rmsnorm(x: Any, weight: Any, out: Any, eps: float, gemma: bool, *narrow: Any) -> None:
    rows.rmsnorm(x, weight, eps, gemma=gemma, out=out, **_narrowing(*narrow))


def _add_rmsnorm(x: Any, residual: Any, weight: Any, eps: float, gemma: bool, *narrow: Any) -> None:
    rows.add_rmsnorm(x, residual, weight, eps, gemma=gemma, **_narrowing(*narrow))


def _add_rmsnorm_out(
    x: Any, residual: Any, weight: Any, out: Any, eps: float, gemma: bool, *narrow: Any
) -> None:
    rows.add_rmsnorm(x, residual, weight, eps, gemma=gemma, out=out, **_narrowing(*narrow))


def _layernorm(x: Any, weight: Any, bias: Any, out: Any, eps: float, *narrow: Any) -> None:
    rows.layernorm(x, weight, bias, eps, out=out, **_narrowing(*narrow))


def _narrowing(out_dtype: str | None, scale: float, scales: Any) -> dict[str, Any]:
    return {"out_dtype": out_dtype, "scale": _either(scale, scales)}


def _gated(function: Any, x: Any, out: Any, out_dtype: Any, scale: float) -> None:
    function(x, out, out_dtype=out_dtype, scale=scale)


def _quantize_fp8(x: Any, scale: float | None, scales: Any, out: Any, found: Any) -> None:
    dtype = narrow_dtype(out.dtype)
    _core.quantize_fp8(x, out, dtype, scale if scales is None else scales, found, None)


def _apply_rope(
    q: Any, k: Any, positions: Any, turns: int | None, table: Any, interleaved: bool, *results: Any
) -> None:
    turning = None if turns is None else rope_of(turns)
    out_q, out_k, out_dtype, q_scale, q_scales, k_scale, k_scales = results
    rope.apply_rope(
        q,
        k,
        positions,
        turning,
        cos_sin_cache=table,
        interleaved=interleaved,
        out_q=out_q,
        out_k=out_k,
        out_dtype=out_dtype,
        q_scale=_either(q_scale, q_scales),
        k_scale=_either(k_scale, k_scales),
    )


def _sample(logits: Any, *arguments: Any) -> None:
    *parameters, logprobs_of, top_ids, top_logprobs = arguments
    *parameters, from_probs, joint, logit_bias, rows, out, logprobs, status = parameters
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "offset")
    given: dict[str, Any] = {
        name: _either(*both) for name, *both in zip(names, parameters[::2], parameters[1::2])
    }
    sampling.sample(
        logits,
        **given,
        from_probs=from_probs,
        joint=joint,
        logit_bias=logit_bias,
        rows=rows,
        out=out,
        logprobs=logprobs,
        status=status,
        logprobs_of=logprobs_of,
        top_logprobs=None if top_ids is None else top_ids.shape[1],
        top_out=None if top_ids is None else (top_ids, top_logprobs),
    )


def _filtered_probs(logits: Any, *arguments: Any) -> None:
    *parameters, from_probs, joint, logit_bias, out, status = arguments
    given = map(_either, parameters[::2], parameters[1::2])
    names = ("temperature", "top_k", "top_p", "min_p")
    options: dict[str, Any] = dict(zip(names, given, strict=True))
    filtering.filtered_probs(
        logits,
        **options,
        from_probs=from_probs,
        joint=joint,
        logit_bias=logit_bias,
        out=out,
        status=status,
    )


def _top_k_mask(logits: Any, top_k: int, top_ks: Any, out: Any) -> None:
    given: Any = _either(top_k, top_ks)
    filtering.top_k_mask(logits, given, out=out)


def _softmax(logits: Any, temperature: float, temperatures: Any, out: Any) -> None:
    sampling.softmax(logits, _either(temperature, temperatures), out)


def _apply_penalties(logits: Any, history: Any, history_lens: Any, *parameters: Any) -> None:
    given = map(_either, parameters[::2], parameters[1::2])
    penalties.apply_penalties(logits, history, history_lens, *given)


_SCALES = "str kv_layout, str? kv_dtype, float k_scale, Tensor? k_scales, float v_scale, "
_SCALES += "Tensor? v_scales"
_NARROWING = "str? out_dtype, float scale, Tensor? scales"
_GATED = "(Tensor x, Tensor(a!) out, str? out_dtype, float scale)"
# The name of each operator, its arguments, and the function that computes it.
_OPERATORS: dict[str, tuple[str, Callable[..., None]]] = {
    "run": (
        "(SymInt attention, Tensor q, Tensor k, Tensor? v, Tensor? q_tail, Tensor? k_tail, "
        "Tensor? block_table, Tensor? page_indptr, Tensor? page_indices, Tensor? kv_lens, "
        "Tensor? topk_indices, Tensor? topk_lens, Tensor? mask, Tensor? sinks, Tensor? q_scales, "
        "Tensor? k_scales, Tensor? v_scales, Tensor(a!) out, Tensor(b!)? lse, float q_scale, "
        "float k_scale, float v_scale, bool pdl, Tensor[] variant_tensors, "
        "float[] variant_scalars)",
        _run,
    ),
    "append_paged_kv": (
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? indptr, "
        "Tensor? kv_lens, Tensor? block_table, Tensor? page_indptr, Tensor? page_indices, "
        f"Tensor? slot_mapping, Tensor? batch_indices, Tensor? positions, {_SCALES})",
        _append_paged_kv,
    ),
    "rope_append_paged_kv": (
        "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indptr, "
        "Tensor kv_lens, Tensor? block_table, Tensor? page_indptr, Tensor? page_indices, "
        f"SymInt rope, Tensor(c!) out_q, {_SCALES})",
        _rope_append_paged_kv,
    ),
    "merge_states": (
        "(Tensor o_a, Tensor lse_a, Tensor? o_b, Tensor? lse_b, Tensor(a!) out, Tensor(b!) lse, "
        "bool base2)",
        _merge_states,
    ),
    "rmsnorm": (
        f"(Tensor x, Tensor? weight, Tensor(a!) out, float eps, bool gemma, {_NARROWING})",
        _rmsnorm,
    ),
    "add_rmsnorm": (
        f"(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float eps, bool gemma, {_NARROWING})",
        _add_rmsnorm,
    ),
    "add_rmsnorm_out": (
        "(Tensor x, Tensor(a!) residual, Tensor? weight, Tensor(b!) out, float eps, bool gemma, "
        f"{_NARROWING})",
        _add_rmsnorm_out,
    ),
    "layernorm": (
        f"(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!) out, float eps, {_NARROWING})",
        _layernorm,
    ),
    "silu_and_mul": (_GATED, partial(_gated, rows.silu_and_mul)),
    "gelu_and_mul": (_GATED, partial(_gated, rows.gelu_and_mul)),
    "gelu_tanh_and_mul": (_GATED, partial(_gated, rows.gelu_tanh_and_mul)),
    "quantize_fp8": (
        "(Tensor x, float? scale, Tensor? scales, Tensor(a!) out, Tensor(b!)? found)",
        _quantize_fp8,
    ),
    "apply_rope": (
        "(Tensor q, Tensor k, Tensor positions, SymInt? rope, Tensor? cos_sin_cache, "
        "bool interleaved, Tensor(a!) out_q, Tensor(b!) out_k, str? out_dtype, float q_scale, "
        "Tensor? q_scales, float k_scale, Tensor? k_scales)",
        _apply_rope,
    ),
    "sample": (
        "(Tensor logits, float temperature, Tensor? temperatures, SymInt top_k, Tensor? top_ks, "
        "float top_p, Tensor? top_ps, float min_p, Tensor? min_ps, SymInt seed, Tensor? seeds, "
        "SymInt offset, Tensor? offsets, bool from_probs, bool joint, Tensor? logit_bias, "
        "Tensor? rows, Tensor(a!) out, Tensor(b!)? logprobs, Tensor(c!)? status, "
        "str logprobs_of, Tensor(d!)? top_ids, Tensor(e!)? top_logprobs)",
        _sample,
    ),
    "filtered_probs": (
        "(Tensor logits, float temperature, Tensor? temperatures, SymInt top_k, Tensor? top_ks, "
        "float top_p, Tensor? top_ps, float min_p, Tensor? min_ps, bool from_probs, bool joint, "
        "Tensor? logit_bias, Tensor(a!) out, Tensor(b!)? status)",
        _filtered_probs,
    ),
    "top_k_mask": (
        "(Tensor logits, SymInt top_k, Tensor? top_ks, Tensor(a!) out)",
        _top_k_mask,
    ),
    "softmax": (
        "(Tensor logits, float temperature, Tensor? temperatures, Tensor(a!) out)",
        _softmax,
    ),
    "apply_penalties": (
        "(Tensor(a!) logits, Tensor history, Tensor history_lens, float repetition, "
        "Tensor? repetitions, float presence, Tensor? presences, float frequency, "
        "Tensor? frequencies)",
        _apply_penalties,
    ),
}


def _fake(*_arguments: object) -> None:
    """Stands for every operator while PyTorch traces with fake tensors. Operators only write to
    their arguments, and fake tensors have no data, so there is nothing to do."""


def _refuse_gradients(operator: Any, *arguments: object) -> None:
    """The kernel of an operator for the dispatch key Autograd.

    AOTAutograd, torch.func and torch.export call it with the caller's tensors. The kernels that run
    after it, for other keys, get tensors that require no gradient, so they could not refuse the
    caller's.
    """
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        for argument, value in zip(operator._schema.arguments, arguments):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and _has_gradient(tensor):
                    _core.raise_gradient(argument.name)
    with torch._C._AutoDispatchBelowAutograd():
        operator(*arguments)


def _has_gradient(tensor: Tensor) -> bool:
    """Whether PyTorch records a gradient of this tensor, backward or forward."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    unpack_dual: Any = forward_ad.unpack_dual
    return unpack_dual(tensor).tangent is not None


_library: Any = torch.library
_autograd = _library.Library("flashplan", "IMPL")
for _name, (_arguments, _function) in _OPERATORS.items():
    _qualified = f"flashplan::{_name}"
    _library.define(_qualified, f"{_arguments} -> ()", tags=torch.Tag.pt2_compliant_tag)
    _library.impl(_qualified, ("CPU", "CUDA"))(_function)
    _library.register_fake(_qualified, _fake)
    _operator = getattr(torch.ops.flashplan, _name).default
    _autograd.impl(_operator, partial(_refuse_gradients, _operator), "Autograd")
