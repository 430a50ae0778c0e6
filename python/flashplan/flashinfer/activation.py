# SPDX-License-Identifier: Apache-2.0
"""Gated activations. enable_pdl is accepted and has no effect."""

import torch

import flashplan as fp


def silu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Calls `flashplan.silu_and_mul`."""
    return fp.silu_and_mul(input, out)


def gelu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Calls `flashplan.gelu_and_mul`."""
    return fp.gelu_and_mul(input, out)


def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Calls `flashplan.gelu_tanh_and_mul`."""
    return fp.gelu_tanh_and_mul(input, out)
