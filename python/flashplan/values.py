# SPDX-License-Identifier: Apache-2.0
"""Converts arguments to numbers, names and dtypes of the core. Errors name the argument."""

import operator
from collections.abc import Mapping
from typing import Any

from flashplan import _core

# Caches of multi-head latent attention may also have "fp8_ds_mla", whose elements are bytes.
MLA_DTYPES = {dtype.name: dtype for dtype in _core.DType}
DTYPES = {name: dtype for name, dtype in MLA_DTYPES.items() if name != "fp8_ds_mla"}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as a string or as a dtype of any framework."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).rsplit(".", 1)[-1]


def to_dtype(argument: str, dtype: Any, known: Mapping[str, _core.DType] = DTYPES) -> _core.DType:
    """The core's dtype for a dtype or its name. Raises UnsupportedError naming `argument`."""
    try:
        return known[dtype_name(dtype)]
    except KeyError:
        expected = ", ".join(known)
        raise _core.UnsupportedError(
            f"{argument}: expected one of {expected}, got {dtype!r}"
        ) from None


def to_int(argument: str, value: Any, bits: int = 32) -> int:
    """An integer of `bits` bits. Raises TypeError or ValueError naming `argument`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument}: expected an int, got {type(value).__name__}") from None
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise ValueError(f"{argument}: expected an int{bits}, got {number}")
    return number


def to_float(argument: str, value: Any) -> float:
    """A float. Raises TypeError or ValueError naming `argument`."""
    if type(value) not in (float, int):
        _core.check_number_without_gradient(argument, value)
    try:
        if not hasattr(type(value), "__float__"):  # float() would read text too
            return float(operator.index(value))
        return float(value)
    except OverflowError:
        raise ValueError(f"{argument}: expected a float32, got a larger number") from None
    except (TypeError, ValueError):
        raise TypeError(f"{argument}: expected a number, got {type(value).__name__}") from None


def to_bool(argument: str, value: Any) -> bool:
    """A bool. Raises TypeError naming `argument`."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"{argument}: expected a bool, got {type(value).__name__}")


def is_hnd(kv_layout: Any) -> bool:
    """Whether a layout is "HND". Raises ValueError if it is neither that nor "NHD"."""
    if not isinstance(kv_layout, str) or kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")
    return kv_layout == "HND"
