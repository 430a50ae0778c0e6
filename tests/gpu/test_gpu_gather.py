# SPDX-License-Identifier: Apache-2.0
"""The tests of gather_rows, on the GPU."""

import numpy as np
import pytest

import flashplan as fp
import test_gather

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [*test_gather.WIDTHS, 40000])
def test_gather_of(cuda, rng, width, dtype, strided, index_dtype):
    test_gather.check_gather(rng, width, dtype, strided, cuda, index_dtype)


def test_rows_that_are_not_there(cuda, rng):
    x = rng.standard_normal((5, 24)).astype(np.float32)
    indices = np.array([4, -1, 5, 0, -(2**31)], np.int32)
    result = cuda.array(fp.gather_rows(cuda.tensor(x), cuda.tensor(indices)))
    assert np.array_equal(result, np.stack([x[4], 0 * x[0], 0 * x[0], x[0], 0 * x[0]]))
