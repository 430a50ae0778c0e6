# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of FlashInfer's functions, and converts them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from flashplan._core import UnsupportedError

# A paged cache: a pair (k, v), or one tensor [pages, 2, ...].
Cache: TypeAlias = Tensor | tuple[Tensor, Tensor]


def refuse(**arguments: Any) -> None:
    """Raises UnsupportedError for the first argument that is not None or False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise UnsupportedError(f"{name}: expected none, got {got}")


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raises UnsupportedError for a value that is not allowed."""
    if value not in allowed:
        raise UnsupportedError(
            f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}"
        )


def to_torch_dtype(name: str, dtype: torch.dtype | str) -> torch.dtype:
    """A dtype, which may be given by its name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name}: expected a torch.dtype or the name of one, got {dtype!r}")
    return found


def is_8_bit(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def name_of(dtype: torch.dtype) -> Any:
    """The name of a dtype, as the functions of flashplan take it."""
    return str(dtype).removeprefix("torch.")


def unpack_cache(cache: Cache, kv_layout: str) -> tuple[Tensor, Tensor]:
    """(k, v), each of 4 dimensions. Pages of one token may lack the dimension of tokens."""
    if isinstance(cache, Tensor):
        if cache.dim() not in (4, 5) or cache.shape[1] != 2:
            raise ValueError(
                "paged_kv_cache: expected (k, v) or a tensor [pages, 2, ...] of 5 dimensions, with "
                f"pages of one token of 4, got shape {list(cache.shape)}"
            )
        k, v = cache.unbind(1)
    else:
        k, v = cache
    if k.dim() == 3:
        tokens = 1 if kv_layout == "NHD" else 2
        k, v = k.unsqueeze(tokens), v.unsqueeze(tokens)
    return k, v


def product(a: float | Tensor | None, b: float | Tensor | None) -> float | Tensor:
    """The product of two scales, where None stands for 1."""
    if a is None:
        return 1.0 if b is None else b
    return a if b is None else a * b


def check_aligned(name: str, buffer: Tensor) -> None:
    if buffer.data_ptr() % 16:
        raise ValueError(f"{name} must be 16-byte aligned, got memory at {buffer.data_ptr():#x}")


def check_buffer(name: str, buffer: Tensor | None, length: int | None = None) -> Tensor:
    """Returns `buffer`, which CUDA graphs read. Raises ValueError if it is no tensor, or if it does
    not have `length` elements."""
    if not isinstance(buffer, Tensor):
        raise ValueError(
            f"{name}: expected a torch.Tensor in cudagraph mode, got {type(buffer).__name__}"
        )
    if length is not None and len(buffer) != length:
        raise ValueError(f"{name}: expected {length} elements, got {len(buffer)}")
    return buffer
