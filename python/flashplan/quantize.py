# SPDX-License-Identifier: Apache-2.0
"""Converts heads to 8-bit floats."""

from typing import Any, cast

from flashplan import _core
from flashplan.compiled import not_traced
from flashplan.outputs import given_or_new, new_output, shape_of
from flashplan.types import Float8Name, FrameworkDType, Stream, Tensor, TensorT
from flashplan.values import to_bool, to_dtype


@not_traced("call flashplan.torch.quantize_fp8")
def quantize_fp8(
    x: TensorT,
    scale: float | Tensor | None = None,
    *,
    per_head: bool = False,
    dtype: Float8Name | FrameworkDType | type[Any] = "float8_e4m3fn",
    out: TensorT | None = None,
    stream: Stream | None = None,
) -> tuple[TensorT, TensorT]:
    """Converts heads to an 8-bit float dtype: x / scale, rounded to nearest even.

    Numbers that are too large become the largest one of the dtype; NaN stays NaN.

    Args:
        x: [tokens, heads, head_dim] float32, float16 or bfloat16 (also as uint16 memory), at any
            strides. For scales of kv heads, give the queries as [tokens, num_kv_heads, group_size *
            head_dim], a view of contiguous ones.
        scale: a number, or a float32 tensor [1] or [heads] on x's device; normal numbers > 0.
            Default: the largest finite magnitude in x divided by the largest number of the dtype,
            or 1 where that is 0.
        per_head: without a tensor: one scale for each head, instead of one for all.
        dtype: float8_e4m3fn or float8_e5m2.
        out: shaped like x, of dtype (also as uint8 memory), written; default: a new tensor in x's
            framework.
        stream: as in `Attention`; default: the current one of x's framework. None on the CPU.

    Returns:
        (x8, scale): `out`, or the new tensor; and the scales, float32 [1] or [heads] on x's device.
        scale * x8 is about x.

    Raises:
        ValueError, TypeError: an argument is malformed. Nothing was written.
        UnsupportedError: dtype is no 8-bit float.

    Examples:
        >>> x = np.array([[[1.0, -2.0, 3.5]]], np.float32)
        >>> x8, scale = fp.quantize_fp8(x)
        >>> (x8.astype(np.float32) * scale).tolist()
        [[[1.0, -2.0, 3.5]]]
    """
    stored = narrow_dtype(dtype)
    is_per_head = to_bool("per_head", per_head)
    x8, finish = given_or_new(out, x, dtype=stored.name)
    if hasattr(scale, "__dlpack__"):
        _core.quantize_fp8(x, x8, stored, scale, None, stream)
        return finish(x8), cast("TensorT", scale)
    heads = (*shape_of(x), 1)[1] if is_per_head else 1
    found, finish_scale = new_output(x, (heads,), "float32")
    _core.quantize_fp8(x, x8, stored, scale, found, stream)
    return finish(x8), finish_scale(found)


def narrow_dtype(dtype: Any) -> _core.DType:
    """The core's dtype for an 8-bit float. Raises UnsupportedError for other dtypes."""
    names = ("float8_e4m3fn", "float8_e5m2")
    return to_dtype("dtype", dtype, {name: _core.DType[name] for name in names})
