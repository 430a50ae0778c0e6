# SPDX-License-Identifier: Apache-2.0
"""Norms, activations and copies of the rows of a tensor."""

from collections.abc import Callable
from typing import Any

from flashplan import _core
from flashplan.compiled import not_traced
from flashplan.outputs import given_or_new, shape_of
from flashplan.types import KvDType, Stream, Tensor, TensorT
from flashplan.values import to_bool, to_dtype


@not_traced("call flashplan.torch.rmsnorm")
def rmsnorm(
    x: TensorT,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gemma: bool = False,
    out: TensorT | None = None,
    out_dtype: KvDType | None = None,
    scale: float | Tensor = 1.0,
    stream: Stream | None = None,
) -> TensorT:
    """x / sqrt(mean(x^2) + eps) * weight / scale, over the last dimension, summed in float32.

    Args:
        x: [..., n] float32, float16 or bfloat16 (also as uint16 memory), of 1 to 4 dimensions with
            rows at any strides. A [tokens, heads, head_dim] view gives a norm for each head.
        weight: [n] of x's dtype or float32; None: nothing is multiplied.
        eps: added to the mean of the squares; >= 0.
        gemma: multiply by 1 + weight, if there is a weight.
        out: shaped like x, written; x itself, or memory apart from it; default: a new tensor in x's
            framework.
        out_dtype: x's, float8_e4m3fn or float8_e5m2; default: x's. In 8-bit formats, values that
            are too large become the largest one. It also says what an `out` of uint8 stores.
        scale: divides the result; a normal float > 0, or float32 [1] on x's device.
        stream: as in `Attention`; default: the current one of x's framework. None on the CPU.

    Returns:
        `out`, or the new tensor.

    Raises:
        ValueError, TypeError: a tensor is malformed. Nothing was written.

    Examples:
        >>> fp.rmsnorm(np.array([[3.0, 4.0]], np.float32), np.ones(2, np.float32))
        array([[0.848..., 1.131...]], dtype=float32)
    """
    is_gemma = to_bool("gemma", gemma)
    y, finish, stored = _output(out, x, out_dtype)
    _core.rmsnorm(x, weight, y, eps, is_gemma, stored, scale, stream)
    return finish(y)


@not_traced("call flashplan.torch.add_rmsnorm")
def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gemma: bool = False,
    out: Tensor | None = None,
    out_dtype: KvDType | None = None,
    scale: float | Tensor = 1.0,
    stream: Stream | None = None,
) -> None:
    """Adds x to residual, and normalises the sum: residual += x; x = rmsnorm(residual).

    Both are changed in place. The sum is rounded to the dtype before it is normalised.

    Args:
        x, residual: [..., n] of one dtype and shape, as x of `rmsnorm`, written.
        out: shaped like x; where the norm is written, instead of to x, which stays as it is.
        out_dtype: the dtype of `out`, as in `rmsnorm`.

    The other arguments are those of `rmsnorm`.

    Raises:
        ValueError, TypeError: a tensor is malformed, or two share memory. Nothing was written.

    Examples:
        >>> x, residual = np.array([[[1.0, 1.0]], [[2.0, 3.0]]], np.float32)
        >>> fp.add_rmsnorm(x, residual, np.ones(2, np.float32))
        >>> residual, x
        (array([[3., 4.]], dtype=float32), array([[0.848..., 1.131...]], dtype=float32))
    """
    is_gemma = to_bool("gemma", gemma)
    stored = None if out_dtype is None else to_dtype("out_dtype", out_dtype)
    _core.add_rmsnorm(x, residual, weight, out, eps, is_gemma, stored, scale, stream)


@not_traced("call flashplan.torch.layernorm")
def layernorm(
    x: TensorT,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: TensorT | None = None,
    out_dtype: KvDType | None = None,
    scale: float | Tensor = 1.0,
    stream: Stream | None = None,
) -> TensorT:
    """((x - mean) / sqrt(variance + eps) * weight + bias) / scale, over the last dimension.

    Args:
        bias: [n] of the dtype of weight, or of x's dtype without a weight; None: nothing is added.

    The other arguments and the result are those of `rmsnorm`.

    Raises:
        ValueError, TypeError: a tensor is malformed. Nothing was written.

    Examples:
        >>> x = np.array([[1.0, 3.0]], np.float32)
        >>> fp.layernorm(x, np.ones(2, np.float32)).round(3).tolist()
        [[-1.0, 1.0]]
    """
    y, finish, stored = _output(out, x, out_dtype)
    _core.layernorm(x, weight, bias, y, eps, stored, scale, stream)
    return finish(y)


