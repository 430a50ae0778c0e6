# SPDX-License-Identifier: Apache-2.0
"""Norms. enable_pdl is accepted and has no effect. Outputs of 8 bits saturate."""

import torch

import flashplan as fp

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
    """Calls `flashplan.rmsnorm`: the rows of input, normalised and multiplied by weight."""
    return fp.rmsnorm(input, weight, eps, out=out)


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Calls `flashplan.rmsnorm` with gemma=True: multiplies by 1 + weight."""
    return fp.rmsnorm(input, weight, eps, gemma=True, out=out)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Calls `flashplan.add_rmsnorm`: residual += input, then input = rmsnorm(residual)."""
    fp.add_rmsnorm(input, residual, weight, eps)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Calls `flashplan.add_rmsnorm` with gemma=True: multiplies by 1 + weight."""
    fp.add_rmsnorm(input, residual, weight, eps, gemma=True)


def layernorm(
    input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """Calls `flashplan.layernorm` with weight gemma and bias beta, of input's dtype or float32."""
    return fp.layernorm(input, *_layer_weights(input, gemma, beta), eps)


def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Writes `rmsnorm` of input, divided by scale, to `out`, which has 8 bits. scale: a number or a
    float32 tensor of one element."""
    fp.rmsnorm(input, weight, eps, out=out, scale=_scalar(scale))


def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Adds input to residual, then does `rmsnorm_quant` of residual. input stays as it is."""
    fp.add_rmsnorm(input, residual, weight, eps, out=out, scale=_scalar(scale))


def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
) -> None:
    """Writes `layernorm` of input, divided by scale, to `out`, which has 8 bits. scale: a number or
    a float32 tensor of one element."""
    weights = _layer_weights(input, gemma, beta)
    fp.layernorm(input, *weights, eps, out=out, scale=_scalar(scale))


def _layer_weights(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, bias), both of the dtype of `input`, or else both as float32."""
    if weight.dtype != input.dtype or bias.dtype != input.dtype:
        return weight.float(), bias.float()
    return weight, bias


def _scalar(scale: float | torch.Tensor) -> float | torch.Tensor:
    """A scale as a number, or as a tensor [1]."""
    if not isinstance(scale, torch.Tensor):
        return scale
    if scale.numel() != 1:
        raise ValueError(f"scale must be a scalar tensor, got shape {list(scale.shape)}")
    return scale.reshape(1)
