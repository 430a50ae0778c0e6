# SPDX-License-Identifier: Apache-2.0
"""The tests of norms that narrow their results, on the GPU."""

import pytest

import narrow_norms
from narrow_norms import OUT_DTYPES
from row_cases import DTYPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 8), (3, 4, 64), (2, 127), (1030, 96), (3, 40000)])
def test_every_norm(cuda, rng, shape, dtype, out_dtype):
    for scale, as_tensor in ((1.0, False), (0.004, True)):
        narrow_norms.check(rng, cuda, shape, dtype, out_dtype, scale, as_tensor=as_tensor)
