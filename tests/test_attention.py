# SPDX-License-Identifier: Apache-2.0
"""Every case in every framework against the reference."""

import functools

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
import frameworks
from case import Case
from cases import CASES
from frameworks import NumPy, bits
from inputs import make_inputs
from solve import Runner, assert_correct, problem, run_arguments


@functools.lru_cache(maxsize=1)
def numpy_result(case, seed):
    inputs, _, _ = problem(case, seed)
    return Runner(case).run(inputs, NumPy())


@pytest.mark.parametrize("framework", frameworks.NAMES, indirect=True)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case, framework, seed):
    """Right within the error budget, and the same bits whatever the framework, into poisoned
    outputs and into outputs that run() allocates."""
    inputs, exact, twin = problem(case, seed)
    runner = Runner(case)
    into = runner.run(inputs, framework)
    assert_correct(case, inputs, exact, twin, *into)
    returned = runner.run_returning(inputs, framework)
    expected = numpy_result(case, seed)
    for result in (into, returned):
        for actual, wanted in zip(result, expected, strict=True):
            assert actual.shape == wanted.shape
            assert np.array_equal(bits(actual), bits(wanted))


def test_addresses_beyond_32_bits():
    """The last pages of a cache of 3 Gi elements, of which only they are ever touched."""
    num_pages, page_shape = 3 << 20, (16, 1, 64)
    cache = np.zeros((num_pages, *page_shape), ml_dtypes.float8_e4m3fn)
    rng = np.random.default_rng(0)
    small = rng.standard_normal((2, *page_shape), np.float32).astype(cache.dtype)
    cache[-2:] = small
    q = rng.standard_normal((1, 4, 64), np.float32)
    attn = fp.Attention(
        4, 1, 64, q_dtype="float32", kv_dtype="float8_e4m3fn", page_size=16, device="cpu"
    )
    attn.plan([0, 1], [32])
    far = np.array([[num_pages - 2, num_pages - 1]], np.int32)
    near = np.array([[0, 1]], np.int32)
    expected = attn.run(q, small, small, block_table=near)
    assert np.array_equal(attn.run(q, cache, cache, block_table=far), expected)


def test_pdl_changes_nothing_on_the_cpu():
    attn = fp.Attention(4, 2, 16, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 2], [9])
    q, k, v = (np.random.default_rng().standard_normal((9, n, 16), "f") for n in (4, 2, 2))
    o = attn.run(q[:2], k, v)
    for true in (True, np.True_):
        assert np.array_equal(attn.run(q[:2], k, v, pdl=true), o)
        assert np.array_equal(attn.bind(q[:2], k, v, pdl=true)(), o)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_in_tensors_are_those_in_numbers(name):
    torch = pytest.importorskip("torch")
    case = Case((3, 1), (9, 6), head_dim=8, page_size=None, q_dtype="float32")
    inputs = make_inputs(case, seed=0)
    attn = fp.Attention(**case.options())
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(case, inputs, NumPy())
    expected = attn.run(*args, **kwargs | {name: 0.7})
    one, two = np.full(1, 0.7, np.float32), np.full(2, 0.7, np.float32)
    for scale in (one[0], np.float64(0.7), np.array(0.7), torch.tensor(0.7), one, two):
        assert np.array_equal(attn.run(*args, **kwargs | {name: scale}), expected)
    assert not np.array_equal(attn.run(*args, **kwargs), expected)


@pytest.mark.parametrize("gives_out", [False, True])
@pytest.mark.parametrize("gives_lse", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_outputs_that_are_given_are_those_returned(gives_out, gives_lse, return_lse):
    case = Case((3, 1), (9, 6), head_dim=8, page_size=None, q_dtype="float32")
    inputs = make_inputs(case, seed=0)
    attn = fp.Attention(**case.options())
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(case, inputs, NumPy())
    expected, expected_lse = attn.run(*args, **kwargs, return_lse=True)
    out, lse = np.full((4, 4, 8), np.nan, np.float32), np.full((4, 4), np.nan, np.float32)
    given = ({"out": out} if gives_out else {}) | ({"lse": lse} if gives_lse else {})
    result = attn.run(*args, **kwargs, **given, return_lse=return_lse)
    o, result_lse = result if return_lse else (result, None)
    assert (o is out) == gives_out
    assert np.array_equal(o, expected)
    assert (result_lse is lse) == (gives_lse and return_lse)
    if gives_lse or return_lse:
        assert np.array_equal(lse if gives_lse else result_lse, expected_lse)


@pytest.mark.parametrize("num_ctas", [1, 7])
def test_lse_may_have_gaps(num_ctas):
    """Between tokens, also where a request is split and merged."""
    case = Case((2,), (900,), head_dim=8, page_size=None, q_dtype="float32", num_ctas=num_ctas)
    inputs = make_inputs(case, seed=0)
    attn = fp.Attention(**case.options())
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(case, inputs, NumPy())
    expected = attn.run(*args, **kwargs, return_lse=True)[1]
    memory = np.full((4, 6), np.nan, np.float32)
    attn.run(*args, **kwargs, lse=memory[::2, 1:5])
    assert np.array_equal(memory[::2, 1:5], expected)
    assert np.isnan(memory).sum() == memory.size - expected.size
