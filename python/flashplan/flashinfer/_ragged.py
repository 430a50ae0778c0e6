# SPDX-License-Identifier: Apache-2.0
"""Attention over ragged keys."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.flashinfer._arguments import check_buffer, one_of, product, refuse
from flashplan.flashinfer._masks import items_of
from flashplan.flashinfer._narrow_queries import take_scales
from flashplan.flashinfer._plans import Batch, on_host
from flashplan.flashinfer._wrapper import Wrapper


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """FlashInfer's wrapper for keys and values in ragged tensors, over `flashplan.Attention`.

    Args:
        float_workspace_buffer: memory on the device of the tensors, used if it is large enough.
        kv_layout: "NHD".
        use_cuda_graph: whether runs are captured. Then the batch size is that of the buffers, and
            no batch has more rows than the first one.
        qo_indptr_buf, kv_indptr_buf: int32 [batch_size + 1], for CUDA graphs.
        custom_mask_buf, mask_indptr_buf: not needed.
        backend: "auto", "fa2" or "fa3", without effect.
        jit_args: None, or those of the variant AttentionSink.

    Raises:
        UnsupportedError: an argument asks for what flashplan can not do.
        ValueError: a buffer is missing or has a wrong size.
    """

    _is_ragged = True

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        one_of("kv_layout", kv_layout, ("NHD",))
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        if use_cuda_graph:
            wanted = len(check_buffer("qo_indptr_buf", qo_indptr_buf))
            check_buffer("kv_indptr_buf", kv_indptr_buf, wanted)
            self._fixed_batch_size = wanted - 1

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        """Plans a step, on the current stream of PyTorch.

        Args:
            qo_indptr, kv_indptr: [batch_size + 1]: the rows of q, and of k and v, at which requests
                begin.

        The other arguments, and the errors, are those of `BatchPrefillWithPagedKVCacheWrapper`.
        """
        items = items_of(
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        )
        for name, indptr, same in (
            ("v_indptr", v_indptr, kv_indptr),
            ("o_indptr", o_indptr, qo_indptr),
        ):
            if indptr is not None and indptr is not same:
                raise UnsupportedError(f"{name}: expected None, got a tensor")
        rows, keys = on_host(qo_indptr, kv_indptr)
        batch = Batch(rows, keys[1:] - keys[:-1], keys)
        has_mask = not (custom_mask is None and packed_custom_mask is None and items is None)
        if self._use_cuda_graph:
            self._check_batch_size(len(batch.kv_lens))
            self._fix_bounds(batch)
            assert self._qo_indptr_buf is not None
            assert self._kv_indptr_buf is not None
            self._qo_indptr_buf.copy_(qo_indptr, non_blocking)
            self._kv_indptr_buf.copy_(kv_indptr, non_blocking)
        else:
            self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._set_shape(
            (num_qo_heads, num_kv_heads),
            head_dim_qk,
            head_dim_vo,
            None,
            q_data_type,
            kv_data_type,
            o_data_type,
            has_mask=has_mask,
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
        self._set_mask(batch, custom_mask, packed_custom_mask, items)
        self._plan_batch(batch)

    begin_forward = plan

    def _most_mask_words(self) -> int:
        """How many words a row of the mask needs at most: it has no more bits than the buffer."""
        buffer = check_buffer("custom_mask_buf", self._custom_mask_buf)
        return -(-8 * buffer.numel() // 32)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        o_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Runs the planned step on the tensors of a layer.

        Args:
            q: [tokens, num_qo_heads, head_dim_qk].
            k, v: [kv_tokens, num_kv_heads, head_dim_qk] and [kv_tokens, num_kv_heads, head_dim_vo].

        The other arguments, results and errors are those of `BatchPrefillWithPagedKVCacheWrapper`.
        """
        refuse(kv_cache_sf=kv_cache_sf)
        if o_scale is not None and (isinstance(o_scale, Tensor) or o_scale != 1):
            raise UnsupportedError(f"o_scale: expected None or 1, got {o_scale}")
        are_scales, scale_q, k_scale, v_scale = take_scales(q, args, k_scale, v_scale)
        return self._run(
            q,
            k,
            v,
            out,
            lse,
            return_lse,
            product(q_scale, k_scale),
            v_scale,
            self._sinks_of(args) if args and not are_scales else None,
            lse_base,
            lse_layout,
            scale_q,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
