# SPDX-License-Identifier: Apache-2.0
"""Prompts and decodes in one call, but in two launches. Engines that plan by themselves put both
into one batch of `flashplan.Attention`, which is one launch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.flashinfer._arguments import Cache, refuse
from flashplan.flashinfer._decode import BatchDecodeWithPagedKVCacheWrapper
from flashplan.flashinfer._prefill import BatchPrefillWithPagedKVCacheWrapper
from flashplan.flashinfer._single import single_prefill_with_kv_cache


class PODWithPagedKVCacheWrapper:
    """Runs a prompt over ragged keys, then planned decodes over pages.

    Args: those of `BatchDecodeWithPagedKVCacheWrapper`.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        jit_args: Any = None,
    ) -> None:
        refuse(jit_args=jit_args)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            True,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        self._kv_layout = kv_layout

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans the decodes, as `BatchDecodeWithPagedKVCacheWrapper.plan` does."""
        self._decode.plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            non_blocking=non_blocking,
        )

    begin_forward = plan

    def run(
        self,
        q_p: Tensor,
        k_p: Tensor,
        v_p: Tensor,
        q_d: Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: Tensor | None = None,
        packed_custom_mask_d: Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Any, Any]:
        """(result of the prompt, result of the decodes), each o, or (o, lse) with return_lse.

        Arguments with the suffix _p are those of `single_prefill_with_kv_cache`. Options with the
        suffix _d must have their defaults or the values of plan(), which are used.

        Raises:
            UnsupportedError: an option of the decodes is not that of plan().
        """
        refuse(custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d)
        decode = self._decode
        for name, value, default, planned in (
            ("kv_layout_d", kv_layout_d, "NHD", self._kv_layout),
            ("pos_encoding_mode_d", pos_encoding_mode_d, "NONE", decode._pos_encoding_mode),
            ("sm_scale_d", sm_scale_d, None, decode._sm_scale),
            ("window_left_d", window_left_d, -1, decode._window_left),
            ("rope_scale_d", rope_scale_d, None, decode._rope_scale),
            ("rope_theta_d", rope_theta_d, None, decode._rope_theta),
        ):
            if value != default and value != planned:
                raise UnsupportedError(f"{name}: expected that of plan(), {planned}, got {value}")
        prompt = single_prefill_with_kv_cache(
            q_p,
            k_p,
            v_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
            return_lse=return_lse_p,
        )
        decodes = decode.run(
            q_d,
            paged_kv_cache_d,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse_d,
        )
        return prompt, decodes

    def end_forward(self) -> None:
        """Does nothing, since there is nothing to release."""


class BatchPODWithPagedKVCacheWrapper:
    """Runs planned prompts, then planned decodes, both over pages.

    Args:
        float_workspace_buffer: the first half serves the prompts, the second one the decodes.
        kv_layout: "NHD" or "HND", of both caches.
    """

    is_cuda_graph_enabled = False

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        half = len(float_workspace_buffer) // 32 * 16  # so that both halves are aligned
        self.device = float_workspace_buffer.device
        self._prompts, self._decodes = (
            BatchPrefillWithPagedKVCacheWrapper(part, kv_layout)
            for part in (float_workspace_buffer[:half], float_workspace_buffer[half:])
        )
        self._is_causal = True  # whether the prompts of the last run were causal

    def plan(
        self,
        qo_indptr_p: Tensor,
        kv_indptr_p: Tensor,
        kv_indices_p: Tensor,
        last_page_len_p: Tensor,
        qo_indptr_d: Tensor,
        kv_indptr_d: Tensor,
        kv_indices_d: Tensor,
        last_page_len_d: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans the prompts (the suffix _p) and the decodes (_d). Decodes see all of their keys.

        The arguments are those of `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Args:
            data_type: dtype of k and v if kv_data_type is None, and of q if q_data_type is None.
        """
        options: dict[str, Any] = {
            "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left,
            "q_data_type": (data_type if q_data_type is None else q_data_type) or "float16",
            "kv_data_type": data_type if kv_data_type is None else kv_data_type,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
            "non_blocking": non_blocking,
        }
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        lengths = (qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p)
        # Keeps the arguments: a run that is given a mask plans the prompts again.
        self._plan_prompts = functools.partial(self._prompts.plan, *lengths, *shape, **options)
        self._has_mask = False
        self._plan_prompts(causal=self._is_causal)
        lengths = (qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d)
        self._decodes.plan(*lengths, *shape, **options)

    begin_forward = plan

    def run(
        self,
        q_p: Tensor,
        paged_kv_cache_p: Cache,
        q_d: Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Any, Any]:
        """(result of the prompts, result of the decodes), each o, or (o, lse) with return_lse.

        Args:
            custom_mask_p, packed_custom_mask_p: take the place of causal_p. With a mask, each run
                plans the prompts again.
            q_scale, k_scale, v_scale: scales for the decodes.
            use_fp16_qk_reduction, enable_pdl: ignored.

        The other arguments are those of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        has_mask = custom_mask_p is not None or packed_custom_mask_p is not None
        if has_mask or self._has_mask:
            self._plan_prompts(
                custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p
            )
            self._has_mask = has_mask
        self._prompts._causal = self._is_causal = causal_p
        prompts = self._prompts.run(q_p, paged_kv_cache_p, return_lse=return_lse)
        decodes = self._decodes.run(
            q_d,
            paged_kv_cache_d,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
        )
        return prompts, decodes

    def end_forward(self) -> None:
        """Does nothing, since there is nothing to release."""
