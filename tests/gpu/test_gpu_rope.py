# SPDX-License-Identifier: Apache-2.0
"""The tests of apply_rope, on the GPU."""

import pytest

import flashplan as fp
import test_rope
from test_rope import DTYPES, ROPES, check_rope, check_table

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROPES)
def test_rope_of(cuda, rng, name, dtype, strided):
    check_rope(rng, fp.Rope(**ROPES[name]), cuda, dtype=dtype, strided=strided)
    check_rope(rng, fp.Rope(**ROPES[name]), cuda, dtype=dtype, heads=(32, 8), dim=128, count=100)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [2, 6, 80, 576])
def test_head_dims(cuda, rng, dim, interleaved):
    rope = fp.Rope(interleaved=interleaved, rotary_dim=min(dim, 512))
    for dtype in DTYPES:
        check_rope(rng, rope, cuda, dim=dim, heads=(3, 1), dtype=dtype)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary_dim"), [(64, 64), (128, 128), (80, 32), (6, 2), (576, 512)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_table(cuda, rng, dtype, dim, rotary_dim, interleaved, strided):
    check_table(rng, cuda, dtype, dim, rotary_dim, interleaved=interleaved, strided=strided)


def test_positions_outside_of_a_table(cuda, torch):
    q = torch.randn(4, 3, 64, device=cuda.device)
    table = torch.zeros(10, 64, device=cuda.device)
    positions = torch.tensor([-1, 10, 2**31 - 1, 3], dtype=torch.int32, device=cuda.device)
    out, _ = fp.apply_rope(q, q, positions, cos_sin_cache=table)
    assert torch.equal(out[:3], q[:3])
    assert not out[3].any()


def test_in_place_in_a_graph(cuda, torch, rng):
    q, k = (cuda.tensor(test_rope.normal(rng, (7, n, 64), "bfloat16")) for n in (4, 2))
    positions, rope = torch.arange(7, device=cuda.device), fp.Rope()
    wanted = fp.apply_rope(q, k, positions, rope)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.apply_rope(q, k, positions, rope, out_q=q, out_k=k)
    graph.replay()
    assert torch.equal(q, wanted[0])
    assert torch.equal(k, wanted[1])
