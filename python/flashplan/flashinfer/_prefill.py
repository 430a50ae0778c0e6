# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged cache, for any number of queries of each request."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashplan.flashinfer._arguments import Cache, check_buffer, refuse
from flashplan.flashinfer._masks import items_of
from flashplan.flashinfer._paged import PagedWrapper
from flashplan.flashinfer._plans import Batch


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """FlashInfer's wrapper for prompts and other queries over pages, over `flashplan.Attention`.

    Args:
        float_workspace_buffer: memory on the device of the tensors, used if it is large enough.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: whether runs are captured. Then the batch size is that of the buffers, no
            batch has more rows than the first one, and plan() copies its tensors into the buffers.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf: int32
            [batch_size + 1], [batch_size + 1], [most pages] and [batch_size], for CUDA graphs.
        custom_mask_buf: for CUDA graphs: its size bounds the keys of a request with a mask.
        mask_indptr_buf: not needed.
        backend: "auto", "fa2" or "fa3", without effect.
        jit_args: None, or those of the variant AttentionSink.

    Raises:
        UnsupportedError: an argument asks for what flashplan can not do.
        ValueError: a buffer is missing or has a wrong size.
    """

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
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._set_buffers(paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self._qo_indptr_buf = qo_indptr_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        if use_cuda_graph:
            check_buffer("qo_indptr_buf", qo_indptr_buf, self._fixed_batch_size + 1)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plans a step, on the current stream of PyTorch.

        Lengths on a GPU are copied to the host, which waits for them. seq_lens, seq_lens_q,
        block_tables and the maxima are not needed.

        Args:
            qo_indptr: [batch_size + 1]: the rows of q at which requests begin.
            paged_kv_indptr, paged_kv_indices: [batch_size + 1] and [pages]: the page table as CSR.
            paged_kv_last_page_len: [batch_size]: keys in the last page of each request.
            head_dim_vo: default: head_dim_qk.
            custom_mask: bool, flat: for each request [qo_len, kv_len], whether a query sees a key.
                It takes the place of causal; window_left hides further keys. Or
            packed_custom_mask: uint8: the elements of custom_mask as bits, the lowest of a byte
                first. Each request begins at a byte of its own.
            causal: whether queries see no keys after themselves (bottom-right aligned).
            prefix_len_ptr: [batch_size]: tokens of the prefix, if prompts are a prefix and items
                that are scored without seeing each other. It takes the place of a mask.
            token_pos_in_items_ptr: with prefix_len_ptr, flat: how many tokens of its item each
                token after the prefix sees, itself included; 0 for tokens between items.
            token_pos_in_items_len: how many of these numbers each request has.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI". For ALIBI query i has the position
                kv_len - qo_len + i, on which the log-sum-exp depends.
            fixed_split_size, disable_split_kv: a positive size or True makes the bits of a
                request's results independent of its batch (batch_invariant).

        Raises:
            UnsupportedError: an argument asks for what flashplan can not do.
            ValueError: the batch does not fit the buffers or an earlier plan of CUDA graphs.
        """
        items = items_of(
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        )
        batch_size = len(paged_kv_last_page_len)
        self._check_fits_buffers(batch_size, paged_kv_indices)
        (rows,), kv_lens = self._lengths(
            [qo_indptr], paged_kv_indptr, paged_kv_last_page_len, page_size
        )
        batch = Batch(rows, kv_lens, None)
        self._set_shape(
            (num_qo_heads, num_kv_heads),
            head_dim_qk,
            head_dim_vo,
            page_size,
            q_data_type,
            kv_data_type,
            o_data_type,
            has_mask=not (custom_mask is None and packed_custom_mask is None and items is None),
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
        )
        self._set_options(
            causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            rope_scale,
            rope_theta,
        )
        if self._use_cuda_graph:
            self._fix_bounds(batch)
            assert self._qo_indptr_buf is not None
            self._qo_indptr_buf.copy_(qo_indptr, non_blocking)
        else:
            self._qo_indptr_buf = self._there(qo_indptr, non_blocking)
        self._set_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, non_blocking)
        self._set_mask(batch, custom_mask, packed_custom_mask, items)
        self._plan_batch(batch)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Runs the planned step on the tensors of a layer.

        Args:
            q: [tokens, num_qo_heads, head_dim_qk].
            paged_kv_cache: (k, v), each [pages, page_size, num_kv_heads, head_dim] (NHD) or
                [pages, num_kv_heads, page_size, head_dim] (HND), or one tensor [pages, 2, ...].
                If page_size is 1, the dimension of page_size may be missing.
            args: with the variant AttentionSink: its sinks [num_qo_heads] and sm_scale; or, with q
                of 8 bits, scale_q, scale_k and scale_v, float32 [1] or one for each head.
            q_scale, k_scale: factors of the logits, for caches of any dtype.
            v_scale: factor of the output.
            out: [tokens, num_qo_heads, head_dim_vo]: where o is written.
            lse: float32, shaped by lse_layout, written if it is given.
            return_lse: whether to return (o, lse).
            lse_base: "log2", or "ln" for the natural logarithm.
            lse_layout: "NH", [tokens, num_qo_heads], or "HN", [num_qo_heads, tokens].
            window_left: replaces that of plan().
            sinks: [num_qo_heads] float32 or bfloat16; see `flashplan.Attention.run`.

        The other arguments must have their defaults, or are ignored.

        Raises:
            ValueError, TypeError: a tensor does not fit the plan. Nothing was written.
            RuntimeError: there was no plan(), or none for these options before a capture.
        """
        if use_fp16_softmax or uses_spcompress:
            refuse(use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress)
        return self._run_pages(
            q,
            paged_kv_cache,
            args,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            lse_layout=lse_layout,
            window_left=window_left,
            sinks=sinks,
            kv_cache_sf=kv_cache_sf,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Calls run() with options that replace those of plan()."""
        self._set_options(
            causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            rope_scale,
            rope_theta,
        )
        self._forward_key = self._key(self._shape)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
