# SPDX-License-Identifier: Apache-2.0
"""append_paged_kv against a loop, in caches full of NaN."""

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
import reference
from frameworks import Jax, NumPy, bits
from inputs import indptr, poisoned

DTYPES = [
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
    ("bfloat16", "float8_e4m3fn"),
    ("bfloat16", "float8_e5m2"),
]
NEW_LENS, KV_LENS = (5, 1, 0, 1, 18), (5, 30, 12, 1, 40)
NUM_KV_HEADS, DIMS = 3, (8, 5)


def num_pages(page_size):
    """Of the caches of a Problem."""
    return sum(-(-n // page_size) for n in KV_LENS) + 3


class Problem:
    def __init__(self, dtype, cache_dtype, page_size=4, kv_layout="NHD", csr=False, strided=False):
        rng = np.random.default_rng(0)
        total = sum(NEW_LENS)
        self.new = []
        for d in DIMS:
            tokens = poisoned((total + 2, NUM_KV_HEADS, d), dtype, strided)
            tokens[:total] = 2 * rng.standard_normal((total, NUM_KV_HEADS, d))
            self.new.append(tokens)
        pages_of = [-(-n // page_size) for n in KV_LENS]
        count = num_pages(page_size)
        inner = (page_size, NUM_KV_HEADS) if kv_layout == "NHD" else (NUM_KV_HEADS, page_size)
        self.caches = [poisoned((count, *inner, d), cache_dtype, strided) for d in DIMS]
        pages = rng.permutation(count).astype(np.int32)
        begins = indptr(pages_of)
        self.pages = [pages[b : b + n] for b, n in zip(begins, pages_of, strict=False)]
        self.kv_layout = kv_layout
        if csr:
            self.tables = {"page_indptr": begins, "page_indices": pages}
        else:
            table = np.full((len(KV_LENS), max(pages_of) + 1), 2**31 - 1, np.int32)
            for row, own in zip(table, self.pages, strict=True):
                row[: len(own)] = own
            self.tables = {"block_table": table}

    def slots(self):
        """Where the tables and lengths say that tokens go, as int64 slots."""
        page_size = self.caches[0].shape[1 if self.kv_layout == "NHD" else 2]
        slots = []
        for pages, new_len, kv_len in zip(self.pages, NEW_LENS, KV_LENS, strict=True):
            keys = np.arange(kv_len - new_len, kv_len)
            slots += [pages[key // page_size] * page_size + key % page_size for key in keys]
        return np.array(slots, np.int64)

    def append(self, framework, caches, **scales):
        tables = {name: framework.tensor(x) for name, x in self.tables.items()}
        lengths = (indptr(NEW_LENS), np.array(KV_LENS, np.int32))
        return fp.append_paged_kv(
            *(framework.tensor(x) for x in self.new),
            *caches,
            *(framework.tensor(x) for x in lengths),
            **tables,
            **in_framework(framework, scales),
            kv_layout=self.kv_layout,
        )

    def expected(self, k_scale=1.0, v_scale=1.0):
        results = []
        for new, cache, scale in zip(self.new, self.caches, (k_scale, v_scale), strict=True):
            cache = cache.copy()
            begins = indptr(NEW_LENS)
            for r, kv_len in enumerate(KV_LENS):
                tokens = new[begins[r] : begins[r + 1]]
                reference.append_pages(
                    cache, tokens, self.pages[r], kv_len, self.kv_layout, scale=scale
                )
            results.append(cache)
        return results


def in_framework(framework, scales):
    """Scales that are arrays as tensors of the framework."""
    arrays = {name: x for name, x in scales.items() if isinstance(x, np.ndarray)}
    return scales | {name: framework.tensor(x) for name, x in arrays.items()}


def scales_of_heads(rng, count=NUM_KV_HEADS):
    """One k_scale for all heads, and a v_scale for each, no powers of two."""
    return {
        "k_scale": rng.uniform(0.1, 3, 1).astype(np.float32),
        "v_scale": rng.uniform(0.1, 3, count).astype(np.float32),
    }


def check(problem, framework=None, **scales):
    framework = framework or NumPy()
    expected = problem.expected(**scales)
    caches = [framework.tensor(cache) for cache in problem.caches]
    assert problem.append(framework, caches, **scales) is None
    for actual, wanted in zip(problem.caches, expected, strict=True):
        assert np.array_equal(bits(actual), bits(wanted))


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("csr", [False, True])
def test_writes_new_tokens_and_nothing_else(dtype, cache_dtype, kv_layout, page_size, csr):
    check(Problem(dtype, cache_dtype, page_size, kv_layout, csr))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_strided(kv_layout):
    check(Problem("bfloat16", "bfloat16", kv_layout=kv_layout, strided=True))


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_scales(dtype, cache_dtype):
    """Stored = value / scale, exact in powers of two."""
    check(Problem(dtype, cache_dtype), k_scale=0.25, v_scale=4.0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scales_divide(dtype):
    """Stored = value / scale with one rounding, for scales that are no powers of two."""
    for scale in (3.0, 0.1, 7.7, 1e-30, 7e37):
        check(Problem(dtype, dtype), k_scale=scale, v_scale=1 / scale)


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_scales_of_heads(rng, dtype, cache_dtype, kv_layout):
    """Tensors of one scale, or of one for each kv head."""
    scales = scales_of_heads(rng)
    check(Problem(dtype, cache_dtype, kv_layout=kv_layout), **scales)
    swapped = {"k_scale": scales["v_scale"], "v_scale": scales["k_scale"]}
    check(Problem(dtype, cache_dtype, kv_layout=kv_layout, strided=True), **swapped)
    check(Problem(dtype, cache_dtype), **scales | {"k_scale": 0.7})


def test_scales_of_every_framework(rng, framework):
    problem = Problem("bfloat16", "float8_e5m2")
    scales = scales_of_heads(rng)
    expected = problem.expected(**scales)
    problem.append(NumPy(), problem.caches, **in_framework(framework, scales))
    for actual, wanted in zip(problem.caches, expected, strict=True):
        assert np.array_equal(bits(actual), bits(wanted))


def test_a_scale_without_dimensions(rng, framework):
    """On the host it counts as a number."""
    problem = Problem("float32", "float32")
    expected = problem.expected(k_scale=0.3)
    scale = framework.tensor(np.full((1,), 0.3, np.float32))[0]
    problem.append(NumPy(), problem.caches, k_scale=scale)
    for actual, wanted in zip(problem.caches, expected, strict=True):
        assert np.array_equal(bits(actual), bits(wanted))


def test_frameworks_give_the_same_bits(framework):
    """JAX arrays may be appended, to a cache that is no JAX array."""
    if framework.writable:
        check(Problem("bfloat16", "float8_e4m3fn"), framework, k_scale=0.5)
        return
    assert isinstance(framework, Jax)
    problem = Problem("bfloat16", "float8_e4m3fn")
    expected = problem.expected()
    problem.append(framework, problem.caches)
    for actual, wanted in zip(problem.caches, expected, strict=True):
        assert np.array_equal(bits(actual), bits(wanted))


def append_one(values, cache_dtype, **scales):
    """`values` as one token's key through a cache of one page."""
    k = np.asarray(values, np.float32).reshape(1, 1, -1)
    caches = [np.zeros((1, 1, 1, k.size), cache_dtype) for _ in range(2)]
    fp.append_paged_kv(
        k,
        k,
        *caches,
        np.array([0, 1], np.int32),
        np.array([1], np.int32),
        block_table=np.array([[0]], np.int32),
        **scales,
    )
    return caches[0].ravel()


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_saturates(cache_dtype):
    largest = float(ml_dtypes.finfo(cache_dtype).max)
    values = [1e9, -1e9, np.inf, -np.inf, largest, 1.05 * largest, np.nan, -0.0]
    stored = append_one(values, cache_dtype).astype(np.float32)
    assert np.array_equal(stored[:6], [largest, -largest, largest, -largest, largest, largest])
    assert np.isnan(stored[6])
    assert stored[7] == 0
    assert np.signbit(stored[7])
    assert append_one([2 * largest], cache_dtype, k_scale=2.0).astype(np.float32) == largest


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_rounds_to_nearest_even(cache_dtype):
    """Every value of the format, every midpoint of two, and just beside it; subnormals too."""
    every = np.arange(256, dtype=np.uint8).view(cache_dtype).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    middle = (every[:-1] + every[1:]) / 2
    values = np.concatenate(
        [every, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]
    ).astype(np.float32)
    stored = append_one(values, cache_dtype)
    assert np.array_equal(stored.astype(np.float32), values.astype(cache_dtype).astype(np.float32))


def test_appended_tokens_are_attended_to():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((6, 2, 8), np.float32) for _ in range(3))
    caches = [np.full((4, 4, 2, 8), np.nan, np.float32) for _ in range(2)]
    table = np.array([[3, 1]], np.int32)
    attn = fp.Attention(2, 2, 8, page_size=4, q_dtype="float32", device="cpu")
    outputs = []
    for begin, end in ((0, 4), (4, 5), (5, 6)):
        new = slice(begin, end)
        lengths = (np.array([0, end - begin], np.int32), np.array([end], np.int32))
        fp.append_paged_kv(k[new], v[new], *caches, *lengths, block_table=table)
        attn.plan(*lengths)
        outputs.append(attn.run(q[new], *caches, block_table=table))
    exact, _ = reference.attention(q, k, v)
    np.testing.assert_allclose(np.concatenate(outputs), exact, atol=1e-6)


def check_slots(rng, framework=None, strays=(), **options):
    """Tokens go to their slots. -1 skips one, and so do `strays` on a GPU."""
    framework = framework or NumPy()
    problem = Problem(**options)
    slots = rng.permutation(problem.slots())
    skipped = rng.choice(len(slots), 8, replace=False)
    slots[skipped] = -1
    slots[skipped[: len(strays)]] = strays
    page_size = problem.caches[0].shape[1 if problem.kv_layout == "NHD" else 2]
    expected = [cache.copy() for cache in problem.caches]
    for i in set(range(len(slots))) - set(skipped):
        page, row = divmod(slots[i], page_size)
        for new, cache in zip(problem.new, expected, strict=True):
            reference.append_pages(cache, new[i : i + 1], [page], row + 1, problem.kv_layout)
    caches = [framework.tensor(cache) for cache in problem.caches]
    arguments = [framework.tensor(x) for x in problem.new]
    fp.append_paged_kv(
        *arguments,
        *caches,
        slot_mapping=framework.tensor(slots),
        kv_layout=problem.kv_layout,
    )
    for cache, tensor, wanted in zip(problem.caches, caches, expected, strict=True):
        framework.fetch(cache, tensor)
        assert np.array_equal(bits(cache), bits(wanted))


def check_positions(rng, framework=None, strays=(), **options):
    """Tokens go to their positions, in any order. -1 skips one, and so do (request, position) of
    `strays` on a GPU."""
    framework = framework or NumPy()
    problem = Problem(**options)
    places = [
        (request, key)
        for request, (new_len, kv_len) in enumerate(zip(NEW_LENS, KV_LENS))
        for key in range(kv_len - new_len, kv_len)
    ]
    places = rng.permutation(np.array(places, np.int32))
    skipped = rng.choice(len(places), 8, replace=False)
    places[skipped, 0] = -1
    for i, stray in zip(skipped, strays):
        places[i] = stray
    page_size = problem.caches[0].shape[1 if problem.kv_layout == "NHD" else 2]
    expected = [cache.copy() for cache in problem.caches]
    for i in set(range(len(places))) - set(skipped):
        request, key = places[i]
        page = problem.pages[request][key // page_size]
        for new, cache in zip(problem.new, expected, strict=True):
            row = key % page_size
            reference.append_pages(cache, new[i : i + 1], [page], row + 1, problem.kv_layout)
    caches = [framework.tensor(cache) for cache in problem.caches]
    fp.append_paged_kv(
        *(framework.tensor(x) for x in problem.new),
        *caches,
        batch_indices=framework.tensor(places[:, 0].copy()),
        positions=framework.tensor(places[:, 1].copy()),
        **{name: framework.tensor(x) for name, x in problem.tables.items()},
        kv_layout=problem.kv_layout,
    )
    for cache, tensor, wanted in zip(problem.caches, caches, expected, strict=True):
        framework.fetch(cache, tensor)
        assert np.array_equal(bits(cache), bits(wanted))


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("csr", [False, True])
def test_positions(seed, dtype, cache_dtype, csr):
    rng = np.random.default_rng(seed)
    for page_size in (1, 3, 16):
        check_positions(
            rng, dtype=dtype, cache_dtype=cache_dtype, page_size=page_size, csr=csr, strided=csr
        )


def test_positions_in_frameworks(seed, framework):
    if framework.writable:
        check_positions(
            np.random.default_rng(seed), framework, dtype="float32", cache_dtype="float32"
        )


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_slot_mapping(seed, dtype, cache_dtype, kv_layout):
    rng = np.random.default_rng(seed)
    for page_size in (1, 3, 16):
        check_slots(
            rng, dtype=dtype, cache_dtype=cache_dtype, page_size=page_size, kv_layout=kv_layout
        )


def test_slots_in_frameworks(seed, framework):
    if framework.writable:
        check_slots(np.random.default_rng(seed), framework, dtype="float16", cache_dtype="float16")


def test_many_tokens(seed):
    """Shared out to threads, each of which has to find its first request."""
    rng = np.random.default_rng(seed)
    new_lens = rng.choice([0, 1, 2, 40, 300], 50)
    kv_lens = (new_lens + rng.integers(0, 20, 50)).astype(np.int32)
    lengths = (3 + indptr(new_lens)).astype(np.int32)
    new = rng.standard_normal((2, lengths[-1], 2, 32)).astype(np.float32)
    table = np.arange(50 * 80, dtype=np.int32).reshape(50, 80)
    caches = [np.full((len(table.ravel()), 4, 2, 32), np.nan, np.float32) for _ in range(2)]
    expected = [cache.copy() for cache in caches]
    for tokens, cache in zip(new, expected, strict=True):
        for r in range(50):
            own = tokens[lengths[r] : lengths[r + 1]]
            reference.append_pages(cache, own, table[r], kv_lens[r])
    fp.append_paged_kv(*new, *caches, lengths, kv_lens, block_table=table)
    assert np.array_equal(bits(np.array(caches)), bits(np.array(expected)))


def test_only_pages_that_are_written_are_looked_up():
    k = np.ones((1, 1, 2), np.float32)
    caches = [np.zeros((3, 4, 1, 2), np.float32) for _ in range(2)]
    table = np.array([[-1, 99, 2]], np.int32)
    fp.append_paged_kv(k, k, *caches, np.int32([0, 1]), np.int32([10]), block_table=table)
    for cache in caches:
        assert cache[2, 1].all() and cache.sum() == 2


def test_no_slots():
    cache, empty = np.full((1, 2, 2, 4), np.nan, np.float32), np.zeros((0, 2, 4), np.float32)
    fp.append_paged_kv(empty, empty, cache, cache.copy(), slot_mapping=np.zeros(0, np.int64))
    none, table = np.zeros(0, np.int32), np.zeros((1, 1), np.int32)
    places = {"batch_indices": none, "positions": none, "block_table": table}
    fp.append_paged_kv(empty, empty, cache, cache.copy(), **places)
    skipped = np.ones((3, 2, 4), np.float32)
    fp.append_paged_kv(skipped, skipped, cache, cache.copy(), slot_mapping=np.full(2, -1, np.int64))
    assert np.isnan(cache).all()


def test_no_requests():
    empty, cache = np.zeros((0, 2, 4), np.float32), np.full((1, 2, 2, 4), np.nan, np.float32)
    fp.append_paged_kv(
        empty,
        empty,
        cache,
        cache.copy(),
        np.array([0], np.int32),
        np.array([], np.int32),
        block_table=np.zeros((0, 1), np.int32),
    )
    assert np.isnan(cache).all()
