# SPDX-License-Identifier: Apache-2.0
"""The package's functions as operators of PyTorch, for torch.compile, torch.export, CUDA graphs.

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

from typing import TYPE_CHECKING, Literal, overload

try:
    import torch
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"flashplan.torch: expected PyTorch (pip install torch), got: {_error}", name=_error.name
    ) from None
from torch import Tensor

from flashplan.mla import parts
from flashplan.torch_functions import (
    add_rmsnorm,
    append_paged_kv,
    apply_penalties,
    filtered_probs,
    gelu_and_mul,
    gelu_tanh_and_mul,
    layernorm,
    merge_states,
    number_and_tensor,
    rmsnorm,
    rope_append_paged_kv,
    sample,
    silu_and_mul,
    softmax,
    top_k_mask,
    top_k_renorm,
    top_p_renorm,
)
from flashplan.torch_heads import apply_rope, quantize_fp8
from flashplan.variant import packed_arguments

if TYPE_CHECKING:
    from flashplan.attention import Attention

__all__ = [
    "add_rmsnorm",
    "append_paged_kv",
    "apply_penalties",
    "apply_rope",
    "filtered_probs",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "layernorm",
    "merge_states",
    "quantize_fp8",
    "rmsnorm",
    "rope_append_paged_kv",
    "run",
    "sample",
    "silu_and_mul",
    "softmax",
    "top_k_mask",
    "top_k_renorm",
    "top_p_renorm",
]


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
    q_scale: float | Tensor = 1.0,
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
    q_scale: float | Tensor = 1.0,
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
    q_scale: float | Tensor = 1.0,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    pdl: bool = False,
    **variant_arguments: Tensor | float,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attn.run()` as an operator of PyTorch.

    Args:
        attn: keep it alive as long as functions that were compiled with it may run. An exported
            program refers to it by a number that is valid in this process only.

    The other arguments are those of `Attention.run` except `stream`. It raises the same errors.

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
    scales = map(number_and_tensor, (q_scale, k_scale, v_scale))
    (q_number, q_scales), (k_number, k_scales), (v_number, v_scales) = scales
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
        q_scales,
        k_scales,
        v_scales,
        out,
        lse,
        q_number,
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
