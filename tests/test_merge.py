# SPDX-License-Identifier: Apache-2.0
"""merge_states against the reference."""

import numpy as np
import pytest

import flashplan as fp
import poison
import reference
from frameworks import NumPy, bits
from reference import EPS, EPS_FLOAT32

DTYPES = ["float32", "float16", "bfloat16"]


def states(count, dtype="float32", shape=(7, 3, 33), seed=0):
    """Stacked (o [count, ...], lse [count, ...]); some rows have no keys in some states."""
    rng = np.random.default_rng(seed)
    o = rng.standard_normal((count, *shape), np.float32).astype(dtype)
    lse = 5 * rng.standard_normal((count, *shape[:-1]), np.float32)
    empty = rng.random(lse.shape) < 0.2
    o[empty], lse[empty] = 0, -np.inf
    o[:, 0], lse[:, 0] = 0, -np.inf  # a row without keys in any state
    return o, lse


def assert_merged(o, lse, actual_o, actual_lse):
    exact_o, exact_lse = reference.merge_states(o, lse)
    assert actual_o.dtype == o.dtype
    assert actual_lse.dtype == np.float32
    error = np.abs(actual_o.astype(np.float64) - exact_o)
    assert (error <= EPS[str(o.dtype)] * np.abs(exact_o) + 16 * EPS_FLOAT32).all()
    assert np.array_equal(np.isneginf(actual_lse), np.isneginf(exact_lse))
    finite = np.isfinite(exact_lse)
    assert np.allclose(actual_lse[finite], exact_lse[finite], rtol=4e-7, atol=2e-6)
    assert not actual_o[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_stacked(dtype, count):
    o, lse = states(count, dtype)
    assert_merged(o, lse, *fp.merge_states(o, lse))


@pytest.mark.parametrize("count", [1, 2, 17])
def test_base_2(count):
    """Every lse is one to base 2, that of the result too."""
    o, lse = states(count)
    merged_o, merged_lse = fp.merge_states(o, lse / np.float32(np.log(2)), base2=True)
    assert_merged(o, lse, merged_o, merged_lse * np.float32(np.log(2)))
    if count == 2:
        pair = fp.merge_states(
            o[0], lse[0] / np.float32(np.log(2)), o[1], lse[1] / np.float32(np.log(2)), base2=True
        )
        assert np.array_equal(bits(pair[0]), bits(merged_o))
        assert np.array_equal(bits(pair[1]), bits(merged_lse))


def test_base_2_of_attention():
    """What Attention(lse_base2=True) writes is what merge_states(base2=True) takes."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((n, 2, 16)).astype(np.float32) for n in (3, 40, 40))
    options = {"page_size": None, "q_dtype": "float32", "causal": False, "device": "cpu"}
    attn = fp.Attention(2, 2, 16, **options, lse_base2=True)

    def state(begin, end):
        attn.plan([0, 3], [end - begin])
        return attn.run(q, k[begin:end], v[begin:end], return_lse=True)

    merged = fp.merge_states(*state(0, 25), *state(25, 40), base2=True)
    for actual, wanted in zip(merged, state(0, 40)):
        np.testing.assert_allclose(actual, wanted, atol=1e-5)
    attn = fp.Attention(2, 2, 16, **options)
    np.testing.assert_allclose(state(0, 40)[1] / np.log(2), merged[1], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 8, 64, 130])
def test_two(dtype, dim, framework):
    """In every framework the same bits as in NumPy, whose result is right."""
    o, lse = states(2, dtype, (7, 3, dim))
    expected = fp.merge_states(o[0], lse[0], o[1], lse[1])
    assert_merged(o, lse, *expected)
    results = fp.merge_states(*(framework.tensor(x) for x in (o[0], lse[0], o[1], lse[1])))
    for actual, wanted in zip(results, expected, strict=True):
        assert isinstance(actual, framework.tensor_type)
        assert np.array_equal(bits(framework.array(actual)), bits(wanted))


def test_left_to_right():
    """A stack is what merging one after the other gives, while float32 is kept."""
    o, lse = states(2)
    stacked = fp.merge_states(o, lse)
    pairwise = fp.merge_states(o[0], lse[0], o[1], lse[1])
    for x, y in zip(stacked, pairwise, strict=True):
        assert np.array_equal(bits(x), bits(y))


def test_associative_within_rounding():
    o, lse = states(3)
    left = fp.merge_states(*fp.merge_states(o[0], lse[0], o[1], lse[1]), o[2], lse[2])
    right = fp.merge_states(o[0], lse[0], *fp.merge_states(o[1], lse[1], o[2], lse[2]))
    assert_merged(o, lse, *left)
    assert_merged(o, lse, *right)


def test_empty_state_is_neutral():
    o, lse = states(1)
    nothing = np.zeros_like(o[0]), np.full_like(lse[0], -np.inf)
    for merged in (
        fp.merge_states(o[0], lse[0], *nothing),
        fp.merge_states(*nothing, o[0], lse[0]),
    ):
        np.testing.assert_allclose(merged[0], o[0], rtol=1e-6)
        np.testing.assert_allclose(merged[1], lse[0], rtol=1e-6)


def test_empty_state_may_hold_anything():
    """o of a state without keys is never multiplied by zero."""
    o, lse = states(2)
    poisoned = o.copy()
    poisoned[np.isneginf(lse)] = np.nan
    expected = fp.merge_states(o, lse)
    for actual, wanted in zip(fp.merge_states(poisoned, lse), expected, strict=True):
        assert np.array_equal(bits(actual), bits(wanted))


def test_large_lse():
    o, lse = states(2)
    merged_o, merged_lse = fp.merge_states(o, lse + np.float32(3e4))
    assert np.isfinite(merged_o).all()
    exact_o, exact_lse = reference.merge_states(o, lse + np.float32(3e4))
    np.testing.assert_allclose(merged_o, exact_o, atol=1e-5)
    np.testing.assert_allclose(merged_lse, exact_lse, rtol=4e-7)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_into_out(dtype, strided):
    o, lse = states(3, dtype)
    out = poison.Canary(o.shape[1:], dtype, strided)
    out_lse = poison.Canary(lse.shape[1:], np.float32, strided)
    result = fp.merge_states(o, lse, out=out.view, lse=out_lse.view)
    assert result[0] is out.view
    assert result[1] is out_lse.view
    out.assert_only_written(len(out.view))
    out_lse.assert_only_written(len(out_lse.view))
    assert_merged(o, lse, out.view, out_lse.view)


def test_in_place():
    """Accumulating into one of the inputs, as a loop over parts does."""
    o, lse = states(4)
    expected = fp.merge_states(o, lse)
    total_o, total_lse = o[0].copy(), lse[0].copy()
    for i in range(1, 4):
        fp.merge_states(total_o, total_lse, o[i], lse[i], out=total_o, lse=total_lse)
    np.testing.assert_allclose(total_o, expected[0], atol=1e-6)
    np.testing.assert_allclose(total_lse, expected[1], atol=1e-5)
    assert isinstance(total_o, NumPy.tensor_type)


def test_no_tokens():
    o, lse = np.zeros((2, 0, 4, 8), np.float32), np.zeros((2, 0, 4), np.float32)
    merged_o, merged_lse = fp.merge_states(o, lse)
    assert merged_o.shape == (0, 4, 8)
    assert merged_lse.shape == (0, 4)


@pytest.mark.parametrize("stacked", [True, False])
def test_messages_name_pythons_arguments_everywhere(stacked):
    """Also where they are not the first word."""
    memory, lse = np.zeros((8, 4, 8), np.float32), np.zeros((2, 4, 4), np.float32)
    states = memory.reshape(2, 4, 4, 8)
    arguments = (states, lse) if stacked else (states[0], lse[0], states[1], lse[1])
    name = r"o_a\[0\]" if stacked else "o_a"
    with pytest.raises(ValueError, match=f"^out: expected memory apart from {name}, got"):
        fp.merge_states(*arguments, out=memory[2:6])
