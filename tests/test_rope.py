# SPDX-License-Identifier: Apache-2.0
"""apply_rope against float64, in memory full of NaN."""

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy, bits
from inputs import normal, poisoned
from poison import Canary
from rope_cases import ROPES, rotated

DTYPES = ("float32", "float16", "bfloat16")


def tokens(rng, shape, dtype, strided):
    x = poisoned(shape, dtype, strided)
    x[...] = normal(rng, shape, dtype)
    return x


def assert_close(actual, exact, dtype):
    error = np.abs(actual.astype(np.float64) - exact)
    allowed = 0.51 * float(ml_dtypes.finfo(dtype).eps) * np.abs(exact) + 4e-6
    assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times the tolerance"


def check_rope(
    rng, rope, framework=None, dtype="float32", heads=(5, 2), dim=64, strided=False, count=19
):
    framework = framework or NumPy()
    q, k = (tokens(rng, (count, n, dim), dtype, strided) for n in heads)
    integer = np.int64 if strided else np.int32
    positions = rng.integers(0, 200_000, count).astype(integer)
    canaries = [Canary(x.shape, dtype, strided) for x in (q, k)]
    outs = [framework.tensor(canary.view) for canary in canaries]
    arguments = [framework.tensor(x) for x in (q, k, positions)]
    result = fp.apply_rope(*arguments, rope, out_q=outs[0], out_k=outs[1])
    assert result[0] is outs[0]
    assert result[1] is outs[1]
    for x, canary, out in zip((q, k), canaries, outs, strict=True):
        framework.fetch(canary.view, out)
        assert_close(canary.view, rotated(x, positions, rope), dtype)
        canary.assert_only_written(count)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROPES)
def test_rope(rng, name, dtype, strided):
    check_rope(rng, fp.Rope(**ROPES[name]), dtype=dtype, strided=strided)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [2, 6, 80, 576])
def test_head_dims(rng, dim, interleaved):
    rope = fp.Rope(interleaved=interleaved, rotary_dim=min(dim, 512))
    check_rope(rng, rope, dim=dim, heads=(3, 1))
    check_rope(rng, rope, dim=dim, heads=(3, 1), dtype="bfloat16")


def test_positions_of_any_size(rng):
    """Also where float32 can not count positions any more; negative ones turn back."""
    q, k = (normal(rng, (4, 2, 64), "float32") for _ in range(2))
    positions = np.array([2**31 - 1, 2**24 + 1, -5, 0], np.int64)
    rope = fp.Rope()
    for x, y in zip((q, k), fp.apply_rope(q, k, positions, rope), strict=True):
        assert_close(y, rotated(x, positions, rope), "float32")


@pytest.mark.parametrize("name", ["plain", "interleaved", "partial"])
def test_in_place(rng, name):
    q, k = (normal(rng, (7, n, 64), "float16") for n in (4, 2))
    positions, rope = np.arange(7, dtype=np.int32), fp.Rope(**ROPES[name])
    wanted = fp.apply_rope(q, k, positions, rope)
    fp.apply_rope(q, k, positions, rope, out_q=q, out_k=k)
    for actual, expected in zip((q, k), wanted, strict=True):
        assert np.array_equal(bits(actual), bits(expected))


def test_frameworks_give_the_same_bits(rng, framework):
    q, k = (normal(rng, (7, n, 64), "bfloat16") for n in (4, 2))
    positions, rope = np.arange(7, dtype=np.int32), fp.Rope()
    wanted = fp.apply_rope(q, k, positions, rope)
    results = fp.apply_rope(*(framework.tensor(x) for x in (q, k, positions)), rope)
    for actual, expected in zip(results, wanted, strict=True):
        assert isinstance(actual, framework.tensor_type)
        assert np.array_equal(bits(framework.array(actual)), bits(expected))


def test_no_tokens():
    empty = np.zeros((0, 2, 8), np.float32)
    q, k = fp.apply_rope(empty, empty, np.zeros(0, np.int32), fp.Rope())
    assert q.shape == k.shape == (0, 2, 8)
