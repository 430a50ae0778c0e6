# SPDX-License-Identifier: Apache-2.0
"""What norms write in formats of 8 bits, against float64, on any device."""

import ml_dtypes
import numpy as np

import flashplan as fp
import row_cases
from row_cases import assert_same_bits, rows

OUT_DTYPES = ("float8_e4m3fn", "float8_e5m2")


def assert_close(actual, exact, scale):
    """Half a unit in the last place of the format, whose largest number stands for larger ones, and
    float32's errors before the division by the scale."""
    info = ml_dtypes.finfo(actual.dtype)
    exact = np.clip(exact, float(info.min), float(info.max))
    smallest = float(info.smallest_subnormal)
    allowed = (0.51 * float(info.eps) + 1e-5) * np.abs(exact) + 0.51 * smallest + 1e-5 / scale
    assert (np.abs(actual.astype(np.float64) - exact) <= allowed).all()


def check(rng, framework, shape, dtype, out_dtype, scale, strided=False, as_tensor=False):
    """All three norms of the same rows. The scale is a number, or a tensor on the device."""
    x, residual = rows(rng, shape, dtype, strided), rows(rng, shape, dtype)
    weight, bias = (rows(rng, shape[-1:], dtype) for _ in range(2))
    tensors = [framework.tensor(a) for a in (x, weight, bias)]
    given = framework.tensor(np.array([scale], np.float32)) if as_tensor else scale
    out = np.full(shape, 0xFF, np.uint8)  # NaN in both formats

    def written(norm, *args, **options):
        to = framework.tensor(out)
        norm(*args, out=to, out_dtype=out_dtype, scale=given, **options)
        return framework.array(to).view(getattr(ml_dtypes, out_dtype))

    exact = row_cases.rmsnorm(x, weight, 1e-6, gemma=True) / scale
    assert_close(written(fp.rmsnorm, *tensors[:2], gemma=True), exact, scale)
    exact = row_cases.layernorm(x, weight, bias, 1e-5) / scale
    assert_close(written(fp.layernorm, *tensors), exact, scale)

    total = (x.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
    sums = framework.tensor(residual)
    result = written(fp.add_rmsnorm, tensors[0], sums, tensors[1])
    assert_close(result, row_cases.rmsnorm(total, weight, 1e-6) / scale, scale)
    assert_same_bits(framework.array(sums), total)
    assert_same_bits(framework.array(tensors[0]), x)
