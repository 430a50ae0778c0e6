# SPDX-License-Identifier: Apache-2.0
"""The tests of apply_rope, on the GPU."""

import pytest

import flashplan as fp
import test_rope
from test_rope import DTYPES, ROPES, check_rope

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
