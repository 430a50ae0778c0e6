# SPDX-License-Identifier: Apache-2.0
"""Functions of `flashplan.torch` that convert or rotate queries and keys.

torch.py has run(), and torch_functions.py the other functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

# Importing torch_ops defines the operators.
import flashplan.torch_ops  # noqa: F401
from flashplan.rope import Rope
from flashplan.torch_functions import number_and_tensor
from flashplan.values import dtype_name

if TYPE_CHECKING:
    from flashplan.types import Float8Name, FrameworkDType, KvDType

_operators: Any = torch.ops.flashplan


def quantize_fp8(
    x: Tensor,
    scale: float | Tensor | None = None,
    *,
    per_head: bool = False,
    dtype: Float8Name | FrameworkDType = "float8_e4m3fn",
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`flashplan.quantize_fp8()` as an operator."""
    name = dtype_name(dtype)
    x8 = x.new_empty(x.shape, dtype=getattr(torch, name)) if out is None else out
    if isinstance(scale, Tensor):
        _operators.quantize_fp8(x, None, scale, x8, None)
        return x8, scale
    found = x.new_empty(x.shape[1:2] if per_head else (1,), dtype=torch.float32)
    _operators.quantize_fp8(x, scale, None, x8, found)
    return x8, found


def apply_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    rope: Rope | None = None,
    *,
    cos_sin_cache: Tensor | None = None,
    interleaved: bool = False,
    out_q: Tensor | None = None,
    out_k: Tensor | None = None,
    out_dtype: KvDType | None = None,
    q_scale: float | Tensor = 1.0,
    k_scale: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """`flashplan.apply_rope()` as an operator. Keep `rope` alive as long as functions that were
    compiled with it may run."""
    if rope is not None and not isinstance(rope, Rope):
        raise TypeError(f"rope: expected a Rope, got {type(rope).__name__}")
    name = None if out_dtype is None else dtype_name(out_dtype)
    dtype = q.dtype if name is None else getattr(torch, name)
    rotated_q = q.new_empty(q.shape, dtype=dtype) if out_q is None else out_q
    rotated_k = k.new_empty(k.shape, dtype=dtype) if out_k is None else out_k
    _operators.apply_rope(
        q,
        k,
        positions,
        None if rope is None else rope._handle,
        cos_sin_cache,
        interleaved,
        rotated_q,
        rotated_k,
        name,
        *number_and_tensor(q_scale),
        *number_and_tensor(k_scale),
    )
    return rotated_q, rotated_k
