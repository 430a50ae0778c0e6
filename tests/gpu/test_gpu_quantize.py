# SPDX-License-Identifier: Apache-2.0
"""The tests of quantize_fp8, on the GPU."""

import numpy as np
import pytest

import flashplan as fp
import test_quantize
from frameworks import bits
from test_quantize import DTYPES, NARROW, ROTATIONS, SHAPES, heads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (9000, 8, 128), (2, 70_000, 8)])
def test_heads(cuda, rng, shape, dtype, narrow, per_head, strided):
    test_quantize.check(rng, shape, dtype, narrow, per_head, strided, cuda)


@pytest.mark.parametrize("narrow", NARROW)
def test_special_numbers(cuda, narrow):
    test_quantize.check_special_numbers(narrow, cuda)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_heads(cuda, rng, dtype, narrow, rotation):
    test_quantize.check_rotated(rng, dtype, narrow, *rotation, cuda)


def test_every_framework(gpu_framework, rng):
    x = heads(rng, (40, 3, 32), "bfloat16", False)
    x8, scale = fp.quantize_fp8(gpu_framework.tensor(x), per_head=True)
    wanted, found = fp.quantize_fp8(x, per_head=True)
    assert np.array_equal(gpu_framework.array(x8).view(np.uint8), bits(wanted))
    assert np.array_equal(gpu_framework.array(scale), found)


def test_a_graph_finds_the_scale_of_its_inputs(torch, rng):
    """A captured call computes the scale of what the tensor holds at the replay."""
    x = torch.zeros(30, 2, 64, device="cuda")
    x8 = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    fp.quantize_fp8(x, out=x8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, scale = fp.quantize_fp8(x, out=x8)
    for size in (1.0, 300.0, 0.001):
        x.normal_().mul_(size)
        graph.replay()
        torch.cuda.synchronize()
        # On a GPU, PyTorch would multiply by the inverse of 448, which is rounded.
        assert scale.item() == np.float32(x.abs().max().item()) / np.float32(448)
        assert (x8.float() * scale - x).abs().max() <= x.abs().max() / 16
