# SPDX-License-Identifier: Apache-2.0
"""The functions of `flashplan.torch` except run(), and except those in torch_heads.py.

Each is the function of the same name in the package, as an operator of PyTorch on torch's current
stream. The package's function describes arguments, results and errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

# Importing torch_ops defines the operators.
import flashplan.torch_ops  # noqa: F401
from flashplan.rope import Rope
from flashplan.values import dtype_name, is_hnd

if TYPE_CHECKING:
    from flashplan.types import KvDType, KvLayout, LogprobsOf

_operators: Any = torch.ops.flashplan


def number_and_tensor(
    value: float | Tensor | None, default: float = 1.0
) -> tuple[float, Tensor | None]:
    """Splits a parameter into a number and a tensor or None. The value None becomes `default`."""
    if isinstance(value, Tensor):
        return default, value
    return default if value is None else value, None


def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gemma: bool = False,
    out: Tensor | None = None,
    out_dtype: KvDType | None = None,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """`flashplan.rmsnorm()` as an operator."""
    out, name = _output(x, x.shape, out, out_dtype)
    _operators.rmsnorm(x, weight, out, eps, gemma, name, *number_and_tensor(scale))
    return out


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gemma: bool = False,
    out: Tensor | None = None,
    out_dtype: KvDType | None = None,
    scale: float | Tensor = 1.0,
) -> None:
    """`flashplan.add_rmsnorm()` as an operator."""
    name = None if out_dtype is None else dtype_name(out_dtype)
    options = eps, gemma, name, *number_and_tensor(scale)
    if out is None:
        _operators.add_rmsnorm(x, residual, weight, *options)
    else:
        _operators.add_rmsnorm_out(x, residual, weight, out, *options)


def layernorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
    out_dtype: KvDType | None = None,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """`flashplan.layernorm()` as an operator."""
    out, name = _output(x, x.shape, out, out_dtype)
    _operators.layernorm(x, weight, bias, out, eps, name, *number_and_tensor(scale))
    return out


def _output(
    x: Tensor, shape: Any, out: Tensor | None, out_dtype: KvDType | None
) -> tuple[Tensor, str | None]:
    """`out`, or a new output, and the name of `out_dtype` if that is given."""
    name = None if out_dtype is None else dtype_name(out_dtype)
    if out is None:
        out = x.new_empty(shape, dtype=x.dtype if name is None else getattr(torch, name))
    return out, name


def silu_and_mul(
    x: Tensor,
    out: Tensor | None = None,
    *,
    out_dtype: KvDType | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`flashplan.silu_and_mul()` as an operator."""
    return _gated(_operators.silu_and_mul, x, out, out_dtype, scale)


