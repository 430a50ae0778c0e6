# SPDX-License-Identifier: Apache-2.0
"""Attention and appending as operators of PyTorch, for torch.compile, torch.export and CUDA graphs.

The functions have the arguments of those in the package except `stream`: they run on torch's
current stream. Call `plan()` outside of the compiled function: once per step, before the compiled
function is called. A compiled function does not depend on the plan, so it serves every batch.

Examples:
    >>> attn = fp.Attention(8, 2, 64, page_size=None, q_dtype="float32", device="cpu")
    >>> plan = attn.plan([0, 1], [30])
    >>> compiled = torch.compile(flashplan.torch.run, fullgraph=True, backend="aot_eager")
    >>> compiled(attn, torch.ones(1, 8, 64), *torch.ones(2, 30, 2, 64)).shape
    torch.Size([1, 8, 64])
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

try:
    import torch
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"flashplan.torch: expected PyTorch (pip install torch), got: {_error}", name=_error.name
    ) from None
from torch import Tensor
from torch.autograd import forward_ad

from flashplan import _core, ops
from flashplan.attention import Attention
from flashplan.handles import attention_of
from flashplan.mla import parts
from flashplan.values import dtype_name, is_hnd
from flashplan.variant import packed_arguments

if TYPE_CHECKING:
    from flashplan.types import KvDType, KvLayout

# The operators write to memory of their caller and return nothing, which compilers can analyse and
# CUDA graphs can capture. An Attention goes through them as a number.
torch.library.define(
    "flashplan::run",
    "(SymInt attention, Tensor q, Tensor k, Tensor? v, Tensor? q_tail, Tensor? k_tail, "
    "Tensor? block_table, Tensor? page_indptr, Tensor? page_indices, Tensor? kv_lens, "
    "Tensor? topk_indices, Tensor? topk_lens, Tensor? mask, Tensor? sinks, Tensor? k_scales, "
    "Tensor? v_scales, Tensor(a!) out, Tensor(b!)? lse, float k_scale, float v_scale, "
    "bool pdl, Tensor[] variant_tensors, float[] variant_scalars) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashplan::append_paged_kv",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? indptr, "
    "Tensor? kv_lens, Tensor? block_table, Tensor? page_indptr, Tensor? page_indices, "
    "Tensor? slot_mapping, Tensor? batch_indices, Tensor? positions, str kv_layout, "
    "str? kv_dtype, float k_scale, Tensor? k_scales, "
    "float v_scale, Tensor? v_scales) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl("flashplan::run", ("CPU", "CUDA"))
def _run(attention: int, *arguments: Any) -> None:
    *tensors, k_scale, v_scale, pdl, variant_tensors, variant_scalars = arguments
    *inputs, k_scales, v_scales, out, lse = tensors
    attn: Attention = attention_of(attention)
    attn._plan.run(
        (
            *inputs,
            k_scale if k_scales is None else k_scales,
            v_scale if v_scales is None else v_scales,
            out,
            lse,
        ),
        None,
        pdl,
        attn._variant and (tuple(variant_tensors), tuple(variant_scalars)),
    )


@torch.library.impl("flashplan::append_paged_kv", ("CPU", "CUDA"))
def _append_paged_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indptr: Tensor | None,
    kv_lens: Tensor | None,
    block_table: Tensor | None,
    page_indptr: Tensor | None,
    page_indices: Tensor | None,
    slot_mapping: Tensor | None,
    batch_indices: Tensor | None,
    positions: Tensor | None,
    kv_layout: KvLayout,
    kv_dtype: KvDType | None,
    k_scale: float,
    k_scales: Tensor | None,
    v_scale: float,
    v_scales: Tensor | None,
) -> None:
    ops.append_paged_kv(
        k,
        v,
        k_cache,
        v_cache,
        indptr,
        kv_lens,
        block_table=block_table,
        page_indptr=page_indptr,
        page_indices=page_indices,
        slot_mapping=slot_mapping,
        batch_indices=batch_indices,
        positions=positions,
        kv_layout=kv_layout,
        kv_dtype=kv_dtype,
        k_scale=k_scale if k_scales is None else k_scales,
        v_scale=v_scale if v_scales is None else v_scales,
    )


def _fake(*_arguments: object) -> None:
    """Does nothing: without data there is nothing to compute, and outputs are arguments."""


def _refuse_gradients(operator: Any, *arguments: object) -> None:
    """The kernel of an operator for the dispatch key Autograd.

    AOTAutograd, torch.func and torch.export call it with the caller's tensors. The kernels below it
    get tensors that require no gradient, so `Attention.run` could not refuse those of the caller.
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
for _name in ("run", "append_paged_kv"):
    _library.register_fake(f"flashplan::{_name}", _fake)
    _operator = getattr(torch.ops.flashplan, _name).default
    _autograd.impl(_operator, partial(_refuse_gradients, _operator), "Autograd")


