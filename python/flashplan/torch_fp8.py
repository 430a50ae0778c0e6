# SPDX-License-Identifier: Apache-2.0
"""Functions of `flashplan.torch` that make 8-bit tensors, as those of torch_functions.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

# Defines the operators.
import flashplan.torch_ops  # noqa: F401
from flashplan.values import dtype_name

if TYPE_CHECKING:
    from flashplan.types import Float8Name, FrameworkDType

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
