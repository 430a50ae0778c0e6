# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's function for attention over a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
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
from flashplan.flash_rotary import rotated
from flashplan.flash_runs import append, heads_first, in_batches, run_equal, run_rows

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """Appends to a cache, which is paged or has a row for each sequence, and attends over it.

    The host does not wait for the GPU: the call is planned for the longest sequences that the cache
    or the block table can hold, and the lengths are read on the device. After one call with the
    same shapes it can be captured into a CUDA graph, whose replays read the lengths, the block
    table and the cache anew. Ragged queries of different lengths are an exception: for these the
    host waits for the lengths, and they can not be captured.

    Args:
        q: [batch_size, tokens, heads, head_dim], or with cu_seqlens_q ragged [tokens, heads,
            head_dim].
        k_cache, v_cache: pages [num_pages, page_size, kv_heads, head_dim], or without a block table
            [cache_batch_size, cache_len, kv_heads, head_dim]. Written if k is given.
        k, v: new keys and values, which are written behind the first cache_seqlens tokens of each
            sequence: [batch_size, new_tokens, kv_heads, head_dim], or ragged with cu_seqlens_k_new.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], only with k, and not ragged: q and k
            are rotated by their positions, from cache_seqlens on, before k is written. Without a
            mask all queries of a sequence are rotated by cache_seqlens, as in FlashAttention.
        rotary_interleaved: whether pairs are dims 2 i and 2 i + 1, or i and i + rotary_dim / 2.
        cache_seqlens: [batch_size], or one for all: tokens in the cache, without those of k;
            default: the cache is full.
        cache_batch_idx: [batch_size]: the row of each sequence in a cache without block table;
            default: sequence i has row i.
        block_table, page_table: [batch_size, max_pages] int32; ids behind a length may be anything,
            as in padded rows of length 0.
        cu_seqlens_q: [batch_size + 1]: the rows of q at which sequences begin and end.
        max_seqlen_q: with cu_seqlens_q, how many queries a sequence has at most.
        out: where o is written; default: a new tensor.
        return_softmax_lse: whether to return (o, lse), lse [batch_size, heads, tokens] float32, of
            ragged queries [heads, tokens].
        q_descale, k_descale, v_descale: float32 scales of 8-bit queries and caches, [kv_heads], or
            these expanded to [batch_size, kv_heads]. Ignored with 16 bits.

    flash_attn_func describes the other arguments, and the errors.

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