def _number_and_tensor(scale: float | Tensor) -> tuple[float, Tensor | None]:
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)


@overload
def run(
    attn: Attention,
    q: Tensor | tuple[Tensor, Tensor],
    k: Tensor | tuple[Tensor, Tensor],
    v: Tensor | None = None,
    *,
    k_tail: Tensor | None = None,
    block_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    page_indices: Tensor | None = None,
    kv_lens: Tensor | None = None,
    topk_indices: Tensor | None = None,
    topk_lens: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[False] = False,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    pdl: bool = False,
    **variant_arguments: Tensor | float,
) -> Tensor: ...
@overload
def run(
    attn: Attention,
    q: Tensor | tuple[Tensor, Tensor],
    k: Tensor | tuple[Tensor, Tensor],
    v: Tensor | None = None,
    *,
    k_tail: Tensor | None = None,
    block_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    page_indices: Tensor | None = None,
    kv_lens: Tensor | None = None,
    topk_indices: Tensor | None = None,
    topk_lens: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[True],
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    pdl: bool = False,
    **variant_arguments: Tensor | float,
) -> tuple[Tensor, Tensor]: ...
def run(
    attn: Attention,
    q: Tensor | tuple[Tensor, Tensor],
    k: Tensor | tuple[Tensor, Tensor],
    v: Tensor | None = None,
    *,
    k_tail: Tensor | None = None,
    block_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    page_indices: Tensor | None = None,
    kv_lens: Tensor | None = None,
    topk_indices: Tensor | None = None,
    topk_lens: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    pdl: bool = False,
    **variant_arguments: Tensor | float,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attn.run()` as an operator of PyTorch.

    Args:
        attn: keep it alive as long as functions that were compiled with it may run. An exported
            program refers to it by a number that is valid in this process only.

    The other arguments are those of `Attention.run`, without stream. Raises what that raises.

    Returns:
        o, or (o, lse), of as many rows as q, because shapes must not depend on the plan. Rows
        after those that were planned are not written.
    """
    queries: Tensor
    queries, q_tail = parts("q", q)
    keys, k_tail = parts("k", k, k_tail)
    tensors, scalars = packed_arguments(attn._variant, variant_arguments) or ((), ())
    if out is None:
        dtype = getattr(torch, attn._o_dtype)
        out = queries.new_empty((queries.shape[0], *attn._o_heads_and_dim), dtype=dtype)
    if lse is None and return_lse:
        lse = queries.new_empty((queries.shape[0], attn._o_heads_and_dim[0]), dtype=torch.float32)
    (k_number, k_scales), (v_number, v_scales) = map(_number_and_tensor, (k_scale, v_scale))
    torch.ops.flashplan.run(
        attn._handle,
        queries,
        keys,
        v,
        q_tail,
        k_tail,
        block_table,
        page_indptr,
        page_indices,
        kv_lens,
        topk_indices,
        topk_lens,
        mask,
        sinks,
        k_scales,
        v_scales,
        out,
        lse,
        k_number,
        v_number,
        pdl,
        tensors,
        scalars,
    )
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


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

    The other arguments are those of `flashplan.append_paged_kv`. Raises what that raises.
    """
    is_hnd(kv_layout)
    torch.ops.flashplan.append_paged_kv(
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
        *_number_and_tensor(k_scale),
        *_number_and_tensor(v_scale),
    )