def _output(
    out: TensorT | None, x: TensorT, out_dtype: Any, shape: tuple[int, ...] | None = None
) -> tuple[Any, Callable[[Any], TensorT], Any]:
    """The output, a function that converts it to the result, and the core's dtype of out_dtype."""
    stored = None if out_dtype is None else to_dtype("out_dtype", out_dtype)
    return *given_or_new(out, x, shape, None if stored is None else stored.name), stored


@not_traced("call flashplan.torch.silu_and_mul")
def silu_and_mul(
    x: TensorT,
    out: TensorT | None = None,
    *,
    out_dtype: KvDType | None = None,
    scale: float = 1.0,
    stream: Stream | None = None,
) -> TensorT:
    """silu(x[..., :d]) * x[..., d:] / scale, in float32; silu(x) = x / (1 + exp(-x)).

    Args:
        x: [..., 2 d] float32, float16 or bfloat16 (also as uint16 memory), of 1 to 4 dimensions
            with rows at any strides.
        out: [..., d], written; default: a new tensor in x's framework.
        out_dtype: x's, float8_e4m3fn or float8_e5m2; default: x's. In 8-bit formats, values that
            are too large become the largest one. It also says what an `out` of uint8 stores.
        scale: divides the result; a normal float > 0.
        stream: as in `Attention`; default: the current one of x's framework. None on the CPU.

    Returns:
        `out`, or the new tensor.

    Raises:
        ValueError, TypeError: a tensor is malformed, or out shares memory with x. Nothing was
            written.

    Examples:
        >>> fp.silu_and_mul(np.array([[1.0, 2.0]], np.float32)).round(3).tolist()  # silu(1) * 2
        [[1.46...]]
    """
    return _gated("silu", x, out, out_dtype, scale, stream)


@not_traced("call flashplan.torch.gelu_and_mul")
def gelu_and_mul(
    x: TensorT,
    out: TensorT | None = None,
    *,
    out_dtype: KvDType | None = None,
    scale: float = 1.0,
    stream: Stream | None = None,
) -> TensorT:
    """`silu_and_mul` with gelu(x) = x / 2 * (1 + erf(x / sqrt(2))) in place of silu.

    Examples:
        >>> fp.gelu_and_mul(np.array([[1.0, 2.0]], np.float32)).round(3).tolist()
        [[1.68...]]
    """
    return _gated("gelu", x, out, out_dtype, scale, stream)


@not_traced("call flashplan.torch.gelu_tanh_and_mul")
def gelu_tanh_and_mul(
    x: TensorT,
    out: TensorT | None = None,
    *,
    out_dtype: KvDType | None = None,
    scale: float = 1.0,
    stream: Stream | None = None,
) -> TensorT:
    """`silu_and_mul` with x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) in place of silu.

    Examples:
        >>> fp.gelu_tanh_and_mul(np.array([[1.0, 2.0]], np.float32)).round(3).tolist()
        [[1.68...]]
    """
    return _gated("gelu_tanh", x, out, out_dtype, scale, stream)


def _gated(
    name: str, x: TensorT, out: TensorT | None, out_dtype: Any, scale: float, stream: Any
) -> TensorT:
    *outer, width = shape_of(x)
    y, finish, stored = _output(out, x, out_dtype, (*outer, width // 2))
    _core.gated_activation(_core.Activation[name], x, y, stored, scale, stream)
    return finish(y)


def gather_rows(
    x: TensorT,
    indices: Tensor,
    *,
    out: TensorT | None = None,
    stream: Stream | None = None,
) -> TensorT:
    """Copies rows: out[i] = x[indices[i]], such as the embeddings of tokens.

    Args:
        x: [rows, n] of any float dtype (bfloat16 also as uint16 memory), with rows at any stride.
        indices: [count] int32 or int64. On the CPU they must be rows of x; on a GPU they are not
            checked, and rows of `out` whose index is outside of x become 0.
        out: [count, n] of x's dtype, written; memory apart from the others; default: a new tensor
            in x's framework.
        stream: as in `Attention`; default: the current one of x's framework. None on the CPU.

    Returns:
        `out`, or the new tensor.

    Raises:
        ValueError, TypeError: a tensor is malformed, or on the CPU an index is outside of x.
            Nothing was written.

    Examples:
        >>> embedding = np.arange(8, dtype=np.float32).reshape(4, 2)
        >>> fp.gather_rows(embedding, np.array([3, 0], np.int32)).tolist()
        [[6.0, 7.0], [0.0, 1.0]]
    """
    shape = (*shape_of(indices)[:1], *shape_of(x)[1:])
    y, finish = given_or_new(out, x, shape)
    _core.gather_rows(x, indices, y, stream)
    return finish(y)
