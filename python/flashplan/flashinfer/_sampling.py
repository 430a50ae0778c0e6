# SPDX-License-Identifier: Apache-2.0
"""Draws tokens for the sampling functions with FlashInfer's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashplan as fp

_DTYPES = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
# The difference between the seeds of two rows: 2^64 / golden ratio as an int64, which is odd and
# has no pattern in its bits.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def parameter(name: str, value: Any, rows: Tensor, dtype: torch.dtype) -> Any:
    """A parameter: a number, None, or a tensor [batch] converted to the dtype."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() != 1:
        shape, kind = "", f"{value.dim()}D"
        if value.dim() == 0:  # programs search the message for FlashInfer's text
            shape, kind = " of shape (batch_size,)", "0-dimensional"
        raise ValueError(
            f"{name}: Expected a 1D tensor{shape} or scalar for the sampling parameter, "
            f"got a {kind} tensor"
        )
    if value.shape[0] != rows.shape[0]:
        raise ValueError(
            f"{name}: Sampling parameter tensor batch size mismatch: expected {rows.shape[0]}, "
            f"got {value.shape[0]}"
        )
    return value.to(device=rows.device, dtype=dtype)


def random_numbers(
    generator: torch.Generator | None,
    seed: int | Tensor | None,
    offset: int | Tensor | None,
    batch_size: int,
    device: torch.device,
) -> tuple[int | Tensor, int | Tensor]:
    """(seed, offset) for `flashplan.sample`: those given, or drawn from the generator."""
    if seed is None or offset is None:
        return _next_of(generator, device)
    if isinstance(seed, Tensor) != isinstance(offset, Tensor):
        raise ValueError("seed and offset must both be tensors or both be scalars")
    if not isinstance(seed, Tensor):
        return _to_int64(seed), _to_int64(offset)
    seeds = _of_rows("seed", seed, batch_size)
    if seed.shape[0] == 1 and batch_size > 1:  # rows must not draw equal numbers
        seeds = seeds + _STRIDE * torch.arange(batch_size, device=device)
    return seeds, _of_rows("offset", offset, batch_size)


def _next_of(generator: torch.Generator | None, device: torch.device) -> tuple[int, int]:
    if device.type == "cpu":
        return int(torch.randint(1 << 62, (), generator=generator)), 0
    if generator is None:
        generator = torch.cuda.default_generators[device.index or 0]
    offset: int = generator.get_offset()
    generator.set_offset(offset + 4)
    return _to_int64(generator.initial_seed()), offset


def _to_int64(number: Any) -> int:
    """The int64 with the bits of an int64 or uint64."""
    bits: int = int(number) & ((1 << 64) - 1)
    return bits - (1 << 64) if bits >> 63 else bits


def _of_rows(name: str, tensor: Any, batch_size: int) -> Tensor:
    if tensor.dtype not in (torch.int64, torch.uint64):
        raise ValueError(f"{name} tensor must be int64/uint64, got {tensor.dtype}")
    if tensor.dim() != 1 or tensor.shape[0] not in (1, batch_size):
        raise ValueError(
            f"{name} tensor length must be 1 or {batch_size}, got shape {list(tensor.shape)}"
        )
    numbers: Tensor = tensor.view(torch.int64).expand(batch_size).contiguous()
    return numbers


def _checked_indices(indices: Tensor, rows: Tensor) -> Tensor:
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "indices: expected a 1D tensor of int32 or int64, got "
            f"{indices.dtype} {list(indices.shape)}"
        )
    return indices.to(rows.device)


def draw(
    rows: Tensor,
    indices: Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: int | Tensor | None,
    offset: int | Tensor | None,
    from_probs: bool = False,
    joint: bool = False,
    **filters: Any,
) -> tuple[Tensor, Tensor]:
    """The tokens [batch], of the dtype of indices or int32, and whether they could be drawn.

    If top_k comes before top_p, another kernel keeps the top_k largest elements first. So equal
    random numbers give the tokens that top_p alone draws from rows that top_k has filtered.
    """
    name = "probs" if from_probs else "logits"
    if rows.dim() != 2:
        raise ValueError(f"{name}: expected 2 dimensions, got shape {list(rows.shape)}")
    if check_nan and bool(rows.isnan().any()):
        raise ValueError(f"{name}: Input contains NaN.")
    filters = {name: parameter(name, x, rows, _DTYPES[name]) for name, x in filters.items()}
    on_cpu, batch_size = rows.device.type == "cpu", rows.shape[0]
    valid = None
    if on_cpu:  # flashplan would raise for NaN: such rows become uniform, and are not valid
        valid = ~rows.isnan().any(1)
        rows = torch.where(valid[:, None], rows, 1 / rows.shape[1])
    if "top_p" in filters and "top_k" in filters and not joint:
        keep = fp.top_k_renorm if from_probs else fp.top_k_mask
        rows = keep(rows, filters.pop("top_k"))
    if indices is not None:
        indices = _checked_indices(indices, rows)
        filters = {n: x[indices] if isinstance(x, Tensor) else x for n, x in filters.items()}
        batch_size = indices.shape[0]
    seed, offset = random_numbers(generator, seed, offset, batch_size, rows.device)
    sampled: Any = {"seed": seed, "offset": offset, "from_probs": from_probs, "joint": joint}
    sampled |= {"rows": indices, **filters}
    if valid is not None:
        ids = fp.sample(rows, **sampled)
        if indices is not None:
            valid = valid[indices]
    else:
        status = torch.empty(batch_size, dtype=torch.int32, device=rows.device)
        ids = fp.sample(rows, status=status, **sampled)
        valid = status == 0
    dtype = torch.int32 if indices is None else indices.dtype
    return torch.where(valid, ids, 0).to(dtype), valid
