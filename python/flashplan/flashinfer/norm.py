# SPDX-License-Identifier: Apache-2.0
"""Norms. enable_pdl is accepted and has no effect."""

import torch

import flashplan as fp
from flashplan.flashinfer._missing import (
    fused_add_rmsnorm_quant,
    layernorm_quant,
    rmsnorm_quant,
)

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "layernorm_quant",
    "rmsnorm",
    "rmsnorm_quant",
]


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """`flashplan.rmsnorm`: the rows of input, normalised and multiplied by weight."""
    return fp.rmsnorm(input, weight, eps, out=out)


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """`flashplan.rmsnorm` with gemma=True: multiplies by 1 + weight."""
    return fp.rmsnorm(input, weight, eps, gemma=True, out=out)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`flashplan.add_rmsnorm`: residual += input, then input = rmsnorm(residual)."""
    fp.add_rmsnorm(input, residual, weight, eps)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`flashplan.add_rmsnorm` with gemma=True: multiplies by 1 + weight."""
    fp.add_rmsnorm(input, residual, weight, eps, gemma=True)


def layernorm(
    input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """`flashplan.layernorm` with weight gemma and bias beta, of the dtype of input or float32."""
    if gemma.dtype != input.dtype or beta.dtype != input.dtype:
        gemma, beta = gemma.float(), beta.float()
    return fp.layernorm(input, gemma, beta, eps)
