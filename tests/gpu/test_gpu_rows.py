# SPDX-License-Identifier: Apache-2.0
"""The tests of norms and activations, on the GPU."""

import numpy as np
import pytest

import flashplan as fp
import test_rows
from row_cases import DTYPES, SHAPES, assert_same_bits, rows
from test_rows import GATED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (3000, 40), (3000, 2048), (1, 16384)])
def test_rows_of(cuda, rng, shape, dtype, strided):
    test_rows.check_rmsnorm(rng, shape, dtype, strided, cuda)
    test_rows.check_layernorm(rng, shape, dtype, strided, cuda)
    if len(shape) > 1:
        test_rows.check_add_rmsnorm(rng, shape, dtype, cuda)
    for name in GATED if shape[-1] < 2000 else ("silu",):
        test_rows.check_gated(rng, name, shape, dtype, strided, cuda)


@pytest.mark.parametrize("name", GATED)
def test_activations_of_every_size(cuda, name):
    test_rows.check_every_size(name, cuda)


@pytest.mark.parametrize("dtype", DTYPES)
def test_options(cuda, rng, dtype):
    test_rows.check_rmsnorm(rng, (4, 48), dtype, False, cuda, gemma=True, eps=0.5)
    test_rows.check_layernorm(rng, (4, 48), dtype, False, cuda, with_bias=False)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (3000, 40), (3000, 2048), (1, 16384), (3, 40000)])
def test_other_weights(cuda, rng, shape, dtype, strided):
    """Rows of one word up to those too long for registers, which read weights again."""
    test_rows.check_other_weights(rng, shape, dtype, cuda, strided)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_misaligned_weights(cuda, torch, rng, dtype):
    """Weights of float32 that begin between two words are read element by element."""
    x, weight = rows(rng, (5, 64), dtype), rows(rng, (64,), "float32")
    memory = torch.full((68,), float("nan"), device="cuda:0")
    aligned = cuda.tensor(weight)
    expected = cuda.array(fp.rmsnorm(cuda.tensor(x), aligned))
    for offset in (1, 2, 3):
        memory[offset : offset + 64] = aligned
        actual = cuda.array(fp.rmsnorm(cuda.tensor(x), memory[offset : offset + 64]))
        np.testing.assert_allclose(
            actual.astype(np.float32), expected.astype(np.float32), rtol=1e-2, atol=1e-5
        )


@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [300, 512])
def test_narrow_outputs(cuda, rng, dtype, out_dtype, size):
    """Equal to the CPU's, but for values that a last bit of float32 moves over a midpoint."""
    x = rows(rng, (9, 2 * size), dtype)
    actual = cuda.array(fp.silu_and_mul(cuda.tensor(x), out_dtype=out_dtype, scale=0.03))
    expected = fp.silu_and_mul(x, out_dtype=out_dtype, scale=0.03)
    assert (actual.view(np.uint8) != expected.view(np.uint8)).mean() < 0.001


def test_in_place_and_in_a_graph(cuda, torch, rng):
    x, weight = rows(rng, (64, 512), "bfloat16"), rows(rng, (512,), "bfloat16")
    y, residual, w = cuda.tensor(x), cuda.tensor(x), cuda.tensor(weight)
    expected = cuda.array(fp.rmsnorm(y, w))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.rmsnorm(y, w, out=y)
        fp.add_rmsnorm(y, residual, w)
    graph.replay()
    total = (expected.astype(np.float32) + x.astype(np.float32)).astype("bfloat16")
    assert_same_bits(cuda.array(residual), total)


def test_gpu_frameworks(gpu_framework, rng):
    x, weight = rows(rng, (6, 128), "float16"), rows(rng, (64,), "float16")
    out = fp.rmsnorm(gpu_framework.tensor(fp.silu_and_mul(x)), gpu_framework.tensor(weight))
    assert isinstance(out, gpu_framework.tensor_type)
    wanted = fp.rmsnorm(fp.silu_and_mul(x), weight).astype(np.float32)
    np.testing.assert_allclose(gpu_framework.array(out).astype(np.float32), wanted, rtol=2e-3)
