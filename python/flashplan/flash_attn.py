# SPDX-License-Identifier: Apache-2.0
"""The functions of FlashAttention for inference: code that imports `flash_attn` can import this.

    from flashplan.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

The functions take the arguments of FlashAttention 2, in its order, and by keyword those of
FlashAttention 3 and of the forks in vLLM and SGLang. They plan by themselves: layers of one step
share a plan. What flashplan can not do raises UnsupportedError, which names the argument. Arguments
that only tune FlashAttention are ignored: `deterministic` (results always are), `num_splits`,
`pack_gqa`, `sm_margin`, `scheduler_metadata`, `fa_version`, `ver`. Keywords that only newer forks
have, such as `score_mod` and `rel_bias`, may be None.

Each thread keeps objects of `Attention` for the kinds of calls that it has made, and a workspace
for each GPU. Calls of a thread on several streams wait for each other; replays of CUDA graphs do
not, so replay graphs and call these functions in the order of one stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from torch import Tensor
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"flashplan.flash_attn: expected PyTorch (pip install torch), got: {_error}",
        name=_error.name,
    ) from None

from flashplan.flash_arguments import (
    attention_options,
    check_dims,
    one_of,
    refuse,
    refuse_others,
    scale,
    sinks_of,
)
from flashplan.flash_kvcache import flash_attn_with_kvcache
from flashplan.flash_masks import mask_options
from flashplan.flash_packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    install,
)
from flashplan.flash_runs import heads_first, in_batches, run_equal, run_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

# Programs that look for FlashAttention 2 compare its version, so here is one that they accept.
__version__ = "2.8.3"
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "register",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int | None = 0,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    out: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """Attention of sequences of equal lengths.

    Args:
        q, k, v: [batch_size, tokens, heads, head_dim]; k and v may have other numbers of tokens and
            heads than q.
        causal: the last query sees all keys, those before it fewer (bottom-right aligned).
        window_size: (left, right): how many keys before and after its position a query sees, -1
            for all.
        alibi_slopes: [heads] or [batch_size, heads] float32: slope * the distance of query and key
            is subtracted from logits. Slopes, and a window to the right, are compiled at their
            first use, as a `flashplan.Variant`. Slopes allow no softcap.
        return_softmax_lse, return_lse: whether to return (o, lse), lse [batch_size, heads, tokens]
            float32.
        s_aux, sinks, learnable_sink: [heads]; see `flashplan.Attention.run`.
        out: where o is written; default: a new tensor, bfloat16 for queries of 8 bits.
        q_descale, k_descale, v_descale: scales of 8-bit queries, keys and values; see
            flash_attn_with_kvcache.

    The other arguments must have their defaults, or are ignored.

    Returns:
        o [batch_size, tokens, heads, head_dim], or (o, lse). A row that sees no key has o = 0 and
        lse = -inf.

    Raises:
        UnsupportedError: an argument asks for what flashplan can not do.
        ValueError, TypeError: tensors do not fit each other, or require grad.
        RuntimeError: a CUDA graph is being captured, and there was no earlier call of this kind.

    Examples:
        >>> q, k = torch.ones(2, 3, 8, 64), torch.ones(2, 30, 2, 64)
        >>> flash_attn_func(q, k, k, causal=True).shape
        torch.Size([2, 3, 8, 64])
    """
    refuse(
        dropout_p=dropout_p,
        return_attn_probs=return_attn_probs,
        qv=qv,
        attention_chunk=attention_chunk,
    )
    refuse_others("flash_attn_func", others)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dims(name, tensor, 4)
    options, arguments = mask_options(
        causal, window_size, alibi_slopes, q.shape[0], q.shape[2], True
    )
    results = run_equal(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        (q.shape[0], q.shape[1], k.shape[1]),
        attention_options(q, k, v, None, softmax_scale, softcap, out) | options,
        sinks=sinks_of(s_aux, sinks, learnable_sink),
        q_scale=scale("q_descale", q_descale, q),
        k_scale=scale("k_descale", k_descale, k),
        v_scale=scale("v_descale", v_descale, v),
        out=None if out is None else out.view(-1, *out.shape[2:]),
        return_lse=return_softmax_lse or return_lse,
        **arguments,
    )
    return in_batches(results, q.shape[0], q.shape[1])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    q_v: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int | None = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    scheduler_metadata: Tensor | None = None,
    fa_version: int | None = None,
    ver: int | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """Attention of sequences of any lengths, over ragged keys or a paged cache.

    Lengths on a GPU are copied to the host, which waits for them, once for all layers that pass the
    same tensors. The values are remembered until PyTorch has written to a tensor. Writes that
    PyTorch does not count are not noticed: those of other kernels, and any to a tensor that was
    made in torch.inference_mode(). Make a new tensor of lengths for such a step.

    The host does not wait, and the call can be captured into a CUDA graph, if a paged cache is read
    by max_seqlen_q queries of each sequence, as in a step of decodes: then the lengths of keys are
    read on the device, and max_seqlen_k is an upper bound of them, also for replays.

    Args:
        q: [tokens, heads, head_dim].
        k, v: ragged [kv_tokens, kv_heads, head_dim], or with block_table pages [num_pages,
            page_size, kv_heads, head_dim].
        cu_seqlens_q: [batch_size + 1]: the rows of q at which sequences begin and end.
        cu_seqlens_k: [batch_size + 1]: the rows of k at which sequences begin and end; with
            block_table only their differences count, which are the lengths of keys.
        seqused_k: [batch_size]: lengths of keys, instead of those of cu_seqlens_k.
        max_seqlen_q, max_seqlen_k: the largest lengths.
        block_table, page_table: [batch_size, max_pages] int32; ids behind a length may be anything.
        out: where o is written; default: a new tensor.
        return_softmax_lse: whether to return (o, lse), lse [heads, tokens] float32.

    flash_attn_func describes the other arguments, and the errors.

    Returns:
        o [tokens, heads, head_dim], or (o, lse).

    Examples:
        >>> q, k = torch.ones(4, 8, 64), torch.ones(34, 2, 64)
        >>> ends_q, ends_k = torch.tensor([0, 1, 4]), torch.tensor([0, 30, 34])
        >>> flash_attn_varlen_func(q, k, k, ends_q, ends_k, 3, 30, causal=True).shape
        torch.Size([4, 8, 64])
    """
    refuse(
        dropout_p=dropout_p,
        return_attn_probs=return_attn_probs,
        seqused_q=seqused_q,
        q_v=q_v,
        qv=qv,
        attention_chunk=attention_chunk,
        cp_world_size=cp_world_size - 1,
        cp_tot_seqused_k=cp_tot_seqused_k,
    )
    refuse_others("flash_attn_varlen_func", others)
    table = one_of("block_table", block_table, "page_table", page_table)
    check_dims("q", q, 3)
    for name, tensor in (("k", k), ("v", v)):
        check_dims(name, tensor, 3 if table is None else 4)
    check_dims("cu_seqlens_q", cu_seqlens_q, 1)
    if cu_seqlens_k is None and seqused_k is None:
        raise ValueError("cu_seqlens_k: expected it or seqused_k, got neither")
    if table is None and cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k: expected it with ragged k and v, got None")
    page_size = None if table is None else k.shape[1]
    shape = (cu_seqlens_q.shape[0] - 1, q.shape[1])
    options, arguments = mask_options(causal, window_size, alibi_slopes, *shape, table is None)
    results = run_rows(
        q,
        k,
        v,
        {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k},
        (max_seqlen_q, max_seqlen_k),
        attention_options(q, k, v, page_size, softmax_scale, softcap, out) | options,
        table,
        sinks=sinks_of(s_aux, sinks, learnable_sink),
        q_scale=scale("q_descale", q_descale, q),
        k_scale=scale("k_descale", k_descale, k),
        v_scale=scale("v_descale", v_descale, v),
        out=out,
        return_lse=return_softmax_lse or return_lse,
        **arguments,
    )
    return heads_first(results)


def register() -> str:
    """Makes flashplan known to PyTorch's scaled_dot_product_attention as an implementation of flash
    attention on GPUs, for inference.

        torch.nn.attention.activate_flash_attention_impl(flashplan.flash_attn.register())

    Then calls that PyTorch would give to its flash attention are flashplan's, until
    torch.nn.attention.restore_flash_attention_impl(). Tensors that require grad raise
    UnsupportedError.

    Returns:
        The name, "flashplan".

    Raises:
        UnsupportedError: this version of PyTorch has no registry of implementations.
    """
    from flashplan import flash_sdpa

    return flash_sdpa.register()
