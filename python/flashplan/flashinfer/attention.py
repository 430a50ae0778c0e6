# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts and decodes in one batch, and attention with sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashplan.flashinfer._arguments import Cache, refuse
from flashplan.flashinfer._prefill import BatchPrefillWithPagedKVCacheWrapper


class BatchAttention:
    """A `BatchPrefillWithPagedKVCacheWrapper` that allocates its workspace, and whose plan() gets
    the number of all keys of each request."""

    def __init__(self, kv_layout: str = "NHD", device: torch.device | str = "cuda") -> None:
        workspace = torch.empty(16, dtype=torch.uint8, device=device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout)
        self._wrapper._counts_all_keys = True

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = torch.bfloat16,
        kv_data_type: torch.dtype | str = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plans a step.

        Args:
            kv_len_arr: [batch_size]: keys of each request, no more than its pages have.

        The other arguments, and the errors, are those of `BatchPrefillWithPagedKVCacheWrapper`.
        """
        refuse(use_profiler=use_profiler)
        self._wrapper.plan(
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_len_arr,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            head_dim_vo,
            causal=causal,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    def run(
        self,
        q: Tensor,
        kv_cache: Cache,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the planned step. Returns (o, lse), lse to base 2.

        Args:
            logits_soft_cap: instead of that of plan(), if it is not 0.
        """
        refuse(profiler_buffer=profiler_buffer)
        planned_cap = self._wrapper._logits_soft_cap
        if logits_soft_cap:
            self._wrapper._logits_soft_cap = logits_soft_cap
        try:
            result: tuple[Tensor, Tensor] = self._wrapper.run(
                q,
                kv_cache,
                out=out,
                lse=lse,
                k_scale=k_scale,
                v_scale=v_scale,
                return_lse=True,
                kv_cache_sf=kv_cache_sf,
            )
        finally:
            self._wrapper._logits_soft_cap = planned_cap
        return result


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` with the variant AttentionSink: run(q, cache, sinks,
    sm_scale). Head dims, dtypes and window are those of plan()."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype | str = torch.bfloat16,
        kv_data_type: torch.dtype | str = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )
        self._takes_sinks = True
