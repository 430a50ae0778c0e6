# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's modes of encoding positions, as variants and rotations of `Attention`."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from flashplan.rope import Rope
from flashplan.variant import Variant
from flashplan.variants import alibi

MODES = ("NONE", "ROPE_LLAMA", "ALIBI")

# FlashInfer caps logits after it has added the bias. A variant for this has the cap in its body,
# because an `Attention` with a body for logits takes no `softcap`.
_alibi_with_cap = Variant(
    "alibi_with_cap",
    logits="return cap * tanh((x + slopes[qo_head] * (key - query)) / cap);",
    tensors={"slopes": "float32"},
    scalars={"cap": 1.0},
)


def alibi_variant(softcap: float) -> Variant:
    return _alibi_with_cap if softcap > 0 else alibi


def alibi_arguments(
    num_heads: int, softcap: float, device: torch.device
) -> dict[str, Tensor | float]:
    """Those of run() for the variant."""
    arguments: dict[str, Tensor | float] = {"slopes": _slopes(num_heads, device)}
    if softcap > 0:
        arguments["cap"] = softcap
    return arguments


@functools.lru_cache(maxsize=64)
def rotation(theta: float, scale: float) -> Rope:
    return Rope(theta=theta, scale=scale)


@functools.lru_cache(maxsize=64)
def _slopes(num_heads: int, device: torch.device) -> Tensor:
    """Those of Press et al.: a geometric sequence for a power of two of heads, and for the heads
    after these every other one of the sequence for twice as many."""
    whole = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * (i + 1) / whole for i in range(whole)]
    exponents += [8 * (2 * i + 1) / (2 * whole) for i in range(num_heads - whole)]
    slopes = [math.pow(2, -exponent) for exponent in exponents]
    with torch.inference_mode(False):
        return torch.tensor(slopes, dtype=torch.float32, device=device)
