# SPDX-License-Identifier: Apache-2.0
"""Reads queries of 8 bits and their scales, of which FlashInfer has one for each query head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashplan.flashinfer._arguments import is_8_bit, product


def kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which kernels read queries: on GPUs they take no float8_e5m2."""
    is_widened = dtype == torch.float8_e5m2 and device.type == "cuda"
    return torch.bfloat16 if is_widened else dtype


def take_scales(
    q: Tensor, args: tuple[Any, ...], k_scale: Any, v_scale: Any
) -> tuple[bool, Any, Any, Any]:
    """Returns (args_are_scales, scale_q, k_scale, v_scale). With queries of 8 bits, three arguments
    by position are scales of q, k and v: float32 tensors of one element or one for each head."""
    if len(args) != 3 or not is_8_bit(q.dtype):
        return False, None, k_scale, v_scale
    scale_q, scale_k, scale_v = args
    return True, scale_q, product(scale_k, k_scale), product(scale_v, v_scale)


def read_queries(
    q: Tensor, scale: float | Tensor | None, num_kv_heads: int, k_scale: Any
) -> tuple[Tensor, Any]:
    """(queries as kernels read them, the scale of logits).

    If `scale` is one number, or one for each kv head, it becomes part of the logits' scale. If it
    has one number for each query head, q is multiplied by them and rounded to bfloat16, whose
    significand has 4 bits more than that of float8_e4m3fn.

    Raises:
        ValueError: `scale` has another number of elements.
    """
    dtype = kernel_dtype(q.dtype, q.device)
    if not isinstance(scale, Tensor) or scale.numel() in (1, num_kv_heads):
        return q.to(dtype), product(scale, k_scale)
    if scale.numel() != q.shape[1]:
        raise ValueError(
            f"scale_q: expected 1 or {q.shape[1]} elements, one for each head of q, got "
            f"{scale.numel()}"
        )
    return (q.float() * scale.view(-1, 1)).bfloat16(), product(None, k_scale)
