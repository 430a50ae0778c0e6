# SPDX-License-Identifier: Apache-2.0
"""Norms that narrow their results to 8 bits."""

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
import narrow_norms
from frameworks import NumPy
from narrow_norms import OUT_DTYPES
from row_cases import DTYPES, assert_close, assert_same_bits, rmsnorm, rows


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 8), (3, 4, 64), (2, 127), (2, 9001)])
def test_every_norm(rng, shape, dtype, out_dtype):
    """Scales by which results are too large for the format, and those by which they are small."""
    for scale, as_tensor in ((1.0, False), (0.004, False), (30.0, True), (0.004, True)):
        narrow_norms.check(
            rng, NumPy(), shape, dtype, out_dtype, scale, strided=as_tensor, as_tensor=as_tensor
        )


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_new_outputs(rng, framework, out_dtype):
    x, weight = rows(rng, (3, 64), "float16"), rows(rng, (64,), "float16")
    expected = np.empty((3, 64), np.uint8)
    fp.rmsnorm(x, weight, out=expected, out_dtype=out_dtype, scale=0.5)
    tensors = [framework.tensor(a) for a in (x, weight)]
    result = fp.rmsnorm(*tensors, out_dtype=out_dtype, scale=0.5)
    assert isinstance(result, framework.tensor_type)
    assert_same_bits(framework.array(result), expected.view(getattr(ml_dtypes, out_dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_wide_outputs(rng, dtype):
    """In place too."""
    x, weight = rows(rng, (3, 64), dtype), rows(rng, (64,), dtype)
    exact = rmsnorm(x, weight, 1e-6) / 0.3
    assert_close(fp.rmsnorm(x, weight, scale=0.3), exact, dtype)
    residual = np.zeros_like(x)
    fp.add_rmsnorm(x, residual, weight, scale=np.array([0.3], np.float32))
    assert_close(x, exact, dtype)


def test_sums_into_another_tensor(rng):
    x, residual, weight = (rows(rng, shape, "float32") for shape in ((3, 64), (3, 64), (64,)))
    before, total, out = x.copy(), x + residual, np.full_like(x, np.nan)
    fp.add_rmsnorm(x, residual, weight, out=out)
    assert_same_bits(x, before)
    assert_same_bits(residual, total)
    assert_close(out, rmsnorm(total, weight, 1e-6), "float32")
    fp.add_rmsnorm(x, np.zeros_like(x), weight, out=x)
    assert_close(x, rmsnorm(before, weight, 1e-6), "float32")
