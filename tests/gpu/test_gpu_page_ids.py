# SPDX-License-Identifier: Apache-2.0
"""A page_indptr on a GPU that leads out of page_indices. gpu_cases.py has page ids that are none of
the cache."""

import dataclasses

import numpy as np
import pytest

from case import Case
from frameworks import TorchCuda
from gpu_cases import is_supported
from inputs import INT_MAX, INT_MIN
from solve import CudaRunner, problem

pytestmark = pytest.mark.gpu

CASES = [
    Case(qo, (900, 300, 700), num_qo_heads=8, csr=True, **options)
    for qo in ((1, 1, 1), (3, 1, 200), (700, 130, 700))
    for options in (
        {"head_dim": 64, "num_kv_heads": 8},
        {"head_dim": 128, "num_ctas": 7},
        {"head_dim": 128, "page_size": 1},
        {"head_dim": 128, "page_size": 64, "window_left": 200},
        {"head_dim": 128, "kv_dtype": "float8_e4m3fn", "page_size": 5},
        {"head_dim": 256, "page_size": 16},
        {"head_dim": 128, "rope": "plain"},
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_requests_without_page_ids_see_no_keys(case, torch, seed):
    if not is_supported(case):
        pytest.skip("no kernel")
    inputs, _, _ = problem(case, seed)
    runner, framework = CudaRunner(case, torch), TorchCuda(torch)

    def run(**tables):
        return [x.copy() for x in runner.run(dataclasses.replace(inputs, **tables), framework)]

    o, lse = run()
    first, second, third = (
        slice(*bounds) for bounds in zip(inputs.qo_indptr, inputs.qo_indptr[1:])
    )
    num_ids = len(inputs.page_indices)
    for wrong in (INT_MIN, -1, num_ids, num_ids + 1, INT_MAX):
        page_indptr = inputs.page_indptr.copy()
        page_indptr[2] = wrong  # the end of request 1, and the begin of request 2
        other_o, other_lse = run(page_indptr=page_indptr)
        if wrong < 0:
            assert (other_o[second] == 0).all() and np.isneginf(other_lse[second]).all()
        else:
            np.testing.assert_array_equal(other_o[second], o[second])
        assert (other_o[third] == 0).all() and np.isneginf(other_lse[third]).all()
        np.testing.assert_array_equal(other_o[first], o[first])
        np.testing.assert_array_equal(other_lse[first], lse[first])

    # Request 2 has some page ids less than its keys need.
    page_indptr, page_indices = inputs.page_indptr.copy(), inputs.page_indices.copy()
    page_indptr[3] -= 3 * max(1, 20 // case.page_size)
    page_indices[page_indptr[3] :] = -1
    shorter, missing = run(page_indptr=page_indptr), run(page_indices=page_indices)
    for x, y in zip(shorter, missing, strict=True):
        np.testing.assert_allclose(
            x[third].astype(np.float32), y[third].astype(np.float32), atol=2e-2, rtol=2e-2
        )
    np.testing.assert_array_equal(shorter[0][first], o[first])
