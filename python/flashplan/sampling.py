# SPDX-License-Identifier: Apache-2.0
"""Draws tokens from logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import numpy as np
import numpy.typing as npt

from flashplan import _core
from flashplan.compiled import not_traced
from flashplan.outputs import given_or_new, shape_of
from flashplan.types import LogprobsOf, Stream, Tensor, TensorT
from flashplan.values import to_bool, to_float, to_int

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Results have the framework of the logits, but not their dtype. NumPy's array types name the dtype,
# so NumPy's arrays have an overload of their own.
@overload
def softmax(
    logits: npt.NDArray[Any],
    temperature: float | Tensor | None = None,
    out: None = None,
    *,
    stream: Stream | None = None,
) -> npt.NDArray[np.float32]: ...
@overload
def softmax(
    logits: TensorT,
    temperature: float | Tensor | None = None,
    out: TensorT | None = None,
    *,
    stream: Stream | None = None,
) -> TensorT: ...
@not_traced("call flashplan.torch.softmax")
def softmax(
    logits: Tensor,
    temperature: float | Tensor | None = None,
    out: Tensor | None = None,
    *,
    stream: Stream | None = None,
) -> Any:
    """softmax(logits / temperature) of each row, in float32.

    A logit gets the probability 0 if its difference from the row's largest logit overflows float32,
    as that of 3e38 and -3e38.

    Args:
        logits: [batch, vocab] float32, float16 or bfloat16 (also as uint16 memory), rows at any
            stride.
        temperature: a finite number > 0, or a float32 tensor [batch]; default: 1. On a GPU the
            values of a tensor are not checked: rows with other values have meaningless results.
        out: [batch, vocab] float32 or of logits' dtype, written; logits itself, or memory apart
            from it; default: a new float32 tensor in logits' framework.
        stream: as in `Attention`; default: the current one of logits' framework. None on the CPU.

    Returns:
        The probabilities. A row with NaN, +inf or nothing but -inf is NaN.

    Raises:
        ValueError, TypeError: an argument is malformed. Nothing was written.

    Examples:
        >>> fp.softmax(np.array([[0.0, 0.0]], np.float32)).tolist()
        [[0.5, 0.5]]
    """
    parameter = _parameter("temperature", temperature, 1.0, _to_temperature)
    probs, finish = given_or_new(out, logits, dtype="float32")
    _core.softmax(logits, parameter, probs, stream)
    return finish(probs)


class SampleOptions(TypedDict, total=False):
    """The keyword arguments of `sample` that do not change the type of its result."""

    temperature: float | Tensor | None
    top_k: int | Tensor | None
    top_p: float | Tensor | None
    min_p: float | Tensor | None
    seed: int | Tensor
    offset: int | Tensor
    from_probs: bool
    joint: bool
    logit_bias: Tensor | None
    rows: Tensor | None
    logprobs_of: LogprobsOf
    out: Tensor | None
    status: Tensor | None
    stream: Stream | None


@overload
def sample(
    logits: npt.NDArray[Any],
    *,
    top_logprobs: int,
    return_logprobs: bool = False,
    logprobs: Tensor | None = None,
    top_out: tuple[Tensor, Tensor] | None = None,
    **options: Unpack[SampleOptions],
) -> tuple[
    npt.NDArray[np.int32],
    npt.NDArray[np.float32],
    npt.NDArray[np.int32],
    npt.NDArray[np.float32],
]: ...
@overload
def sample(
    logits: TensorT,
    *,
    top_logprobs: int,
    return_logprobs: bool = False,
    logprobs: Tensor | None = None,
    top_out: tuple[Tensor, Tensor] | None = None,
    **options: Unpack[SampleOptions],
) -> tuple[TensorT, TensorT, TensorT, TensorT]: ...
@overload
def sample(
    logits: npt.NDArray[Any],
    *,
    return_logprobs: Literal[False] = False,
    logprobs: None = None,
    **options: Unpack[SampleOptions],
) -> npt.NDArray[np.int32]: ...
@overload
def sample(
    logits: npt.NDArray[Any],
    *,
    return_logprobs: Literal[True],
    logprobs: Tensor | None = None,
    **options: Unpack[SampleOptions],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]: ...
@overload
def sample(
    logits: TensorT,
    *,
    return_logprobs: Literal[False] = False,
    logprobs: None = None,
    **options: Unpack[SampleOptions],
) -> TensorT: ...
@overload
def sample(
    logits: TensorT,
    *,
    return_logprobs: Literal[True],
    logprobs: Tensor | None = None,
    **options: Unpack[SampleOptions],
) -> tuple[TensorT, TensorT]: ...
@overload
def sample(
    logits: Tensor,
    *,
    return_logprobs: bool = False,
    logprobs: Tensor | None = None,
    top_logprobs: int | None = None,
    top_out: tuple[Tensor, Tensor] | None = None,
    **options: Unpack[SampleOptions],
) -> Any: ...
@not_traced("call flashplan.torch.sample")
def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    from_probs: bool = False,
    joint: bool = False,
    logit_bias: Tensor | None = None,
    rows: Tensor | None = None,
    return_logprobs: bool = False,
    logprobs_of: LogprobsOf = "filtered",
    top_logprobs: int | None = None,
    out: Tensor | None = None,
    logprobs: Tensor | None = None,
    top_out: tuple[Tensor, Tensor] | None = None,
    status: Tensor | None = None,
    stream: Stream | None = None,
) -> Any:
    """Draws a token for each request, from its row of logits.

    A parameter is a number for all requests, or a tensor [batch] with one for each. Filters apply
    in this order: temperature, top-k, softmax, min-p, top-p. Each one sees the renormalised
    distribution that the one before left; `joint` changes that. Of equal logits, those with smaller
    ids are kept first. The same arguments give the same tokens on every device.

    Tokens are drawn, and log-probabilities computed, from weights that are rounded to integers.
    With a filter, and for "raw" log-probabilities, the likeliest token of a row weighs 2^30, so
    that a token of less than 2^-31 of its probability weighs 0 and is never drawn. Without a filter
    the likeliest of each 768 neighbouring tokens weighs 2^27, and the weight of the 768 together is
    rounded down to a multiple of 2^-30 of the weight of the row's likeliest token.

    Args:
        logits: [batch, vocab] float32, float16 or bfloat16 (also as uint16 memory), rows at any
            stride.
        temperature: float32 >= 0; 0 takes the largest logit; default: 1.
        top_k: int32 >= 1: keeps the top_k largest logits; default: all. A number that is not less
            than the vocabulary keeps all.
        top_p: float32 in (0, 1]: keeps the fewest largest probabilities with a sum >= top_p;
            default: 1.
        min_p: float32 in [0, 1]: keeps probabilities >= min_p * the largest one; default: 0.
        seed: an int64, from which each request of the batch draws other random numbers; or an int64
            tensor with a seed for each request, whose tokens then do not depend on its place. A
            tensor [1] is one seed for all, in memory of the device.
        offset: an int64, or a tensor [batch] or [1] of int64: give another one for each token of a
            request, so that its tokens are drawn from different random numbers.
        from_probs: whether `logits` holds probabilities; then temperature must be None, 0 or 1, and
            logit_bias None. With temperature 0 the sums are not checked.
        joint: all filters look at the distribution of the whole row, and a token is kept if each
            filter keeps it: top-p then counts what top-k and min-p drop, too.
        logit_bias: float32 [vocab] or of logits' shape, added to the logits.
        rows: [batch] int32 or int64: request i draws from row rows[i] of the logits, which may have
            any number of rows; default: from row i.
        return_logprobs: also return the logarithms of the tokens' probabilities.
        logprobs_of: "filtered": the distribution that tokens are drawn from; "raw": that of the
            logits, without temperature, bias or filter.
        top_logprobs: n, from 1 to 256 and at most the vocabulary: also return the n likeliest
            tokens of the distribution that logprobs_of names, the likeliest first and equal ones by
            id, and their log-probabilities; implies return_logprobs. If fewer tokens have a
            probability above 0, the last ids are -1 and their log-probabilities -infinity.
        out: [batch] int32, written; default: a new tensor in logits' framework.
        logprobs: [batch] float32, written; implies return_logprobs.
        top_out: the lists of top_logprobs, int32 and float32 [batch, n], written; default: new
            tensors in logits' framework.
        status: [batch] int32, written: 0 for a good row. On a GPU, a row with an error gets the
            token -1, the logprob NaN, and a status that says what is wrong. The value of a
            parameter is out of range: 1 temperature, 2 top_k, 3 top_p, 4 min_p, 9 rows. The row is
            wrong: 5 it has NaN or +inf, 6 all logits are -inf, 7 it is no distribution, though
            from_probs says so.
        stream: as in `Attention`; default: the current one of logits' framework. None on the CPU.

    Returns:
        The tokens, int32 [batch]; with logprobs also those, float32 [batch]; with top_logprobs also
        the likeliest tokens, int32 [batch, n], and their log-probabilities, float32 [batch, n].

    Raises:
        ValueError, TypeError: an argument is malformed, or, on the CPU, a row has NaN or +inf,
            nothing but -inf, probabilities whose sum is not within 1 % of 1, or a parameter out of
            its range. Nothing was written.

    Examples:
        >>> logits = np.array([[0.0, 2.0, 1.0]], np.float32)
        >>> fp.sample(logits, temperature=0)  # the most likely token
        array([1], dtype=int32)
        >>> fp.sample(np.repeat(logits, 4, axis=0), top_k=2, seed=3).tolist()
        [...]
    """
    parameters = (
        *filter_parameters(temperature, top_k, top_p, min_p),
        random_number("seed", seed),
        random_number("offset", offset),
    )
    options = (to_bool("from_probs", from_probs), to_bool("joint", joint), logit_bias, rows)
    raw = _is_raw(logprobs_of)
    num_top = None if top_logprobs is None else to_int("top_logprobs", top_logprobs)
    if num_top is not None and num_top < 1:
        raise ValueError(
            f"top_logprobs: expected 1 to 256 and at most the vocabulary, got {num_top}"
        )
    if top_out is not None and num_top is None:
        raise ValueError("top_logprobs: expected a number with top_out, got None")
    batch = shape_of(logits if rows is None else rows)[:1]
    ids, finish = given_or_new(out, logits, batch, "int32")
    results: list[tuple[Any, Any]] = [(ids, finish)]
    logs: Any = None
    top: tuple[Any, Any] = (None, None)
    if to_bool("return_logprobs", return_logprobs) or logprobs is not None or num_top is not None:
        logs, finish = given_or_new(logprobs, logits, batch, "float32")
        results.append((logs, finish))
    if num_top is not None:
        given = _two_tensors(top_out)
        lists = [
            given_or_new(tensor, logits, (*batch, num_top), dtype)
            for tensor, dtype in zip(given, ("int32", "float32"), strict=True)
        ]
        results += lists
        top = (lists[0][0], lists[1][0])
    _core.sample(logits, *parameters, *options, ids, logs, status, raw, *top, stream)
    finished = [finish(tensor) for tensor, finish in results]
    return tuple(finished) if len(finished) > 1 else finished[0]


def filter_parameters(
    temperature: Any, top_k: Any, top_p: Any, min_p: Any
) -> tuple[Any, Any, Any, Any]:
    """The parameters of filters, each of which is a number or a tensor of numbers."""
    return (
        _parameter("temperature", temperature, 1.0, _to_temperature),
        _parameter("top_k", top_k, 2**31 - 1, to_int),
        _parameter("top_p", top_p, 1.0, to_float),
        _parameter("min_p", min_p, 0.0, to_float),
    )


def _is_raw(logprobs_of: Any) -> bool:
    if not isinstance(logprobs_of, str) or logprobs_of not in ("filtered", "raw"):
        raise ValueError(f"logprobs_of: expected 'filtered' or 'raw', got {logprobs_of!r}")
    return logprobs_of == "raw"


def _two_tensors(top_out: Any) -> tuple[Any, Any]:
    if top_out is None:
        return None, None
    if not isinstance(top_out, tuple) or len(top_out) != 2:
        raise TypeError(f"top_out: expected two tensors, got {type(top_out).__name__}")
    return top_out


def _parameter(name: str, value: Any, default: Any, convert: Any) -> Any:
    """A parameter: a number that `convert` has checked, or a tensor. None becomes `default`."""
    return default if value is None else _number_or_tensor(name, value, convert)


def _to_temperature(name: str, value: Any) -> float:
    number = to_float(name, value)
    if number > 0 and np.float32(number) == 0:
        raise ValueError(f"{name}: expected a number of float32, got {number}")
    return number


def _number_or_tensor(name: str, value: Any, convert: Any) -> Any:
    """A number that `convert` has checked, or a tensor of at least one dimension as it is."""
    is_tensor = hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__")
    if is_tensor and getattr(value, "ndim", 1) != 0:
        return value
    return convert(name, value)


def penalty(name: str, value: Any, default: float) -> Any:
    """A penalty: a number, or a tensor of numbers. None becomes `default`."""
    return _parameter(name, value, default, to_float)


def random_number(name: str, value: Any) -> Any:
    """An int64, or a tensor of int64. None is refused: callers might expect a random seed."""
    return _number_or_tensor(name, value, _to_int64)


def _to_int64(name: str, value: Any) -> int:
    return to_int(name, value, bits=64)
