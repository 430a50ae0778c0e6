# SPDX-License-Identifier: Apache-2.0
"""Makes output tensors in the caller's framework, on the caller's device."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from flashplan import _core
from flashplan.types import TensorT
from flashplan.values import dtype_name


def _torch_empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


# The dtypes that hold formats which NumPy and CuPy do not have.
_MEMORY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def _cupy_empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A new CuPy array. For a format that CuPy lacks, it has the dtype of `like` if that has the
    format's name, else the dtype in _MEMORY."""
    import cupy  # pyright: ignore[reportMissingImports]

    kind: Any = _MEMORY.get(dtype, dtype)
    if like.dtype.name == dtype:
        kind = like.dtype
    with like.device:
        return cupy.empty(shape, kind)


def _numpy_empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A new NumPy array. For a format that NumPy lacks, it has the dtype of ml_dtypes, or if this
    is not installed the dtype in _MEMORY."""
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
    """A new JAX array that the core may write.

    JAX arrays are immutable, so the core refuses to write one. But there is no other way to get
    memory from JAX's allocator, and a write is safe while no one else has the array: the core makes
    its stream wait until the array is ready, and waits for the stream before it returns.
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


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor; (0,) for anything else, which the core then refuses."""
    try:
        return tuple(map(operator.index, tensor.shape)) or (0,)
    except (AttributeError, TypeError, RuntimeError):  # a class or a nested tensor raises these
        return (0,)


def given_or_new(
    out: TensorT | None,
    like: TensorT,
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
) -> tuple[Any, Callable[[Any], TensorT]]:
    """The output that the caller gave, or a new one. Returns what `new_output` returns.

    Args:
        out: None, or the caller's tensor.
        like: an input.
        shape, dtype: of a new tensor; default: those of `like`.
    """
    if out is not None:
        return out, _unchanged
    if shape is None:
        shape = shape_of(like)
    return new_output(like, shape, dtype)


def new_output(
    like: Any, shape: tuple[int, ...], dtype: str | None = None
) -> tuple[Any, Callable[[Any], Any]]:
    """An uninitialised tensor that the core can write, in the framework of `like`, and by default
    of its dtype.

    Returns:
        The tensor, and a function to call with it once it is written, which returns the caller's
        result. On the CPU the function makes JAX arrays from NumPy arrays. For an unknown framework
        the result is a NumPy array.
    """
    if isinstance(like, type):
        like = None  # its attributes would be descriptors; the core refuses the class
    dtype = dtype or dtype_name(getattr(like, "dtype", "float32"))
    framework = _core.framework_of(like)
    if framework == "torch":
        return _torch_empty(like, shape, dtype), _unchanged
    if framework == "cupy":
        return _cupy_empty(like, shape, dtype), _unchanged
    if framework == "jax":
        return _jax_output(like, shape, dtype)
    return _numpy_empty(like, shape, dtype), _unchanged


def given_or_kept(name: str, out: Any, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """The output that the caller gave, or a new one that can be written more than once. Raises
    TypeError for JAX, which has no such arrays."""
    if out is not None:
        return out
    if _core.framework_of(like) == "jax":
        raise TypeError(
            f"{name}: expected a tensor of another framework with JAX arrays, which can not be "
            "written, got None"
        )
    return new_output(like, shape, dtype)[0]


def _unchanged(tensor: Any) -> Any:
    return tensor
