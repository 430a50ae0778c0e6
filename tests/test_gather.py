# SPDX-License-Identifier: Apache-2.0
"""gather_rows against NumPy's indexing, in memory full of NaN."""

import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy
from row_cases import assert_same_bits, output, rows

# Words of 16 bytes, of one element, and rows of many words.
WIDTHS = (1, 3, 8, 127, 4096)
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


def check_gather(rng, width, dtype, strided, framework=None, index_dtype="int32"):
    framework = framework or NumPy()
    x = rows(rng, (50, width), dtype, strided)
    indices = rng.integers(0, 50, 33).astype(index_dtype)
    canary = output((33, width), dtype, strided)
    out = canary.view
    tensor = framework.tensor(out)
    result = fp.gather_rows(framework.tensor(x), framework.tensor(indices), out=tensor)
    assert result is tensor
    framework.fetch(out, tensor)
    assert_same_bits(np.ascontiguousarray(out), x[indices])
    canary.assert_only_written(33)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_gather(rng, width, dtype, strided, index_dtype):
    check_gather(rng, width, dtype, strided, index_dtype=index_dtype)


def test_many_rows(rng):
    """More rows than one thread takes."""
    x = rng.standard_normal((300, 2000)).astype(np.float32)
    indices = rng.integers(0, 300, 5000)
    assert_same_bits(fp.gather_rows(x, indices), x[indices])


def test_nothing(rng):
    x = rng.standard_normal((3, 4)).astype(np.float32)
    assert fp.gather_rows(x, np.zeros(0, np.int32)).shape == (0, 4)
    assert fp.gather_rows(x[:, :0], np.array([2, 0])).shape == (2, 0)


def test_new_tensors(rng, framework):
    x = rows(rng, (9, 64), "bfloat16")
    indices = np.array([8, 0, 8], np.int32)
    result = fp.gather_rows(framework.tensor(x), framework.tensor(indices))
    assert_same_bits(framework.array(result), x[indices])
