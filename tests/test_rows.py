# SPDX-License-Identifier: Apache-2.0
"""Norms and activations against float64, in memory full of NaN."""

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
import row_cases
from frameworks import NumPy
from row_cases import DTYPES, SHAPES, assert_close, assert_same_bits, output, rows, view

GATED = {"silu": fp.silu_and_mul, "gelu": fp.gelu_and_mul, "gelu_tanh": fp.gelu_tanh_and_mul}


def check(fn, exact, x, others, shape, dtype, strided, framework=None, **options):
    """Calls an operator with `out`, and checks the result and all memory round it."""
    framework = framework or NumPy()
    canary = output(shape, dtype, strided)
    out = view(canary, shape)
    tensor = framework.tensor(out)
    others = [None if other is None else framework.tensor(other) for other in others]
    result = fn(framework.tensor(x), *others, out=tensor, **options)
    assert result is tensor
    framework.fetch(out, tensor)
    assert_close(out, exact, dtype)
    canary.assert_only_written(canary.view.shape[0])


def vector(rng, shape, dtype):
    """A weight or bias for rows of a shape; None for the dtype None."""
    return None if dtype is None else rows(rng, shape[-1:], dtype)


def check_rmsnorm(rng, shape, dtype, strided, framework=None, weight_dtype="x's", **options):
    x = rows(rng, shape, dtype, strided)
    weight = vector(rng, shape, dtype if weight_dtype == "x's" else weight_dtype)
    exact = row_cases.rmsnorm(x, weight, options.get("eps", 1e-6), options.get("gemma", False))
    check(fp.rmsnorm, exact, x, [weight], shape, dtype, strided, framework, **options)


