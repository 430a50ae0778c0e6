# SPDX-License-Identifier: Apache-2.0
"""Output tensors in the caller's framework."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np


@lru_cache
def _framework(tensor_type: type) -> str:
    """The first known framework among a type and its bases."""
    for base in tensor_type.__mro__:
        name = base.__module__.partition(".")[0]
        if name in ("torch", "jax", "jaxlib"):
            return name
    return "numpy"


def _torch_empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


def _numpy_empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    if getattr(getattr(like, "dtype", None), "name", None) == dtype:
        return np.empty(shape, like.dtype)
    if dtype == "bfloat16":
        import ml_dtypes

        return np.empty(shape, ml_dtypes.bfloat16)
    return np.empty(shape, dtype)


def new_output(like: Any, shape: tuple[int, ...], dtype: str) -> tuple[Any, Callable[[Any], Any]]:
    """An uninitialised tensor the core can write, and what makes it one of `like`'s framework.

    JAX arrays are immutable: they are made from NumPy's once written. Tensors of a framework
    that is not known come back as NumPy arrays.
    """
    framework = _framework(type(like))
    if framework == "torch":
        return _torch_empty(like, shape, dtype), _unchanged
    if framework in ("jax", "jaxlib"):
        import jax.numpy as jnp

        return _numpy_empty(like, shape, dtype), jnp.asarray
    return _numpy_empty(like, shape, dtype), _unchanged


def _unchanged(tensor: Any) -> Any:
    return tensor