def gelu_and_mul(
    x: Tensor,
    out: Tensor | None = None,
    *,
    out_dtype: KvDType | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`flashplan.gelu_and_mul()` as an operator."""
    return _gated(_operators.gelu_and_mul, x, out, out_dtype, scale)


def gelu_tanh_and_mul(
    x: Tensor,
    out: Tensor | None = None,
    *,
    out_dtype: KvDType | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`flashplan.gelu_tanh_and_mul()` as an operator."""
    return _gated(_operators.gelu_tanh_and_mul, x, out, out_dtype, scale)


def _gated(
    operator: Any, x: Tensor, out: Tensor | None, out_dtype: KvDType | None, scale: float
) -> Tensor:
    out, name = _output(x, (*x.shape[:-1], x.shape[-1] // 2), out, out_dtype)
    operator(x, out, name, scale)
    return out


def softmax(
    logits: Tensor, temperature: float | Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`flashplan.softmax()` as an operator."""
    if out is None:
        out = logits.new_empty(logits.shape, dtype=torch.float32)
    _operators.softmax(logits, *number_and_tensor(temperature), out)
    return out


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    from_probs: bool = False,
    joint: bool = False,
    logit_bias: Tensor | None = None,
    rows: Tensor | None = None,
    return_logprobs: bool = False,
    logprobs_of: LogprobsOf = "filtered",
    top_logprobs: int | None = None,
    out: Tensor | None = None,
    logprobs: Tensor | None = None,
    top_out: tuple[Tensor, Tensor] | None = None,
    status: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """`flashplan.sample()` as an operator.

    A compiled function may be compiled again for other numbers: give seed and offset, which change
    in each step, as tensors.
    """
    batch = (logits if rows is None else rows).shape[:1]
    if out is None:
        out = logits.new_empty(batch, dtype=torch.int32)
    if logprobs is None and (return_logprobs or top_logprobs is not None):
        logprobs = logits.new_empty(batch, dtype=torch.float32)
    top_ids, top = top_out or (None, None)
    if top_logprobs is not None and top_ids is None:
        shape = (*batch, top_logprobs)
        top_ids = logits.new_empty(shape, dtype=torch.int32)
        top = logits.new_empty(shape, dtype=torch.float32)
    _operators.sample(
        logits,
        *number_and_tensor(temperature),
        *number_and_tensor(top_k, 2**31 - 1),
        *number_and_tensor(top_p),
        *number_and_tensor(min_p, 0.0),
        *number_and_tensor(seed, 0),
        *number_and_tensor(offset, 0),
        from_probs,
        joint,
        logit_bias,
        rows,
        out,
        logprobs,
        status,
        logprobs_of,
        top_ids,
        top,
    )
    if logprobs is None:
        return out
    return (out, logprobs) if top_ids is None or top is None else (out, logprobs, top_ids, top)


def filtered_probs(
    logits: Tensor,
    *,
    temperature: float | Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    from_probs: bool = False,
    joint: bool = False,
    logit_bias: Tensor | None = None,
    out: Tensor | None = None,
    status: Tensor | None = None,
) -> Tensor:
    """`flashplan.filtered_probs()` as an operator."""
    if out is None:
        out = logits.new_empty(logits.shape, dtype=torch.float32)
    _operators.filtered_probs(
        logits,
        *number_and_tensor(temperature),
        *number_and_tensor(top_k, 2**31 - 1),
        *number_and_tensor(top_p),
        *number_and_tensor(min_p, 0.0),
        from_probs,
        joint,
        logit_bias,
        out,
        status,
    )
    return out


def top_k_renorm(
    probs: Tensor,
    top_k: int | Tensor,
    *,
    out: Tensor | None = None,
    status: Tensor | None = None,
) -> Tensor:
    """`flashplan.top_k_renorm()` as an operator."""
    return filtered_probs(probs, top_k=top_k, from_probs=True, out=out, status=status)


def top_p_renorm(
    probs: Tensor,
    top_p: float | Tensor,
    *,
    out: Tensor | None = None,
    status: Tensor | None = None,
) -> Tensor:
    """`flashplan.top_p_renorm()` as an operator."""
    return filtered_probs(probs, top_p=top_p, from_probs=True, out=out, status=status)


def top_k_mask(logits: Tensor, top_k: int | Tensor, *, out: Tensor | None = None) -> Tensor:
    """`flashplan.top_k_mask()` as an operator."""
    if out is None:
        out = logits.new_empty(logits.shape)
    _operators.top_k_mask(logits, *number_and_tensor(top_k, 2**31 - 1), out)
    return out


def apply_penalties(
    logits: Tensor,
    history: Tensor,
    history_lens: Tensor,
    repetition: float | Tensor | None = None,
    presence: float | Tensor | None = None,
    frequency: float | Tensor | None = None,
) -> None:
    """`flashplan.apply_penalties()` as an operator."""
    _operators.apply_penalties(
        logits,
        history,
        history_lens,
        *number_and_tensor(repetition),
        *number_and_tensor(presence, 0.0),
        *number_and_tensor(frequency, 0.0),
    )


def merge_states(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor | None = None,
    lse_b: Tensor | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    base2: bool = False,
) -> tuple[Tensor, Tensor]:
    """`flashplan.merge_states()` as an operator."""
    is_stack = o_b is None
    o = o_a.new_empty(o_a.shape[is_stack:]) if out is None else out
    merged = lse_a.new_empty(lse_a.shape[is_stack:]) if lse is None else lse
    _operators.merge_states(o_a, lse_a, o_b, lse_b, o, merged, base2)
    return o, merged


def append_paged_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indptr: Tensor | None = None,
    kv_lens: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    page_indices: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
    kv_layout: KvLayout = "NHD",
    kv_dtype: KvDType | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> None:
    """`flashplan.append_paged_kv()` as an operator of PyTorch, on torch's current stream.

    The arguments and errors are those of `flashplan.append_paged_kv`, without `stream`.
    """
    is_hnd(kv_layout)
    _operators.append_paged_kv(
        k,
        v,
        k_cache,
        v_cache,
        indptr,
        kv_lens,
        block_table,
        page_indptr,
        page_indices,
        slot_mapping,
        batch_indices,
        positions,
        kv_layout,
        None if kv_dtype is None else dtype_name(kv_dtype),
        *number_and_tensor(k_scale),
        *number_and_tensor(v_scale),
    )


def rope_append_paged_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indptr: Tensor,
    kv_lens: Tensor,
    rope: Rope,
    *,
    block_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    page_indices: Tensor | None = None,
    kv_layout: KvLayout = "NHD",
    kv_dtype: KvDType | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    out_q: Tensor | None = None,
) -> Tensor:
    """`flashplan.rope_append_paged_kv()` as an operator. Keep `rope` alive as long as functions
    that were compiled with it may run."""
    if not isinstance(rope, Rope):
        raise TypeError(f"rope: expected a Rope, got {type(rope).__name__}")
    is_hnd(kv_layout)
    if out_q is None:
        out_q = q.new_empty(q.shape)
    _operators.rope_append_paged_kv(
        q,
        k,
        v,
        k_cache,
        v_cache,
        indptr,
        kv_lens,
        block_table,
        page_indptr,
        page_indices,
        rope._handle,
        out_q,
        kv_layout,
        None if kv_dtype is None else dtype_name(kv_dtype),
        *number_and_tensor(k_scale),
        *number_and_tensor(v_scale),
    )
    return out_q