def check_add_rmsnorm(rng, shape, dtype, framework=None, weight_dtype="x's"):
    framework = framework or NumPy()
    x, residual = (rows(rng, shape, dtype, strided=True) for _ in range(2))
    weight = vector(rng, shape, dtype if weight_dtype == "x's" else weight_dtype)
    total = (x.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
    tensors = [framework.tensor(a) for a in (x, residual)]
    weight_tensor = None if weight is None else framework.tensor(weight)
    assert fp.add_rmsnorm(*tensors, weight_tensor, 1e-5) is None
    for array, tensor in zip((x, residual), tensors, strict=False):
        framework.fetch(array, tensor)
    assert_same_bits(residual, total)
    assert_close(x, row_cases.rmsnorm(total, weight, 1e-5), dtype)


def check_layernorm(rng, shape, dtype, strided, framework=None, with_bias=True, weight_dtype="x's"):
    x = rows(rng, shape, dtype, strided) + np.asarray(3, dtype)
    weight = vector(rng, shape, dtype if weight_dtype == "x's" else weight_dtype)
    bias_dtype = dtype if weight is None else weight.dtype
    bias = vector(rng, shape, bias_dtype if with_bias else None)
    exact = row_cases.layernorm(x, weight, bias, 1e-5)
    check(fp.layernorm, exact, x, [weight, bias], shape, dtype, strided, framework)


def check_other_weights(rng, shape, dtype, framework=None, strided=False):
    """Weights of float32, and none."""
    for weight_dtype in ("float32", None):
        check_rmsnorm(rng, shape, dtype, strided, framework, weight_dtype)
        check_rmsnorm(rng, shape, dtype, strided, framework, weight_dtype, gemma=True)
        for with_bias in (False, True):
            check_layernorm(rng, shape, dtype, strided, framework, with_bias, weight_dtype)
        if len(shape) > 1:
            check_add_rmsnorm(rng, shape, dtype, framework, weight_dtype)


def check_gated(rng, name, shape, dtype, strided, framework=None):
    x = rows(rng, (*shape[:-1], 2 * shape[-1]), dtype, strided) * np.asarray(4, dtype)
    exact = row_cases.gated(name, x)
    check(GATED[name], exact, x, [], shape, dtype, strided, framework)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(rng, shape, dtype, strided):
    check_rmsnorm(rng, shape, dtype, strided)
    check_layernorm(rng, shape, dtype, strided)
    if len(shape) > 1:
        check_add_rmsnorm(rng, shape, dtype)
    for name in GATED if shape[-1] < 10_000 else ():
        check_gated(rng, name, shape, dtype, strided)


@pytest.mark.parametrize("dtype", DTYPES)
def test_options(rng, dtype):
    check_rmsnorm(rng, (4, 48), dtype, False, gemma=True, eps=0.5)
    check_rmsnorm(rng, (2, 9001), dtype, False, gemma=True)
    check_layernorm(rng, (4, 48), dtype, False, with_bias=False)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_other_weights(rng, shape, dtype, strided):
    check_other_weights(rng, shape, dtype, strided=strided)


def test_weights_of_every_framework(rng, framework):
    """A weight of float32 is not rounded to the dtype of x."""
    x = rows(rng, (3, 64), "bfloat16")
    weight = rows(rng, (64,), "float32")
    exact = row_cases.rmsnorm(x, weight, 1e-6)
    rounded = row_cases.rmsnorm(x, weight.astype("bfloat16"), 1e-6)
    result = fp.rmsnorm(framework.tensor(x), framework.tensor(weight))
    assert_close(framework.array(result), exact, "bfloat16")
    with pytest.raises(AssertionError):
        assert_close(framework.array(result), rounded, "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(rng, dtype):
    x, weight = rows(rng, (5, 300), dtype), rows(rng, (300,), dtype)
    expected = [fp.rmsnorm(x, weight), fp.layernorm(x, weight, weight)]
    for fn, others, wanted in zip((fp.rmsnorm, fp.layernorm), (1, 2), expected, strict=True):
        y = x.copy()
        assert fn(y, *[weight] * others, out=y) is y
        assert_same_bits(y, wanted)


def test_new_outputs_are_of_the_caller_s_framework(rng, framework):
    x, weight = rows(rng, (3, 2, 64), "bfloat16"), rows(rng, (64,), "bfloat16")
    tensors = [framework.tensor(a) for a in (x, weight)]
    pairs = [
        (fp.rmsnorm(*tensors), fp.rmsnorm(x, weight)),
        (fp.layernorm(*tensors), fp.layernorm(x, weight)),
        (fp.silu_and_mul(tensors[0]), fp.silu_and_mul(x)),
    ]
    for actual, expected in pairs:
        assert isinstance(actual, framework.tensor_type)
        assert_same_bits(framework.array(actual), expected)


@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATED)
def test_narrow_outputs(rng, name, dtype, out_dtype):
    x = rows(rng, (9, 2 * 300), dtype)
    scale = 0.03
    wide = GATED[name](x.astype(np.float32), scale=scale)
    limit = float(ml_dtypes.finfo(out_dtype).max)
    expected = np.clip(wide, -limit, limit).astype(out_dtype)
    assert_same_bits(GATED[name](x, out_dtype=out_dtype, scale=scale), expected)
    out = np.empty(expected.shape, np.uint8)
    GATED[name](x, out, out_dtype=out_dtype, scale=scale)
    assert_same_bits(out, expected)


def check_every_size(name, framework=None):
    """Small results have small errors, and nothing overflows on the way."""
    framework = framework or NumPy()
    large = [size * sign for size in (87, 100, 200, 1e4, 1e20, 3e38) for sign in (-1, 1)]
    gate = np.concatenate([np.linspace(-12, 12, 4001), large]).astype(np.float32)
    for factor in (1, 1e20):
        up = np.where(gate < 100, factor, 1).astype(np.float32)
        x = np.concatenate([gate, up])
        exact = row_cases.gated(name, x)
        error = np.abs(framework.array(GATED[name](framework.tensor(x))) - exact)
        assert (error <= 3e-5 * np.abs(exact) + 1e-30 * factor).all()
    undefined = np.array([np.nan, -np.inf, 1, 1], np.float32)
    assert np.isnan(framework.array(GATED[name](framework.tensor(undefined)))).all()


@pytest.mark.parametrize("name", GATED)
def test_activations_of_every_size(name):
    check_every_size(name)


def test_nothing_to_do():
    for shape in [(0, 8), (3, 0), (0,)]:
        x, weight = np.zeros(shape, np.float32), np.zeros(shape[-1:], np.float32)
        assert fp.rmsnorm(x, weight).shape == shape
        assert fp.layernorm(x, weight, weight).shape == shape
        assert fp.silu_and_mul(x).shape == (*shape[:-1], shape[-1] // 2)
        fp.add_rmsnorm(x, x.copy(), weight)


def test_results_do_not_depend_on_threads(rng):
    x, weight = rows(rng, (500, 2048), "float32"), rows(rng, (2048,), "float32")
    before = fp.get_num_threads()
    results = []
    for threads in (1, 3):
        fp.set_num_threads(threads)
        results.append((fp.rmsnorm(x, weight), fp.gelu_and_mul(x)))
    fp.set_num_threads(before)
    for one, many in zip(*results, strict=True):
        assert_same_bits(one, many)
