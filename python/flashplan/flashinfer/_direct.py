# SPDX-License-Identifier: Apache-2.0
"""Functions that attend without plan(). The layers of a step share a plan, as in
`flashplan.flash_attn`.

If all requests have equally many queries over pages, the plan is for the longest requests that the
arguments allow: lengths stay on the GPU, and a call can be captured into a CUDA graph after an
equal call. Otherwise the host waits for the lengths. Workspaces of the caller are not used, nor are
arguments that tune FlashInfer's kernels: backend, enable_pdl, counter buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashplan as fp
from flashplan._core import UnsupportedError
from flashplan.flash_arguments import int32
from flashplan.flash_plans import power_of_two
from flashplan.flash_runs import on_host, run_equal, run_rows
from flashplan.flashinfer._arguments import (
    Cache,
    is_8_bit,
    name_of,
    one_of,
    refuse,
    to_torch_dtype,
    unpack_cache,
)


def direct_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_size: int | None,
    kv_layout: str,
    causal: bool,
    window_left: int,
    o_dtype: torch.dtype,
) -> dict[str, Any]:
    """The options of `Attention`. softmax_scale is 1, because run() gets the whole factor of logits
    as k_scale. Outputs of 8 bits are computed in float32, and converted by `narrowed`."""
    return {
        "num_qo_heads": q.shape[1],
        "num_kv_heads": k.shape[-2 if kv_layout == "NHD" else -3],
        "head_dim": (q.shape[2], v.shape[-1]),
        "page_size": page_size,
        "q_dtype": q.dtype,
        "kv_dtype": k.dtype,
        "o_dtype": torch.float32 if is_8_bit(o_dtype) else o_dtype,
        "kv_layout": kv_layout,
        "causal": causal,
        "window_left": window_left,
        "softmax_scale": 1.0,
        "lse_base2": True,
    }


def output_dtype(q: Tensor, out: Any, out_dtype: Any) -> torch.dtype:
    if out is not None and not isinstance(out, Tensor):
        raise UnsupportedError(f"out: expected a torch.Tensor, got {type(out).__name__}")
    if out is not None:
        return out.dtype
    return q.dtype if out_dtype is None else to_torch_dtype("out_dtype", out_dtype)


def unpack(kv_cache: Cache, kv_layout: str) -> tuple[Tensor, Tensor, int]:
    """(k, v, page_size). A tensor [pages, 1, ...] holds keys that are values too."""
    one_of("kv_layout", kv_layout, ("NHD", "HND"))
    if isinstance(kv_cache, Tensor) and kv_cache.dim() == 5 and kv_cache.shape[1] == 1:
        k = v = kv_cache[:, 0]
    else:
        k, v = unpack_cache(kv_cache, kv_layout)
    return k, v, k.shape[1 if kv_layout == "NHD" else 2]


def _scale(scale: float | Tensor) -> float | Tensor:
    return scale.reshape(1).float() if isinstance(scale, Tensor) else float(scale)


def run_tensors(bmm1_scale: Any, bmm2_scale: Any, sinks: Any, out: Any, lse: Any) -> dict[str, Any]:
    """Arguments of `Attention.run`. An `out` of 8 bits is written by `narrowed`."""
    if isinstance(sinks, list):
        (sinks,) = sinks
    if out is not None and is_8_bit(out.dtype):
        out = None
    return {
        "k_scale": _scale(bmm1_scale),
        "v_scale": _scale(bmm2_scale),
        "sinks": None if sinks is None else sinks.flatten().float(),
        "out": out,
        "lse": lse,
    }


def narrowed(results: Any, out: Tensor | None, o_dtype: torch.dtype) -> Any:
    """The results of run(), o or (o, lse). If o_dtype has 8 bits, o is converted without a scale;
    numbers that are too large become the largest one of the dtype."""
    if not is_8_bit(o_dtype):
        return results
    o, *lse = results if isinstance(results, tuple) else (results,)
    o, _ = fp.quantize_fp8(o, 1.0, dtype=name_of(o_dtype), out=out)
    return (o, *lse) if lse else o


def _decode(
    query: Tensor,
    kv_cache: Cache,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window_left: int,
    kv_layout: str,
    q_len_per_req: int,
    o_dtype: torch.dtype,
    return_lse: bool,
    indptr: Tensor | None = None,
    causal: bool = True,
    **tensors: Any,
) -> Any:
    """Attention of queries that are the last tokens of their requests. Each request has
    q_len_per_req queries, or with indptr at most as many."""
    k, v, page_size = unpack(kv_cache, kv_layout)
    causal = causal and q_len_per_req > 1
    options = direct_options(query, k, v, page_size, kv_layout, causal, window_left, o_dtype)
    batch_size = block_tables.shape[0]
    table = int32(block_tables)
    if indptr is not None:
        ends = {"cu_seqlens_q": indptr, "cu_seqlens_k": None, "seqused_k": seq_lens}
        longest = q_len_per_req, max_seq_len
        return run_rows(
            query, k, v, ends, longest, options, table, return_lse=return_lse, **tensors
        )
    if query.shape[0] != batch_size * q_len_per_req:
        raise ValueError(
            f"query: expected {batch_size * q_len_per_req} rows, q_len_per_req = {q_len_per_req} "
            f"for each row of block_tables, got {query.shape[0]}"
        )
    most = min(block_tables.shape[1] * page_size, power_of_two(int(max_seq_len)))
    lengths = batch_size, q_len_per_req, most
    return run_equal(
        query,
        k,
        v,
        lengths,
        options,
        block_table=table,
        kv_lens=int32(seq_lens),
        return_lse=return_lse,
        **tensors,
    )


def _is_causal(mask: Tensor, qo_lens: list[int]) -> bool:
    """Whether a mask lets each query see the drafts up to itself (True) or all drafts of its
    request (False).

    The mask is read on the host, once for as long as nothing is written to it.

    Args:
        mask: [..., words] uint16: for each query the bits of the drafts of its request.

    Raises:
        UnsupportedError: the mask is neither of these.
    """
    (words,) = on_host(mask)
    per_row = mask.shape[-1]
    parts = zip(*(words[i::per_row] for i in range(per_row)))
    rows = [sum(word << 16 * i for i, word in enumerate(part)) for part in parts]
    causal = [(2 << i) - 1 for qo_len in qo_lens for i in range(qo_len)]
    if rows == causal:
        return True
    if rows == [(1 << qo_len) - 1 for qo_len in qo_lens for _ in range(qo_len)]:
        return False
    raise UnsupportedError(
        "mask: expected drafts that see those before them, or all of their request, got others; "
        "use custom_mask of BatchPrefillWithPagedKVCacheWrapper"
    )


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Cache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: str | None = None,
) -> Any:
    """Decodes over a paged cache. The queries of a request are its last tokens, which see no key
    after themselves.

    Args:
        query: [batch_size * q_len_per_req, num_qo_heads, head_dim], or with cum_seq_lens_q and
            max_q_len any numbers of rows for each request.
        kv_cache: (k, v), or one tensor [pages, 2, ...], or [pages, 1, ...] of keys that are values.
        block_tables, seq_lens: [batch_size, most pages] and [batch_size]. Ids behind a length may
            be anything.
        max_seq_len: an upper bound of seq_lens.
        bmm1_scale, bmm2_scale: the whole factors of logits and of outputs, numbers or float32
            tensors of one element.
        out, out_dtype: o may have 8 bits, and is not scaled; default: the dtype of query.
        mask: not read, and taken to be causal.
        skip_softmax_threshold_scale_factor: no effect: FlashInfer may leave out keys that weigh
            less than this allows, and here all keys are computed.
        lse: [tokens, num_qo_heads] float32, written if it is given.

    Returns:
        o, shaped like query, or with return_lse (o, lse), lse to base 2.

    Raises:
        UnsupportedError: an argument asks for what flashplan can not do.
        ValueError, TypeError: tensors do not fit each other.
    """
    refuse(
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        kv_cache_sf=kv_cache_sf,
        enable_block_sparse_attention=enable_block_sparse_attention,
        uses_shared_paged_kv_idx=None if uses_shared_paged_kv_idx else "False",
    )
    if bmm1_scale_log2 is not None:
        bmm1_scale = bmm1_scale_log2 * 0.6931471805599453
    longest = q_len_per_req if cum_seq_lens_q is None else max_q_len
    has_lse = return_lse or lse is not None
    o_dtype = output_dtype(query, out, out_dtype)
    results = _decode(
        query,
        kv_cache,
        block_tables,
        seq_lens,
        max_seq_len,
        window_left,
        kv_layout,
        longest or 1,
        o_dtype,
        has_lse,
        cum_seq_lens_q,
        **run_tensors(bmm1_scale, bmm2_scale, sinks, out, lse),
    )
    results = narrowed(results, out, o_dtype)
    return results[0] if has_lse and not return_lse else results


def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Cache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Tensor | None = None,
) -> Tensor:
    """Does what `trtllm_batch_decode_with_kv_cache` does, with other defaults.

    Args:
        mask: uint16 [batch_size, q_len_per_req, words], or with q_cu_seq_lens [tokens, words]: for
            each query the bits of the drafts that it sees: either those up to itself or all of its
            request. The host waits for the mask, when it is new.

    Returns:
        o, shaped like query; or, if q_len_per_req > 1 and neither `out` nor q_cu_seq_lens is given,
        [batch_size, q_len_per_req, num_qo_heads, head_dim].
    """
    refuse(kv_cache_sf=kv_cache_sf)
    qo_len = q_len_per_req or 1
    causal = True
    if mask is not None and qo_len > 1:
        qo_lens = [qo_len] * block_tables.shape[0]
        if q_cu_seq_lens is not None:
            (ends,) = on_host(q_cu_seq_lens)
            qo_lens = [end - begin for begin, end in zip(ends, ends[1:])]
        causal = _is_causal(mask, qo_lens)
    o_dtype = output_dtype(query, out, None)
    results = _decode(
        query,
        kv_cache,
        block_tables,
        seq_lens,
        max_seq_len,
        window_left,
        kv_layout,
        qo_len,
        o_dtype,
        False,
        q_cu_seq_lens,
        causal,
        **run_tensors(bmm1_scale, bmm2_scale, sinks, out, None),
    )
    o: Tensor = narrowed(results, out, o_dtype)
    if out is None and qo_len > 1 and q_cu_seq_lens is None:
        return o.view(-1, qo_len, *o.shape[1:])
    return o
