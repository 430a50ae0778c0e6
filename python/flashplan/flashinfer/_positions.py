# SPDX-License-Identifier: Apache-2.0
"""Variants and rotations of `Attention` for FlashInfer's modes of encoding positions."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from flashplan.flashinfer._arguments import is_8_bit
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
    """The arguments of run() for a variant with ALiBi."""
    arguments: dict[str, Tensor | float] = {"slopes": _slopes(num_heads, device)}
    if softcap > 0:
        arguments["cap"] = softcap
    return arguments


@functools.lru_cache(maxsize=64)
def rotation(theta: float, scale: float) -> Rope:
    return Rope(theta=theta, scale=scale)


def widens_keys(mode: str, kv_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether each run copies its keys and values to 16 bits: kernels for GPUs do not rotate keys
    of 8 bits."""
    return mode == "ROPE_LLAMA" and is_8_bit(kv_dtype) and device.type == "cuda"


def wide_dtype(q_dtype: torch.dtype) -> torch.dtype:
    """The dtype of widened keys, and of queries that attend to them."""
    return torch.bfloat16 if is_8_bit(q_dtype) else q_dtype


def widened(
    k: Tensor, v: Tensor, tables: dict[str, Tensor], kv_dtype: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Copies keys and values to a wider dtype, which rounds nothing. Returns (k, v, tables). Of a
    cache, only the pages in page_indices are copied, in their order. Indices that belong to no
    request may be anything, as in the buffers of CUDA graphs.

    Args:
        kv_dtype: the dtype of the numbers in k and v, which may be tensors of uint8.
    """
    indices = tables.get("page_indices")
    if indices is not None:
        named = indices.clamp(0, max(k.shape[0] - 1, 0))
        k, v = (x.view(torch.uint8).index_select(0, named) for x in (k, v))
        order = torch.arange(len(named), dtype=torch.int32, device=named.device)
        tables = tables | {"page_indices": order}
    k, v = (x.view(kv_dtype).to(dtype) for x in (k, v))
    return k, v, tables


@functools.lru_cache(maxsize=64)
def _slopes(num_heads: int, device: torch.device) -> Tensor:
    """The slopes of Press et al.: a geometric sequence for a power of two of heads. Further heads
    get every other slope of the sequence for twice as many heads."""
    whole = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * (i + 1) / whole for i in range(whole)]
    exponents += [8 * (2 * i + 1) / (2 * whole) for i in range(num_heads - whole)]
    slopes = [math.pow(2, -exponent) for exponent in exponents]
    with torch.inference_mode(False):
        return torch.tensor(slopes, dtype=torch.float32, device=device)
