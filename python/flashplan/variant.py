# SPDX-License-Identifier: Apache-2.0
"""The class Variant: an attention that the user describes by statements of C++."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from flashplan import _core
from flashplan.values import dtype_name, to_bool, to_float

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from flashplan.types import KeyRange, Tensor, VariantDType

BODIES = ("query", "key", "value", "output", "logits", "mask")
DTYPES = ("float32", "int32", "int64", "uint32")


class Variant:
    """An attention of your own, given by the C++ statements that differ from standard attention.

    `Attention(..., variant=)` compiles them into the kernel, and keeps the result on disk. Each
    body is a text of C++ statements that return a value. A body that is not given changes nothing:

    - query, key, value, output: take an element `float x` at `int request, token, head, dim` and
      return the new element. For key and value, x is what is stored, before k_scale and v_scale;
      for output, it is what would be returned. head is a query head in query and output, a kv head
      in key and value.
    - logits: takes `float x`, which is softmax_scale * k_scale * q.k, at `int request, query, key,
      qo_head, kv_head, qo_len, kv_len` and returns the logit. Not together with softcap.
    - mask: takes the arguments of logits without x, and returns a bool: whether the query sees the
      key. causal, window_left and custom_mask hide keys too. Hidden keys are still read, unless
      key_range leaves them out.

    `query`, `key` and `token` are positions in the request: query i has position
    kv_len - qo_len + i, with the real kv_len (`run(kv_lens=)`). Bodies of query, key, value and
    logits are also called for keys that a mask hides.

    exp, exp2, log, log2, tanh, sqrt, rsqrt, pow, sin, cos, erf, floor, ceil (of float), abs, min,
    max (of int or float) and infinity() work on every device. In C++, constants such as 1.0 and 0.5
    are double: write 1 and 0.5f.

    docs/howto/variants.md is the guide.

    Args:
        name: an identifier; the compiler's errors are at `<name>.<body>:<line>:<column>`.
        query, key, value, output, logits, mask: bodies.
        softmax: False: weights are the logits themselves, those of masked keys 0. There is no lse.
        tensors: names and dtypes ("float32", "int32", "int64", "uint32") of up to 8 tensors that
            run() is given as keyword arguments. They are contiguous, and a body reads `name[i]`.
            Nothing checks that i is inside.
        scalars: names and defaults of up to 8 float32 that run() may be given.
        key_range: which keys each query may see, so that plan() skips the others: a function that
            plan() calls with three int64 arrays [tokens], `request, query, kv_len` of each query,
            as the bodies have them. It returns (begin, end), integers or arrays [tokens] of them:
            the query sees keys begin to end - 1 at most. A tile of keys is not read if no query of
            a tile of queries may see any of them. Other keys outside of the range are read and
            multiplied, so the bodies must hide them. Runs then take no kv_lens.

    Raises:
        ValueError: a name is no identifier, is used by something else, or there is no body.
        TypeError: an argument is of the wrong type, or a tensor of another dtype.

    Examples:
        >>> alibi = fp.Variant(
        ...     "alibi",
        ...     logits="return x + slopes[qo_head] * (key - query);",
        ...     tensors={"slopes": "float32"},
        ... )
        >>> attn = fp.Attention(8, 2, 64, variant=alibi, device="cpu")  # doctest: +SKIP
        >>> o = attn.run(q, k, v, block_table=table, slopes=slopes)  # doctest: +SKIP
    """

    __slots__ = ("__weakref__", "_arguments", "_core", "_key_range", "_scalars", "_tensors")

    def __init__(
        self,
        name: str,
        *,
        query: str | None = None,
        key: str | None = None,
        value: str | None = None,
        output: str | None = None,
        logits: str | None = None,
        mask: str | None = None,
        softmax: bool = True,
        tensors: Mapping[str, VariantDType] = {},  # noqa: B006
        scalars: Mapping[str, float] = {},  # noqa: B006
        key_range: KeyRange | None = None,
    ) -> None:
        _check_text("name", name)
        bodies = (query, key, value, output, logits, mask)
        for argument, body in zip(BODIES, bodies):
            if body is not None:
                _check_text(argument, body)
                if not body.strip():
                    raise ValueError(f"{argument}: expected lines of C++, got none")
        softmax = to_bool("softmax", softmax)
        _check_mapping("tensors", tensors)
        _check_mapping("scalars", scalars)
        dtypes = {tensor: _dtype(tensor, dtype) for tensor, dtype in tensors.items()}
        values = {scalar: _float32(f"scalars[{scalar!r}]", x) for scalar, x in scalars.items()}
        if key_range is not None and not callable(key_range):
            raise TypeError(f"key_range: expected a function, got {type(key_range).__name__}")
        self._core = _core.Variant(
            name, list(bodies), softmax, list(dtypes.items()), list(values.items())
        )
        self._tensors = tuple(dtypes)
        self._scalars = values
        given = {argument: body for argument, body in zip(BODIES, bodies) if body is not None}
        self._arguments: dict[str, Any] = {"name": name, **given, "softmax": softmax}
        self._arguments |= {"tensors": dtypes, "scalars": values}
        if key_range is not None:
            self._arguments["key_range"] = key_range
        self._key_range = key_range

    def __repr__(self) -> str:
        name = self._arguments["name"]
        others = ", ".join(f"{k}={v!r}" for k, v in self._arguments.items() if k != "name")
        return f"{type(self).__name__}({name!r}, {others})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant):
            return NotImplemented
        return self._arguments == other._arguments

    def __hash__(self) -> int:
        # Equal variants have equal hashes: the order of names does not count, and -0.0 equals 0.0.
        return hash(
            frozenset(
                (name, frozenset(value.items()) if isinstance(value, dict) else value)
                for name, value in self._arguments.items()
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self._arguments)

    @property
    def _make_key_ranges(self) -> Callable[[bytes, bytes], npt.NDArray[np.int32]] | None:
        """The function that the core's plan() calls; None without a key_range."""
        return None if self._key_range is None else self._key_ranges

    def _key_ranges(self, qo_indptr: bytes, kv_lens: bytes) -> npt.NDArray[np.int32]:
        """The range of keys of each query, int32 [tokens, 2]. The arguments are int32, as bytes."""
        assert self._key_range is not None
        ends = np.frombuffer(qo_indptr, np.int32).astype(np.int64)
        lens = np.frombuffer(kv_lens, np.int32).astype(np.int64)
        request = np.repeat(np.arange(len(lens)), np.diff(ends))
        kv_len = lens[request]
        query = np.arange(ends[-1]) + kv_len - ends[request + 1]
        count = len(query)  # taken before key_range, which may reshape its arguments in place
        bounds: Any = self._key_range(request, query, kv_len)
        if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
            raise TypeError(f"key_range: expected a tuple of begin and end, got {bounds!r}")
        ranges = np.empty((count, 2), np.int32)
        for column, (name, bound) in enumerate(zip(("begin", "end"), bounds)):
            array = np.asarray(bound)
            if array.dtype.kind not in "iu":
                raise TypeError(f"key_range: expected integers as {name}, got {array.dtype}")
            if array.shape not in ((), (count,)):
                raise ValueError(
                    f"key_range: expected {name} of shape {(count,)}, got {array.shape}"
                )
            if array.itemsize < 8:  # np.clip refuses limits that the dtype cannot hold
                array = array.astype(np.int64)
            np.clip(array, 0, 2**31 - 1, out=ranges[:, column], casting="unsafe")
        return ranges

    def _packed(self, arguments: dict[str, Any]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The tensors and scalars of a run, in the order in which the variant lists them."""
        if len(arguments) > len(self._tensors) and not self._scalars:
            _refuse_unknown(arguments, self._tensors)
        unknown = arguments.keys() - self._scalars.keys() - set(self._tensors)
        if unknown:
            _refuse_unknown(unknown, (*self._tensors, *self._scalars))
        for name in self._tensors:
            if arguments.get(name) is None:
                raise TypeError(f"{name}: expected a tensor (of the variant), got None")
        tensors = tuple(arguments[name] for name in self._tensors)
        scalars = tuple(arguments.get(name, default) for name, default in self._scalars.items())
        return tensors, scalars


def packed_arguments(variant: Variant | None, arguments: dict[str, Any]) -> Any:
    """Converts the variant's own keyword arguments of run() to what the core takes."""
    if variant is not None:
        return variant._packed(arguments)
    if arguments:
        _refuse_unknown(arguments, ())
    return None


def _remade(kind: type[Variant], arguments: dict[str, Any]) -> Variant:
    return kind(**arguments)


def _refuse_unknown(names: Any, known: tuple[str, ...]) -> None:
    name = sorted(names)[0]
    or_of_variant = f" or of the variant ({', '.join(known)})" if known else ""
    raise TypeError(f"{name}: expected an argument of run(){or_of_variant}, got an unknown name")


def _check_text(argument: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{argument}: expected a str, got {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{argument}: expected text without a NUL, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{argument}: expected Unicode text, got {text!r}") from None


def _check_mapping(argument: str, mapping: Any) -> None:
    if not hasattr(mapping, "items"):
        raise TypeError(f"{argument}: expected a dict, got {type(mapping).__name__}")
    for name in mapping:
        _check_text(argument, name)


def _float32(argument: str, number: float) -> float:
    value = to_float(argument, number)
    if math.isfinite(value) and abs(value) > float(np.finfo(np.float32).max):
        raise ValueError(f"{argument}: expected a number of float32, got {value}")
    return value


def _dtype(tensor: str, dtype: Any) -> str:
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise TypeError(
            f"tensors: expected one of {', '.join(DTYPES)} for {tensor!r}, got {dtype!r}"
        )
    return name
