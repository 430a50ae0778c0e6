# SPDX-License-Identifier: Apache-2.0
"""apply_rope against float64, in memory full of NaN."""

import math

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy, bits
from inputs import normal, poisoned
from poison import Canary

DTYPES = ("float32", "float16", "bfloat16")
LLAMA3 = {"theta": 5e5, "scale": 8.0, "scaling": "llama3", "original_length": 8192}
YARN = {"theta": 1e6, "scale": 4.0, "scaling": "yarn", "original_length": 32768}
ROPES = {
    "plain": {},
    "interleaved": {"interleaved": True},
    "partial": {"rotary_dim": 32},
    "partial interleaved": {"rotary_dim": 6, "interleaved": True},
    "scaled": {"theta": 500.0, "scale": 2.5},
    "llama3": LLAMA3,
    "llama3 factors": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 9.0},
    "yarn": YARN,
    "yarn interleaved": YARN | {"interleaved": True, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn factor": YARN | {"attention_factor": 0.7},
}


def frequencies(rope, dim):
    """As transformers computes them, in float64; and the factor of cos and sin."""
    i = np.arange(0, dim, 2)
    plain = 1 / rope.theta ** (i / dim)
    if rope.scaling == "linear":
        return plain / rope.scale, 1.0
    if rope.scaling == "llama3":
        wavelength = 2 * math.pi / plain
        low = rope.original_length / rope.low_freq_factor
        high = rope.original_length / rope.high_freq_factor
        smooth = (rope.original_length / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        middle = (1 - smooth) * plain / rope.scale + smooth * plain
        scaled = np.where(wavelength > low, plain / rope.scale, plain)
        return np.where((wavelength <= low) & (wavelength >= high), middle, scaled), 1.0

    def correction(rotations):
        length = rope.original_length / (rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(rope.theta))

    low = max(math.floor(correction(rope.beta_fast)), 0)
    high = min(math.ceil(correction(rope.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    factor = rope.attention_factor or 0.1 * math.log(rope.scale) + 1
    return plain / rope.scale * ramp + plain * (1 - ramp), factor


def rotated(x, positions, rope):
    x = x.astype(np.float64)
    dim = rope.rotary_dim or x.shape[-1]
    turns, factor = frequencies(rope, dim)
    angles = positions.astype(np.float64)[:, None, None] * turns
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    first, second = np.arange(0, dim, 2), np.arange(1, dim, 2)
    if not rope.interleaved:
        first, second = np.arange(dim // 2), np.arange(dim // 2, dim)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


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
