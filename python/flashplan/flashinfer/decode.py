# SPDX-License-Identifier: Apache-2.0
"""Decodes with FlashInfer's names, of a batch of requests or of a single one."""

from __future__ import annotations

import torch
from torch import Tensor

from flashplan.flashinfer._decode import BatchDecodeWithPagedKVCacheWrapper
from flashplan.flashinfer._decode_mla import BatchDecodeMlaWithPagedKVCacheWrapper
from flashplan.flashinfer._direct import (
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from flashplan.flashinfer._missing import cudnn_batch_decode_with_kv_cache
from flashplan.flashinfer._single import single_decode_with_kv_cache

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with buffers, for CUDA graphs."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: torch.dtype | str | None = None,
    kv_data_type: torch.dtype | str | None = None,
    data_type: torch.dtype | str | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """`BatchDecodeWithPagedKVCacheWrapper.plan` for callers that have filled the buffers of CUDA
    graphs: these are not written.

    Args:
        global_override_indptr_cpu: [>= batch_size + 1]: indptr on the host, if the caller has it
            there; otherwise it is copied from the GPU.

    Raises:
        ValueError: q_len_per_req > 1 without an earlier plan().
    """
    if q_len_per_req > 1 and self._cached_module is None:
        raise ValueError(
            "q_len_per_req: expected a prior plan() for more than one row of each request, got none"
        )
    self._plan_decodes(
        indptr,
        global_override_indptr_cpu,
        indices,
        last_page_len,
        (num_qo_heads, num_kv_heads),
        head_dim,
        page_size,
        (data_type if q_data_type is None else q_data_type) or "float16",
        data_type if kv_data_type is None else kv_data_type,
        None,
        (window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
        pos_encoding_mode,
        q_len_per_req,
        fixed_split_size,
        disable_split_kv,
        None,
        non_blocking,
        copies=False,
    )
