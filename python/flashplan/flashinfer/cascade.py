# SPDX-License-Identifier: Apache-2.0
"""Merges attention states, whose log-sum-exp s is a logarithm to base 2, and by such merges attends
over prefixes that requests share.

Engines that plan by themselves name the prefixes in `flashplan.Attention.plan(shared_prefixes=)`: a
run then attends to prefixes and to the keys of single requests in one launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashplan as fp
from flashplan.flashinfer._arguments import Cache
from flashplan.flashinfer._decode import BatchDecodeWithPagedKVCacheWrapper
from flashplan.flashinfer._prefill import BatchPrefillWithPagedKVCacheWrapper
from flashplan.flashinfer._single import single_prefill_with_kv_cache


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two states by `flashplan.merge_states`: v [tokens, heads, dim], s [tokens, heads]."""
    return fp.merge_states(v_a, s_a, v_b, s_b, base2=True)


def merge_state_in_place(
    v: Tensor,
    s: Tensor,
    v_other: Tensor,
    s_other: Tensor,
    mask: Tensor | None = None,
) -> None:
    """Merges another state into v and s. Tokens whose mask [tokens] is false keep their state."""
    if mask is not None:
        s_other = s_other.masked_fill(~mask.bool()[:, None], -torch.inf)
    fp.merge_states(v, s, v_other, s_other, out=v, lse=s, base2=True)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merges states by `flashplan.merge_states`: v [tokens, states, heads, dim], s [tokens, states,
    heads]."""
    states, lse = v.transpose(0, 1).contiguous(), s.transpose(0, 1).contiguous()
    return fp.merge_states(states, lse, base2=True)


class MultiLevelCascadeAttentionWrapper:
    """Attention of requests over several levels of pages: those of the first level are shared by
    many requests, those of the last one belong to one request each.

    Args:
        num_levels: number of levels.
        float_workspace_buffer, kv_layout, use_cuda_graph: as for
            `BatchPrefillWithPagedKVCacheWrapper`, one of which computes each level.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr: for CUDA graphs, a buffer for each level.
        paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr: buffers for each level, too.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        buffers: list[Any] = []
        for name, given in (
            ("qo_indptr_buf_arr", qo_indptr_buf_arr),
            ("paged_kv_indptr_buf_arr", paged_kv_indptr_buf_arr),
            ("paged_kv_indices_buf_arr", paged_kv_indices_buf_arr),
            ("paged_kv_last_page_len_buf_arr", paged_kv_last_page_len_buf_arr),
        ):
            if use_cuda_graph:
                _check_levels(name, given or [], num_levels)
            buffers.append([None] * num_levels if given is None else given)
        self._use_cuda_graph = use_cuda_graph
        self._batch_prefill_wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, *of_level
            )
            for of_level in zip(*buffers)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffers: list[Tensor]
    ) -> None:
        """Sets other workspaces: one for all levels, and an integer workspace for each level."""
        _check_levels(
            "int_workspace_buffers", int_workspace_buffers, len(self._batch_prefill_wrappers)
        )
        for wrapper, ints in zip(self._batch_prefill_wrappers, int_workspace_buffers):
            wrapper.reset_workspace_buffer(float_workspace_buffer, ints)

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Plans all levels.

        Args:
            qo_indptr_arr: for each level [groups + 1]: the rows of q at which groups begin. All
                rows of a group attend to the same pages.
            paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: for each level, the
                pages of the groups.
            causal: for the last level; in all others, rows see all keys of their group.

        The other arguments, and the errors, are those of `BatchPrefillWithPagedKVCacheWrapper`.
        """
        wrappers = self._batch_prefill_wrappers
        lengths = (
            ("qo_indptr_arr", qo_indptr_arr),
            ("paged_kv_indptr_arr", paged_kv_indptr_arr),
            ("paged_kv_indices_arr", paged_kv_indices_arr),
            ("paged_kv_last_page_len", paged_kv_last_page_len),
        )
        for name, given in lengths:
            _check_levels(name, given, len(wrappers))
        for wrapper, *of_level in zip(wrappers, *(given for _, given in lengths)):
            wrapper.plan(
                *of_level,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and wrapper is wrappers[-1],
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: Cache) -> Tensor:
        """Runs all levels. Returns o [tokens, num_qo_heads, head_dim], over the pages of all."""
        *others, last = self._batch_prefill_wrappers
        o, lse = last.run(q, paged_kv_cache, return_lse=True)
        for wrapper in others:
            merge_state_in_place(o, lse, *wrapper.run(q, paged_kv_cache, return_lse=True))
        result: Tensor = o
        return result

    forward = run

    def end_forward(self) -> None:
        """Does nothing, since there is nothing to release."""


def _check_levels(name: str, given: list[Any], num_levels: int) -> None:
    if len(given) != num_levels:
        raise ValueError(f"{name}: expected {num_levels} levels, got {len(given)}")


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decodes of requests that all begin with the same keys, which are given as tensors."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._batch_decode_wrapper = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout
        )
        self._kv_layout = kv_layout

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        self._batch_decode_wrapper.reset_workspace_buffer(
            float_workspace_buffer, int_workspace_buffer
        )

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: torch.dtype | str = "float16",
    ) -> None:
        """Plans attention over the keys that each request has for itself."""
        self._batch_decode_wrapper.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=data_type,
            kv_data_type=data_type,
        )

    def forward(
        self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Cache
    ) -> Tensor:
        """Returns o [batch_size, num_qo_heads, head_dim], over shared and own keys of requests."""
        state = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, return_lse=True
        )
        own = self._batch_decode_wrapper.run(q, unique_kv_cache, return_lse=True)
        merge_state_in_place(*state, *own)
        o: Tensor = state[0]
        return o

    def end_forward(self) -> None:
        """Does nothing, since there is nothing to release."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Queries of requests that all begin with the same keys, which are given as tensors."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._batch_prefill_wrapper = BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout
        )
        self._kv_layout = kv_layout
        self._planned: tuple[Any, ...] = ()
        self._q_dtype: torch.dtype | None = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        self._batch_prefill_wrapper.reset_workspace_buffer(
            float_workspace_buffer, int_workspace_buffer
        )

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Keeps the lengths; the first forward() plans them, since it knows the dtype."""
        self._planned = (
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
        )
        self._q_dtype = None

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Returns o [tokens, num_qo_heads, head_dim]. `causal` is about the keys that each request
        has for itself: all queries see the shared keys."""
        if not self._planned:
            raise RuntimeError("forward: expected a begin_forward() before, got none")
        if self._q_dtype != q.dtype:
            options: Any = {"causal": causal, "sm_scale": sm_scale, "q_data_type": q.dtype}
            self._batch_prefill_wrapper.plan(*self._planned, **options)
            self._q_dtype = q.dtype
        state = single_prefill_with_kv_cache(
            q,
            k_shared,
            v_shared,
            kv_layout=self._kv_layout,
            sm_scale=sm_scale,
            return_lse=True,
        )
        own = self._batch_prefill_wrapper.forward_return_lse(
            q, unique_kv_cache, causal=causal, sm_scale=sm_scale
        )
        merge_state_in_place(*state, *own)
        o: Tensor = state[0]
        return o

    def end_forward(self) -> None:
        """Does nothing, since there is nothing to release."""
