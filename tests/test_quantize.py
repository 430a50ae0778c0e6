# SPDX-License-Identifier: Apache-2.0
"""quantize_fp8 against float64 and the conversions of ml_dtypes, in memory full of NaN."""

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy, bits
from inputs import normal, poisoned
from poison import Canary

DTYPES = ("float32", "float16", "bfloat16")
NARROW = ("float8_e4m3fn", "float8_e5m2")
# Words and single elements, one head, more rows than the threads of a CTA, odd sizes.
SHAPES = [(5, 3, 64), (1, 1, 1), (9, 2, 70), (700, 4, 128), (3, 130, 16), (2, 1, 3000)]


def largest_of(dtype):
    return float(ml_dtypes.finfo(dtype).max)


def heads(rng, shape, dtype, strided):
    """Random heads of different sizes; if `strided`, with gaps of NaN between them."""
    x = poisoned(shape, dtype, strided=True) if strided else np.empty(shape, dtype)
    x[...] = (normal(rng, shape, "float32") * rng.uniform(0.1, 30, (shape[1], 1))).astype(dtype)
    return x


def exact_scale(x, per_head, dtype):
    """In float64, over finite numbers."""
    x = np.abs(x.astype(np.float64))
    amax = np.where(np.isfinite(x), x, 0).max(axis=(0, 2) if per_head else None)
    scale = np.atleast_1d(amax / largest_of(dtype))
    return np.where(scale == 0, 1, np.maximum(scale, np.finfo(np.float32).tiny))


def stored(x, scale, dtype):
    """What ml_dtypes makes of x / scale: a float32 division, saturated and rounded to even."""
    quotient = x.astype(np.float32) / scale.reshape(-1, 1)
    limit = largest_of(dtype)
    return np.clip(quotient, -limit, limit).astype(dtype)


def check(rng, shape, dtype, narrow, per_head, strided, framework):
    x = heads(rng, shape, dtype, strided)
    out = Canary(shape, narrow, strided)
    x_tensor, out_tensor = framework.tensor(x), framework.tensor(out.view)
    x8, scale = fp.quantize_fp8(x_tensor, per_head=per_head, dtype=narrow, out=out_tensor)
    assert x8 is out_tensor
    framework.fetch(out.view, out_tensor)
    out.assert_only_written(shape[0])
    found = framework.array(scale)
    assert found.dtype == np.float32
    assert found.shape == (shape[1] if per_head else 1,)
    np.testing.assert_allclose(found, exact_scale(x, per_head, narrow), rtol=2e-7)
    assert np.array_equal(bits(out.view), bits(stored(x, found, narrow)))
    # The same scales, given.
    again, same = fp.quantize_fp8(x_tensor, scale, dtype=narrow)
    assert same is scale
    assert np.array_equal(bits(framework.array(again)), bits(out.view))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_heads(rng, shape, dtype, narrow, per_head, strided):
    check(rng, shape, dtype, narrow, per_head, strided, NumPy())


def test_every_framework(rng, framework):
    x = heads(rng, (4, 3, 32), "bfloat16", False)
    x8, scale = fp.quantize_fp8(framework.tensor(x), per_head=True)
    assert isinstance(x8, framework.tensor_type)
    assert isinstance(scale, framework.tensor_type)
    wanted, found = fp.quantize_fp8(x, per_head=True)
    assert np.array_equal(bits(framework.array(x8)), bits(wanted))
    assert np.array_equal(framework.array(scale), found)


@pytest.mark.parametrize("narrow", NARROW)
def test_special_numbers(narrow):
    check_special_numbers(narrow, NumPy())


def check_special_numbers(narrow, framework):
    """NaN stays NaN, infinity saturates, and neither decides the scale."""
    x = np.zeros((2, 3, 16), np.float32)
    x[0, 0, :5] = np.nan, np.inf, -np.inf, -2, 1
    x[1, 1, 3] = 1e-44  # its scale would be 0
    x8, scale = (framework.array(t) for t in fp.quantize_fp8(framework.tensor(x), dtype=narrow))
    limit = largest_of(narrow)
    assert scale == np.float32(2 / limit)
    values = x8.astype(np.float32)
    assert np.isnan(values[0, 0, 0])
    assert values[0, 0, 1:5].tolist() == [limit, -limit, -limit, limit / 2]
    assert not values[:, 1:].any()
    scales = framework.array(fp.quantize_fp8(framework.tensor(x), per_head=True, dtype=narrow)[1])
    assert scales[1] == np.finfo(np.float32).tiny
    assert scales[2] == 1


