# SPDX-License-Identifier: Apache-2.0
"""Output tensors in the caller's framework, on the caller's device."""

from collections.abc import Callable
from typing import Any

import numpy as np

from flashplan import _core


def _torch_empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


# What stores the formats that NumPy and CuPy do not have themselves.
_MEMORY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def _cupy_empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A narrow format as `like` has it: in a dtype of that name, or as memory of its size."""
    import cupy  # pyright: ignore[reportMissingImports]

    kind: Any = _MEMORY.get(dtype, dtype)
    if like.dtype.name == dtype:
        kind = like.dtype
    with like.device:
        return cupy.empty(shape, kind)


def _numpy_empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A narrow format in ml_dtypes' dtype, or as memory of its size without that package."""
    if getattr(getattr(like, "dtype", None), "name", None) == dtype:
        return np.empty(shape, like.dtype)
    if dtype in _MEMORY:
        try:
            import ml_dtypes
        except ImportError:
            return np.empty(shape, _MEMORY[dtype])
        return np.empty(shape, getattr(ml_dtypes, dtype))
    return np.empty(shape, dtype)


class _NewJaxArray:
    """A JAX array that nobody else has seen.

    JAX arrays are immutable, so the core refuses to write one. JAX lends no other memory of its
    own allocator, and nothing can tell that a new array was written before it was handed out: the
    core makes its stream wait until the array is ready, and finishes the stream before it returns.
    """

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def _jax_output(like: Any, shape: tuple[int, ...], dtype: str) -> tuple[Any, Callable[[Any], Any]]:
    import jax.numpy as jnp

    device = getattr(like, "device", None)
    if getattr(device, "platform", "cpu") == "gpu":
        return _NewJaxArray(jnp.empty(shape, dtype, device=device)), lambda new: new.array
    return _numpy_empty(like, shape, dtype), lambda array: jnp.asarray(array, device=device)


def new_output(like: Any, shape: tuple[int, ...], dtype: str) -> tuple[Any, Callable[[Any], Any]]:
    """An uninitialised tensor the core can write, and what makes it one of `like`'s framework.

    On the CPU, JAX arrays are made from NumPy's once written. Tensors of a framework that is not
    known come back as NumPy arrays.
    """
    framework = _core.framework_of(like)
    if framework == "torch":
        return _torch_empty(like, shape, dtype), _unchanged
    if framework == "cupy":
        return _cupy_empty(like, shape, dtype), _unchanged
    if framework == "jax":
        return _jax_output(like, shape, dtype)
    return _numpy_empty(like, shape, dtype), _unchanged


def _unchanged(tensor: Any) -> Any:
    return tensor
