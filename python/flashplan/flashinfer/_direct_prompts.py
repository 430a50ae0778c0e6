# SPDX-License-Identifier: Apache-2.0
"""Functions that attend to prompts without plan(). The layers of a step share a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashplan.flash_arguments import int32
from flashplan.flash_runs import run_rows
from flashplan.flashinfer._arguments import Cache, refuse
from flashplan.flashinfer._direct import direct_options, narrowed, output_dtype, run_tensors, unpack


def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: Cache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> Any:
    """Attention of prompts over a paged cache. Rows cum_seq_lens_q[r] to cum_seq_lens_q[r + 1] - 1
    of query are the last tokens of request r, which has seq_lens[r] keys. cum_seq_lens_kv is not
    needed.

    The other arguments, results and errors are those of `trtllm_batch_decode_with_kv_cache`.
    """
    refuse(
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        kv_cache_sf=kv_cache_sf,
        uses_shared_paged_kv_idx=None if uses_shared_paged_kv_idx else "False",
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
    )
    k, v, page_size = unpack(kv_cache, kv_layout)
    o_dtype = output_dtype(query, out, out_dtype)
    has_lse = return_lse or lse is not None
    results = run_rows(
        query,
        k,
        v,
        {"cu_seqlens_q": cum_seq_lens_q, "cu_seqlens_k": None, "seqused_k": seq_lens},
        (max_q_len, max_kv_len),
        direct_options(query, k, v, page_size, kv_layout, causal, window_left, o_dtype),
        int32(block_tables),
        return_lse=has_lse,
        **run_tensors(bmm1_scale, bmm2_scale, sinks, out, lse),
    )
    results = narrowed(results, out, o_dtype)
    return results[0] if has_lse and not return_lse else results


def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sage_attn_sfs: tuple[Tensor | None, ...] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, ...] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: Tensor | None = None,
    kv_seq_lens_cpu: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> Any:
    """Attention of prompts over ragged keys and values [kv_tokens, heads, dim]. Requests begin and
    end at cum_seq_lens_kv. The host waits for the lengths.

    The other arguments, results and errors are those of `trtllm_batch_context_with_kv_cache`.
    """
    refuse(
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
        **{f"sage_attn_sfs[{i}]": scales for i, scales in enumerate(sage_attn_sfs)},
    )
    o_dtype = output_dtype(query, out, None)
    has_lse = return_lse or lse is not None
    results = run_rows(
        query,
        key,
        value,
        {"cu_seqlens_q": cum_seq_lens_q, "cu_seqlens_k": cum_seq_lens_kv, "seqused_k": None},
        (max_q_len, max_kv_len),
        direct_options(query, key, value, None, "NHD", is_causal, window_left, o_dtype),
        None,
        return_lse=has_lse,
        **run_tensors(bmm1_scale, bmm2_scale, attention_sinks, out, lse),
    )
    results = narrowed(results, out, o_dtype)
    return results[0] if has_lse and not return_lse else results
