# SPDX-License-Identifier: Apache-2.0
"""rope_append_paged_kv against apply_rope and append_paged_kv one after the other."""

import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy, bits
from inputs import indptr, poisoned
from poison import Canary
from test_append import in_framework, scales_of_heads
from test_rope import ROPES

DTYPES = [
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float8_e5m2"),
    ("float16", "float8_e4m3fn"),
    ("bfloat16", "float8_e4m3fn"),
]


class Problem:
    """New tokens of requests, behind two rows that belong to none, and caches of NaN."""

    def __init__(
        self,
        rng,
        dtype="bfloat16",
        cache_dtype=None,
        new_lens=(5, 1, 0, 1, 18),
        kv_lens=(5, 70000, 12, 1, 40),
        heads=(5, 2),
        dims=(64, 40),
        page_size=4,
        kv_layout="NHD",
        csr=False,
        strided=False,
        num_pages=100,
    ):
        self.indptr = (2 + indptr(new_lens)).astype(np.int32)
        self.kv_lens = np.array(kv_lens, np.int32)
        self.kv_layout = kv_layout
        rows = int(self.indptr[-1]) + 3
        sizes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
        self.new = []
        for size in sizes:
            tokens = poisoned((rows, *size), dtype, strided)
            tokens[...] = 2 * rng.standard_normal((rows, *size), np.float32)
            self.new.append(tokens)
        pages_of = -(-self.kv_lens // page_size)
        used = int(pages_of.sum())
        begins = indptr(pages_of)
        # With a block table requests share the pages before their new tokens: caches stay small.
        ids = rng.permutation(num_pages)[np.arange(used) % num_pages].astype(np.int32)
        inner = (page_size, heads[1])[:: 1 if kv_layout == "NHD" else -1]
        cache_dtype = cache_dtype or dtype
        self.caches = [poisoned((num_pages, *inner, d), cache_dtype, strided) for d in dims]
        if csr:
            self.tables = {"page_indptr": begins, "page_indices": ids}
        else:
            table = np.full((len(pages_of), max(pages_of) + 1), 2**31 - 1, np.int32)
            fresh = iter(rng.permutation(num_pages).astype(np.int32))
            for row, count, new_len in zip(table, pages_of, new_lens, strict=True):
                row[:count] = 0
                for page in range(count - -(-new_len // page_size) - 1, count):
                    row[max(page, 0)] = next(fresh)
            self.tables = {"block_table": table}

    def options(self, framework):
        return {name: framework.tensor(x) for name, x in self.tables.items()} | {
            "kv_layout": self.kv_layout
        }

    def positions(self):
        """Of all rows; 0 for those of no request."""
        positions = np.zeros(len(self.new[0]), np.int32)
        for r, kv_len in enumerate(self.kv_lens):
            rows = slice(*self.indptr[r : r + 2])
            positions[rows] = np.arange(kv_len)[kv_len - (rows.stop - rows.start) :]
        return positions


def check(problem, rope, framework=None, in_place=False, **scales):
    framework = framework or NumPy()
    q, k, v = (framework.tensor(x) for x in problem.new)
    lengths = [framework.tensor(x) for x in (problem.indptr, problem.kv_lens)]
    options = problem.options(framework)
    twins = [cache.copy() for cache in problem.caches]
    wanted = [framework.tensor(cache) for cache in twins]
    scales = in_framework(framework, scales)
    rotated, rotated_k = fp.apply_rope(q, k, framework.tensor(problem.positions()), rope)
    fp.append_paged_kv(rotated_k, v, *wanted, *lengths, **options, **scales)

    canary = Canary(problem.new[0].shape, problem.new[0].dtype)
    out = q if in_place else framework.tensor(canary.view)
    caches = [framework.tensor(cache) for cache in problem.caches]
    result = fp.rope_append_paged_kv(
        q, k, v, *caches, *lengths, rope, **options, **scales, out_q=out
    )
    assert result is out
    rows = slice(*problem.indptr[[0, -1]])
    assert np.array_equal(bits(framework.array(out)[rows]), bits(framework.array(rotated)[rows]))
    if in_place:
        assert np.array_equal(bits(framework.array(out)[:2]), bits(problem.new[0][:2]))
    else:
        framework.fetch(canary.view, out)
        assert (bits(canary.view[: rows.start]) == -1).all(), "rows of no request were written"
        canary.assert_only_written(rows.stop)
    for cache, tensor, twin, expected in zip(problem.caches, caches, twins, wanted, strict=True):
        framework.fetch(cache, tensor)
        framework.fetch(twin, expected)
        assert np.array_equal(bits(cache), bits(twin))


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("name", ROPES)
def test_is_both_in_one(rng, name, dtype, cache_dtype):
    problem = Problem(rng, dtype, cache_dtype, kv_layout=rng.choice(["NHD", "HND"]))
    check(problem, fp.Rope(**ROPES[name]), k_scale=0.7, v_scale=1.3)


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_scales_of_heads(rng, dtype, cache_dtype):
    scales = scales_of_heads(rng, count=2)
    check(Problem(rng, dtype, cache_dtype), fp.Rope(rotary_dim=32), **scales)
    swapped = {"k_scale": scales["v_scale"], "v_scale": scales["k_scale"]}
    check(Problem(rng, dtype, cache_dtype), fp.Rope(), **swapped)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [(2, 1), (6, 8), (80, 80), (576, 512)])
def test_head_dims(rng, dims, interleaved):
    rope = fp.Rope(interleaved=interleaved, rotary_dim=min(dims[0], 512))
    check(Problem(rng, "float16", dims=dims, heads=(3, 1)), rope)
    check(Problem(rng, "bfloat16", "float8_e5m2", dims=dims, heads=(3, 1)), rope)


@pytest.mark.parametrize("in_place", [False, True])
def test_memory(rng, in_place):
    for options in ({"strided": True}, {"strided": True, "kv_layout": "HND"}, {"page_size": 1}):
        check(Problem(rng, **options), fp.Rope(), in_place=in_place)


def test_pages_in_csr(rng):
    check(Problem(rng, csr=True, kv_lens=(5, 130, 12, 1, 40)), fp.Rope())


def test_many_tokens(rng):
    """Shared out to threads, each of which has to find its first request."""
    new_lens = rng.choice([0, 1, 2, 30], 40)
    problem = Problem(rng, "float32", new_lens=new_lens, kv_lens=new_lens, page_size=40)
    check(problem, fp.Rope())


def test_frameworks_give_the_same_bits(rng, framework):
    problem = Problem(rng, "float16")
    if framework.writable:
        check(problem, fp.Rope(), framework)
        return
    arguments = [framework.tensor(x) for x in (*problem.new, problem.indptr, problem.kv_lens)]
    q = fp.rope_append_paged_kv(
        *arguments[:3],
        *problem.caches,
        *arguments[3:],
        fp.Rope(),
        **problem.options(framework),
    )
    assert isinstance(q, framework.tensor_type)
    rotated, _ = fp.apply_rope(*problem.new[:2], problem.positions(), fp.Rope())
    rows = slice(*problem.indptr[[0, -1]])
    assert np.array_equal(bits(framework.array(q)[rows]), bits(rotated[rows]))


def test_no_tokens():
    empty, cache = np.zeros((0, 2, 4), np.float32), np.full((1, 2, 2, 4), np.nan, np.float32)
    none = np.zeros(0, np.int32)
    table = np.zeros((0, 1), np.int32)
    q = fp.rope_append_paged_kv(
        *[empty] * 3, cache, cache.copy(), np.zeros(1, np.int32), none, fp.Rope(), block_table=table
    )
    assert q.shape == (0, 2, 4)
    assert np.isnan(cache).all()
