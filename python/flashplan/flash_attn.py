# SPDX-License-Identifier: Apache-2.0
"""The functions of FlashAttention for inference: code that imports `flash_attn` can import this.

    from flashplan.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

The functions take the arguments of FlashAttention 2, in its order, and by keyword those of
FlashAttention 3 and of the forks in vLLM and SGLang. They plan by themselves: layers of one step
share a plan. What flashplan can not do raises UnsupportedError, which names the argument. What only
tunes another library is ignored: `deterministic` (results always are), `num_splits`, `pack_gqa`,
`sm_margin`, `scheduler_metadata`, `fa_version`, `ver`. Keywords that only newer forks have, such as
`score_mod` and `rel_bias`, may be None.

Each thread keeps objects of `Attention` for the kinds of calls that it has made, and a workspace
for each GPU. Calls of a thread on several streams wait for each other; replays of CUDA graphs do
not, so replay graphs and call these functions in the order of one stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"flashplan.flash_attn: expected PyTorch (pip install torch), got: {_error}",
        name=_error.name,
    ) from None
from torch import Tensor

from flashplan.flash_arguments import (
    attention_options,
    check_dims,
    int32,
    one_of,
    refuse,
    refuse_others,
    scale,
    sinks_of,
)
from flashplan.flash_masks import mask_options
from flashplan.flash_packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    install,
)
from flashplan.flash_rotary import rotated
from flashplan.flash_runs import append, heads_first, in_batches, run_equal, run_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

# What programs compare that look for FlashAttention 2.
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
        window_size: (left, right): keys before and after a query that it sees, -1 for all.
        alibi_slopes: [heads] or [batch_size, heads] float32: slope * the distance of query and key
            is subtracted from logits. It and a window to the right are compiled at their first
            use, as a `flashplan.Variant`. It allows no softcap.
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
        RuntimeError: while a CUDA graph is captured, if there was no earlier call.

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
        cu_seqlens_k: the same of k; with block_table only the differences count, which are
            the lengths.
        seqused_k: [batch_size]: lengths of keys, instead of those of cu_seqlens_k.
        max_seqlen_q, max_seqlen_k: the largest lengths.
        block_table, page_table: [batch_size, max_pages] int32; ids behind a length may be anything.
        out: where o is written; default: a new tensor.
        return_softmax_lse: whether to return (o, lse), lse [heads, tokens] float32.

    The other arguments are those of flash_attn_func, and so are the errors.

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


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int | None = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    scheduler_metadata: Tensor | None = None,
    fa_version: int | None = None,
    ver: int | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """Attention over a cache, paged or with a place for each sequence, after appending to it.

    The host does not wait for the GPU: the call is planned for the longest sequences that the cache
    or the block table can hold, and the lengths are read on the device. After one call with the
    same shapes it can be captured into a CUDA graph, whose replays read the lengths, the block
    table and the cache anew. Only ragged queries of different lengths are an exception: they are
    those of flash_attn_varlen_func.

    Args:
        q: [batch_size, tokens, heads, head_dim], or with cu_seqlens_q ragged [tokens, heads,
            head_dim].
        k_cache, v_cache: pages [num_pages, page_size, kv_heads, head_dim], or without a block table
            [cache_batch_size, cache_len, kv_heads, head_dim]. Written if k is given.
        k, v: [batch_size, new_tokens, kv_heads, head_dim], or with cu_seqlens_k_new ragged, which
            are written to the cache behind the first cache_seqlens tokens of each sequence.
        rotary_cos, rotary_sin: [places, rotary_dim / 2], with k, not with ragged tensors: q and k
            are rotated by their places, from cache_seqlens on, before k is written. Without a mask
            all queries of a sequence are rotated by cache_seqlens, as in FlashAttention.
        rotary_interleaved: whether dims 2 i and 2 i + 1 turn together, or i and i + rotary_dim / 2.
        cache_seqlens: [batch_size], or one for all: tokens in the cache, without those of k;
            default: the cache is full.
        cache_batch_idx: [batch_size]: the place of each sequence in a cache without block table;
            default: in order.
        block_table, page_table: [batch_size, max_pages] int32; ids behind a length may be anything,
            as in padded rows of length 0.
        cu_seqlens_q: [batch_size + 1]: the rows of q at which sequences begin and end.
        max_seqlen_q: with cu_seqlens_q, the most queries of a sequence.
        out: where o is written; default: a new tensor.
        return_softmax_lse: whether to return (o, lse), lse [batch_size, heads, tokens] float32, of
            ragged queries [heads, tokens].
        q_descale, k_descale, v_descale: float32 scales of 8-bit queries and caches, [kv_heads] or
            [batch_size, kv_heads], which are the same for all sequences. Ignored with 16 bits.

    The other arguments are those of flash_attn_func, and so are the errors.

    Returns:
        o, shaped like q, or (o, lse).

    Examples:
        >>> q, cache = torch.ones(2, 1, 8, 64), torch.ones(2, 40, 2, 64)
        >>> lengths = torch.tensor([30, 4], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True).shape
        torch.Size([2, 1, 8, 64])
    """
    refuse(
        rotary_seqlens=rotary_seqlens,
        cache_leftpad=cache_leftpad,
        qv=qv,
        attention_chunk=attention_chunk,
    )
    refuse_others("flash_attn_with_kvcache", others)
    is_ragged = cu_seqlens_q is not None
    check_dims("q", q, 3 if is_ragged else 4)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dims(name, tensor, 4)
    batch_size = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    page_size = k_cache.shape[1]
    table = one_of("block_table", block_table, "page_table", page_table)
    if table is None:  # one page for each sequence
        places = cache_batch_idx
        if places is None:
            places = torch.arange(batch_size, device=q.device)
        table = int32(places)[:, None]
    elif cache_batch_idx is not None:
        raise ValueError("cache_batch_idx: expected None with a block table, got a tensor")
    if (k is None) != (v is None):
        raise ValueError("v: expected both k and v, or neither, got one of them")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: expected the lengths before k is appended, got None")
    if not isinstance(cache_seqlens, Tensor):
        most = table.shape[1] * page_size
        kv_len = most if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((batch_size,), kv_len, dtype=torch.int32, device=q.device)
    kv_lens = int32(cache_seqlens)
    masks, arguments = mask_options(
        causal, window_size, alibi_slopes, batch_size, q.shape[-2], False
    )
    options = attention_options(q, k_cache, v_cache, page_size, softmax_scale, softcap, out) | masks
    k_scale = scale("k_descale", k_descale, k_cache)
    v_scale = scale("v_descale", v_descale, v_cache)
    tensors = {
        "sinks": sinks_of(s_aux, sinks, learnable_sink),
        "q_scale": scale("q_descale", q_descale, q),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "return_lse": return_softmax_lse or return_lse,
        **arguments,
    }
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None:
            raise ValueError("rotary_cos: expected it with rotary_sin, got one of them")
        if k is None:
            raise ValueError("rotary_cos: expected None without k, got a tensor")
        if is_ragged or cu_seqlens_k_new is not None:
            refuse(rotary_cos=rotary_cos)
        is_masked = options["causal"] or (window_size is not None and max(window_size) >= 0)
        q, k = rotated(q, k, rotary_cos, rotary_sin, kv_lens, rotary_interleaved, is_masked)
    if k is not None and v is not None:
        caches, scales = (k_cache, v_cache), (k_scale, v_scale)
        kv_lens = append((k, v), caches, cu_seqlens_k_new, kv_lens, table, scales)
    if is_ragged:
        ends = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": None, "seqused_k": kv_lens}
        longest = (max_seqlen_q, None)
        results = run_rows(q, k_cache, v_cache, ends, longest, options, table, out=out, **tensors)
        return heads_first(results)
    results = run_equal(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        (batch_size, q.shape[1], table.shape[1] * page_size),
        options,
        block_table=table,
        kv_lens=kv_lens,
        out=None if out is None else out.view(-1, *out.shape[2:]),
        **tensors,
    )
    return in_batches(results, batch_size, q.shape[1])


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
