# SPDX-License-Identifier: Apache-2.0
"""The tests of rope_append_paged_kv, on the GPU."""

import pytest

import flashplan as fp
from test_append import scales_of_heads
from test_rope import ROPES
from test_rope_append import DTYPES, Problem, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("name", ROPES)
def test_is_both_in_one(cuda, rng, name, dtype, cache_dtype):
    rope = fp.Rope(**ROPES[name])
    for options in ({}, {"heads": (32, 8), "dims": (128, 128), "page_size": 16}):
        problem = Problem(rng, dtype, cache_dtype, kv_layout=rng.choice(["NHD", "HND"]), **options)
        check(problem, rope, cuda, k_scale=0.7, v_scale=1.3)
        check(problem, rope, cuda)


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_scales_of_heads(cuda, rng, dtype, cache_dtype):
    for options, count in (({}, 2), ({"heads": (32, 8), "dims": (128, 128)}, 8)):
        one, heads = scales_of_heads(rng, count).values()
        for scales in ({"k_scale": one, "v_scale": heads}, {"k_scale": heads, "v_scale": 0.7}):
            problem = Problem(rng, dtype, cache_dtype, **options)
            check(problem, fp.Rope(rotary_dim=32), cuda, **scales)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [(2, 1), (6, 8), (80, 80), (576, 512)])
def test_head_dims(cuda, rng, dims, interleaved):
    rope = fp.Rope(interleaved=interleaved, rotary_dim=min(dims[0], 512))
    check(Problem(rng, "float16", dims=dims, heads=(3, 1)), rope, cuda)
    check(Problem(rng, "bfloat16", "float8_e5m2", dims=dims, heads=(3, 1)), rope, cuda)


@pytest.mark.parametrize("in_place", [False, True])
def test_memory(cuda, rng, in_place):
    for options in ({"strided": True}, {"strided": True, "kv_layout": "HND"}, {"page_size": 1}):
        check(Problem(rng, **options), fp.Rope(), cuda, in_place=in_place)


def test_many_requests(cuda, rng):
    """More than a CTA has threads, pages in CSR."""
    new_lens = rng.choice([0, 0, 1, 3], 700)
    problem = Problem(
        rng, new_lens=new_lens, kv_lens=new_lens, page_size=4, csr=True, num_pages=2000
    )
    check(problem, fp.Rope(), cuda)


def test_pages_outside_of_the_cache(cuda, torch, rng):
    """q is rotated, and nothing is written to the caches; in a graph."""
    problem = Problem(rng, new_lens=(2, 1), kv_lens=(3, 1), heads=(4, 2))
    q, k, v, *caches = (cuda.tensor(x) for x in (*problem.new, *problem.caches))
    lengths = [cuda.tensor(x) for x in (problem.indptr, problem.kv_lens)]
    positions = cuda.tensor(problem.positions())
    rotated, _ = fp.apply_rope(q, k, positions, fp.Rope())
    table = torch.full((2, 2), 2**31 - 1, dtype=torch.int32, device=cuda.device)
    table[1] = -1
    before = [cache.clone() for cache in caches]
    out = torch.zeros_like(q)
    arguments = (q, k, v, *caches, *lengths, fp.Rope())
    fp.rope_append_paged_kv(*arguments, block_table=table, out_q=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.rope_append_paged_kv(*arguments, block_table=table, out_q=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out[2:5], rotated[2:5])
    assert not out[:2].any()
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))