@pytest.mark.parametrize("per_head", [False, True])
def test_given_numbers(rng, per_head):
    x = heads(rng, (6, 2, 24), "float32", False)
    x8, scale = fp.quantize_fp8(x, 0.25, per_head=per_head)
    assert scale.tolist() == [0.25] * (2 if per_head else 1)
    assert np.array_equal(bits(x8), bits(stored(x, np.float32([0.25]), "float8_e4m3fn")))


def test_scales_of_kv_heads(rng):
    """Queries of 4 heads for 2 kv heads, as a view."""
    q = heads(rng, (5, 4, 8), "float32", False)
    x8, scale = fp.quantize_fp8(q.reshape(5, 2, 16), per_head=True)
    assert scale.shape == (2,)
    by_head = np.repeat(scale, 2).reshape(4, 1)
    assert np.array_equal(bits(x8.reshape(q.shape)), bits(stored(q, by_head, "float8_e4m3fn")))


def test_without_elements():
    for shape, per_head, wanted in (
        ((0, 2, 8), False, [1]),
        ((0, 2, 8), True, [1, 1]),
        ((3, 0, 8), False, [1]),
        ((3, 0, 8), True, []),
        ((3, 2, 0), True, [1, 1]),
    ):
        x8, scale = fp.quantize_fp8(np.zeros(shape, np.float32), per_head=per_head)
        assert x8.shape == shape
        assert scale.tolist() == wanted


def check_rotated(rng, dtype, narrow, num_qo_heads, head_dim, rotary_dim, by_table, framework):
    """apply_rope to 8 bits has the bits of apply_rope and then quantize_fp8."""
    q, k = (heads(rng, (6, n, head_dim), dtype, True) for n in (num_qo_heads, 2))
    scales = rng.uniform(0.01, 2, (2, 2)).astype(np.float32)
    positions = np.array([0, 1, 2, 700, 31, 5], np.int32)
    if by_table:
        angles = rng.uniform(0, 6, (701, rotary_dim // 2)).astype(np.float32)
        table = np.concatenate([np.cos(angles), np.sin(angles)], 1)
        rotation = {"cos_sin_cache": framework.tensor(table), "interleaved": True}
    else:
        rotation = {"rope": fp.Rope(rotary_dim=rotary_dim)}
    q_scale, k_scale = (framework.tensor(s) for s in scales)
    tensors = [framework.tensor(x) for x in (q, k, positions)]
    result = fp.apply_rope(*tensors, **rotation, out_dtype=narrow, q_scale=q_scale, k_scale=k_scale)
    wide = [framework.array(x) for x in fp.apply_rope(*tensors, **rotation)]
    by_head = [np.repeat(scales[0], num_qo_heads // 2), scales[1]]
    for x8, x, scale in zip(result, wide, by_head, strict=True):
        assert np.array_equal(framework.array(x8).view(np.uint8), bits(stored(x, scale, narrow)))


ROTATIONS = [(4, 64, 64, False), (2, 64, 32, True), (6, 40, 10, False), (8, 128, 128, True)]


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_heads(rng, dtype, narrow, rotation):
    check_rotated(rng, dtype, narrow, *rotation, NumPy())


@pytest.mark.parametrize("num_heads", [(3, 2), (1, 2)])
def test_rotated_heads_and_numbers(rng, num_heads):
    """Scales as numbers, outputs that are given; also of more heads of k than of q."""
    q, k = (heads(rng, (3, n, 16), "bfloat16", False) for n in num_heads)
    positions = np.arange(3)
    outs = [Canary(x.shape, "float8_e5m2", True) for x in (q, k)]
    fp.apply_rope(
        q,
        k,
        positions,
        fp.Rope(),
        out_q=outs[0].view,
        out_k=outs[1].view,
        q_scale=0.5,
        k_scale=np.float32([3]),
    )
    for out, x, scale in zip(outs, fp.apply_rope(q, k, positions, fp.Rope()), (0.5, 3)):
        out.assert_only_written(3)
        assert np.array_equal(
            bits(out.view), bits(fp.quantize_fp8(x, scale, dtype="float8_e5m2")[0])
        )
