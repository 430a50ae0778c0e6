# SPDX-License-Identifier: Apache-2.0
"""The probabilities and the logits of the tokens that the filters of `sample` keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, overload

import numpy as np
import numpy.typing as npt

from flashplan import _core
from flashplan.compiled import not_traced
from flashplan.outputs import given_or_new
from flashplan.sampling import filter_parameters
from flashplan.types import Stream, Tensor, TensorT
from flashplan.values import to_bool

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FilterOptions(TypedDict, total=False):
    """The keyword arguments of `filtered_probs` except `out`."""

    temperature: float | Tensor | None
    top_k: int | Tensor | None
    top_p: float | Tensor | None
    min_p: float | Tensor | None
    from_probs: bool
    joint: bool
    logit_bias: Tensor | None
    status: Tensor | None
    stream: Stream | None


@overload
def filtered_probs(
    logits: npt.NDArray[Any], *, out: None = None, **options: Unpack[FilterOptions]
) -> npt.NDArray[np.float32]: ...
@overload
def filtered_probs(
    logits: TensorT, *, out: TensorT | None = None, **options: Unpack[FilterOptions]
) -> TensorT: ...
@not_traced("call flashplan.torch.filtered_probs")
def filtered_probs(
    logits: Tensor,
    *,
    temperature: float | Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    from_probs: bool = False,
    joint: bool = False,
    logit_bias: Tensor | None = None,
    out: Tensor | None = None,
    status: Tensor | None = None,
    stream: Stream | None = None,
) -> Any:
    """The distributions from which `sample` draws with these filters, one for each row of logits.

    A row has the probabilities of the tokens that the filters keep, and 0 for the other tokens. Its
    sum differs from 1 by at most vocab * 2^-31, because weights are rounded as in `sample`. If the
    input is logits, a probability below 2^-32 of the largest one may become 0.

    Args:
        logits: [batch, vocab] float32, float16 or bfloat16 (also as uint16 memory), rows at any
            stride.
        temperature, top_k, top_p, min_p, from_probs, joint, logit_bias: as in `sample`.
        out: [batch, vocab] float32, written; logits itself, or memory apart from it; default: a new
            tensor in logits' framework.
        status: [batch] int32, written: 0 for a good row. On a GPU, a row with an error becomes NaN,
            and its status says what is wrong, as in `sample`.
        stream: as in `Attention`; default: the current one of logits' framework. None on the CPU.

    Returns:
        The probabilities, float32 [batch, vocab].

    Raises:
        ValueError, TypeError: where `sample` raises them. Nothing was written.

    Examples:
        >>> fp.filtered_probs(np.array([[0.0, 0.0, -1.0]], np.float32), top_k=2).tolist()
        [[0.5, 0.5, 0.0]]
    """
    parameters = filter_parameters(temperature, top_k, top_p, min_p)
    options = (to_bool("from_probs", from_probs), to_bool("joint", joint), logit_bias)
    probs, finish = given_or_new(out, logits, dtype="float32")
    _core.filtered_probs(logits, *parameters, *options, probs, status, stream)
    return finish(probs)


@overload
def top_k_renorm(
    probs: npt.NDArray[Any],
    top_k: int | Tensor,
    *,
    out: None = None,
    status: Tensor | None = None,
    stream: Stream | None = None,
) -> npt.NDArray[np.float32]: ...
@overload
def top_k_renorm(
    probs: TensorT,
    top_k: int | Tensor,
    *,
    out: TensorT | None = None,
    status: Tensor | None = None,
    stream: Stream | None = None,
) -> TensorT: ...
@not_traced("call flashplan.torch.top_k_renorm")
def top_k_renorm(
    probs: Tensor,
    top_k: int | Tensor,
    *,
    out: Tensor | None = None,
    status: Tensor | None = None,
    stream: Stream | None = None,
) -> Any:
    """Keeps the top_k largest probabilities of each row, divided by their sum; others become 0.

    This is `filtered_probs` of probabilities; of equal ones, those with smaller ids are kept.

    Args:
        probs: [batch, vocab], rows that sum to 1 within 1 %; dtypes as in `filtered_probs`.
        top_k: an int >= 1, or int32 [batch].
        out, status, stream: as in `filtered_probs`.

    Returns:
        float32 [batch, vocab].

    Raises:
        ValueError, TypeError: where `filtered_probs` raises them. Nothing was written.

    Examples:
        >>> fp.top_k_renorm(np.array([[0.5, 0.25, 0.25]], np.float32), 1).tolist()
        [[1.0, 0.0, 0.0]]
    """
    return filtered_probs(
        probs, top_k=top_k, from_probs=True, out=out, status=status, stream=stream
    )


@overload
def top_p_renorm(
    probs: npt.NDArray[Any],
    top_p: float | Tensor,
    *,
    out: None = None,
    status: Tensor | None = None,
    stream: Stream | None = None,
) -> npt.NDArray[np.float32]: ...
@overload
def top_p_renorm(
    probs: TensorT,
    top_p: float | Tensor,
    *,
    out: TensorT | None = None,
    status: Tensor | None = None,
    stream: Stream | None = None,
) -> TensorT: ...
@not_traced("call flashplan.torch.top_p_renorm")
def top_p_renorm(
    probs: Tensor,
    top_p: float | Tensor,
    *,
    out: Tensor | None = None,
    status: Tensor | None = None,
    stream: Stream | None = None,
) -> Any:
    """Keeps the fewest largest probabilities with a sum >= top_p, divided by their sum.

    The other arguments, the result and the errors are those of `top_k_renorm`.

    Args:
        top_p: a number in (0, 1], or float32 [batch].

    Examples:
        >>> fp.top_p_renorm(np.array([[0.5, 0.25, 0.25]], np.float32), 0.5).tolist()
        [[1.0, 0.0, 0.0]]
    """
    return filtered_probs(
        probs, top_p=top_p, from_probs=True, out=out, status=status, stream=stream
    )


@not_traced("call flashplan.torch.top_k_mask")
def top_k_mask(
    logits: TensorT,
    top_k: int | Tensor,
    *,
    out: TensorT | None = None,
    stream: Stream | None = None,
) -> TensorT:
    """Copies the top_k largest logits of each row; the others become -infinity.

    Args:
        logits: [batch, vocab] float32, float16 or bfloat16 (also as uint16 memory), rows at any
            stride.
        top_k: an int >= 1, or int32 [batch]. Of equal logits, those with smaller ids are kept.
        out: of logits' dtype and shape, written; logits itself, or memory apart from it; default: a
            new tensor in logits' framework.
        stream: as in `Attention`; default: the current one of logits' framework. None on the CPU.

    Returns:
        `out`, or the new tensor. On a GPU, a row becomes NaN if it has NaN or +inf or nothing but
        -inf, or if its top_k is below 1.

    Raises:
        ValueError, TypeError: an argument is malformed, or, on the CPU, a row would become NaN.
            Nothing was written.

    Examples:
        >>> fp.top_k_mask(np.array([[0.0, 2.0, 1.0]], np.float32), 2).tolist()
        [[-inf, 2.0, 1.0]]
    """
    parameter = filter_parameters(None, top_k, None, None)[1]
    masked, finish = given_or_new(out, logits)
    _core.top_k_mask(logits, parameter, masked, stream)
    return finish(masked)
