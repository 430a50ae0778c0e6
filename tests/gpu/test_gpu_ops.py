# SPDX-License-Identifier: Apache-2.0
"""append_paged_kv on the GPU against the reference, in memory full of NaN."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
import reference
from frameworks import bits, owner_of
from inputs import INT_MAX, indptr, poisoned
from test_append import DTYPES as APPEND_DTYPES
from test_append import check_positions, check_slots, in_framework, num_pages, scales_of_heads

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


@dataclasses.dataclass
class Append:
    """New tokens and caches of NaN on the host, and what append_paged_kv makes of them."""

    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    v_dtypes: tuple = ()  # where v and its cache differ from k
    dims: tuple = (64, 64)
    num_kv_heads: int = 2
    page_size: int = 16
    kv_layout: str = "NHD"
    csr: bool = False
    strided: bool = False
    new_lens: tuple = (5, 1, 0, 1, 18)
    kv_lens: tuple = (5, 30, 12, 1, 40)
    first_row: int = 0  # rows of k and v before indptr[0]
    spare_rows: int = 3
    scales: tuple = (1.0, 1.0)

    def __post_init__(self):
        rng = np.random.default_rng(0)
        self.indptr = (indptr(self.new_lens) + self.first_row).astype(np.int32)
        rows = int(self.indptr[-1]) + self.spare_rows
        written = slice(self.first_row, int(self.indptr[-1]))
        dtypes = [(self.dtype, self.cache_dtype), self.v_dtypes or (self.dtype, self.cache_dtype)]
        pages_of = [-(-n // self.page_size) for n in self.kv_lens]
        num_pages = sum(pages_of) + 3
        inner = (self.page_size, self.num_kv_heads)[:: 1 if self.kv_layout == "NHD" else -1]
        self.new, self.caches = [], []
        for d, (dtype, cache_dtype) in zip(self.dims, dtypes, strict=True):
            tokens = poisoned((rows, self.num_kv_heads, d), dtype, self.strided)
            values = 2 * rng.standard_normal(tokens[written].shape, np.float32)
            tokens[written] = values.astype(dtype)
            self.new.append(tokens)
            self.caches.append(poisoned((num_pages, *inner, d), cache_dtype, self.strided))
        ids = rng.permutation(num_pages).astype(np.int32)
        begins = indptr(pages_of)
        self.pages = [ids[b : b + n] for b, n in zip(begins, pages_of, strict=False)]
        self.lens = np.array(self.kv_lens, np.int32)
        if self.csr:
            self.tables = {"page_indptr": begins, "page_indices": ids}
        else:
            table = np.full((len(pages_of) + 1, max(pages_of, default=0) + 1), INT_MAX, np.int32)
            for row, own in zip(table, self.pages, strict=False):
                row[: len(own)] = own
            self.tables = {"block_table": table}

    def expected(self):
        results = [owner_of(cache).copy() for cache in self.caches]
        for new, cache, result, scale in zip(
            self.new, self.caches, results, self.scales, strict=True
        ):
            memory = result.reshape(-1).view(np.uint8)
            view = np.ndarray(cache.shape, cache.dtype, memory, strides=cache.strides)
            for r, kv_len in enumerate(self.kv_lens):
                tokens = new[self.indptr[r] : self.indptr[r + 1]]
                reference.append_pages(view, tokens, self.pages[r], kv_len, self.kv_layout, scale)
        return results

    def arguments(self, cuda):
        tensors = [cuda.tensor(x) for x in (*self.new, *self.caches, self.indptr, self.lens)]
        options = {name: cuda.tensor(x) for name, x in self.tables.items()}
        scales = {"k_scale": self.scales[0], "v_scale": self.scales[1]}
        return tensors, options | in_framework(cuda, scales) | {"kv_layout": self.kv_layout}

    def check(self, cuda):
        expected = self.expected()
        tensors, options = self.arguments(cuda)
        fp.append_paged_kv(*tensors, **options)
        for cache, tensor, wanted in zip(self.caches, tensors[2:4], expected, strict=True):
            cuda.fetch(cache, tensor)
            assert np.array_equal(bits(owner_of(cache)), bits(wanted))


ALL_DTYPES = [*APPEND_DTYPES, ("float16", "float8_e4m3fn"), ("float32", "float8_e5m2")] + [
    (dtype, dtype) for dtype in ("float8_e4m3fn", "float8_e5m2")
]
SHAPES = [  # dims and heads: element by element, several tokens side by side, several blocks
    ((8, 5), 3),
    ((16, 16), 1),
    ((128, 64), 4),
    ((256, 256), 33),
]


@pytest.mark.parametrize(("dtype", "cache_dtype"), ALL_DTYPES)
@pytest.mark.parametrize(("dims", "num_kv_heads"), SHAPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("page_size", "csr"), [(1, False), (3, True), (16, False)])
def test_append(cuda, dtype, cache_dtype, dims, num_kv_heads, kv_layout, page_size, csr):
    Append(
        dtype,
        cache_dtype,
        dims=dims,
        num_kv_heads=num_kv_heads,
        kv_layout=kv_layout,
        page_size=page_size,
        csr=csr,
    ).check(cuda)


APPENDS = {
    "strided": {"strided": True},
    "strided HND": {
        "strided": True,
        "kv_layout": "HND",
        "dtype": "float32",
        "cache_dtype": "float32",
    },
    "scaled": {"scales": (0.25, 4.0)},
    "scaled by no power of two": {"dtype": "float32", "cache_dtype": "float32", "scales": (3, 0.1)},
    "scaled e4m3": {"cache_dtype": "float8_e4m3fn", "scales": (1.0, 0.5)},
    "scaled e5m2": {"dtype": "float16", "cache_dtype": "float8_e5m2", "scales": (2.0, 1.0)},
    "one side scaled": {"dims": (5, 5), "scales": (1.0, 0.5)},
    "v of another dtype": {"v_dtypes": ("float16", "float16")},
    "v of another cache": {"v_dtypes": ("bfloat16", "float8_e4m3fn"), "csr": True},
    "rows before": {"first_row": 4},
    "no requests": {"new_lens": (), "kv_lens": ()},
    "no tokens": {"new_lens": (0, 0), "kv_lens": (3, 0), "spare_rows": 0},
    "one token": {"new_lens": (1,), "kv_lens": (1,), "spare_rows": 0, "num_kv_heads": 1},
    "300 requests": {"new_lens": (1,) * 300, "kv_lens": tuple(range(1, 301)), "page_size": 4},
    "1000 requests": {"new_lens": (1, 0, 0, 2) * 250, "kv_lens": (9, 3, 0, 2) * 250},
    "long gap": {"new_lens": (3, *(0,) * 700, 2, 40), "kv_lens": (3, *(1,) * 700, 2, 44)},
    **{
        f"{n} tokens": {
            "new_lens": (n - 100, 0, 1, 99),
            "kv_lens": (n + 7, 9, 1, 300),
            "dims": (128, 128),
            "num_kv_heads": 8,
            "spare_rows": 70,
        }
        for n in (1025, 2500, 9000)  # each thread moves 2, 4, 8 of them
    },
}


@pytest.mark.parametrize("name", APPENDS)
def test_append_more(cuda, name):
    Append(**APPENDS[name]).check(cuda)


@pytest.mark.parametrize(("dtype", "cache_dtype"), APPEND_DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_slot_mapping(cuda, seed, dtype, cache_dtype, kv_layout):
    """Slots that are none of the cache's skip a token as -1 does."""
    rng = np.random.default_rng(seed)
    for page_size in (1, 3, 16):
        behind = num_pages(page_size) * page_size
        check_slots(
            rng,
            cuda,
            strays=(-2, -(2**63), behind, 2**31, 2**62, 2**63 - 1),
            dtype=dtype,
            cache_dtype=cache_dtype,
            page_size=page_size,
            kv_layout=kv_layout,
        )


@pytest.mark.parametrize(("dtype", "cache_dtype"), APPEND_DTYPES)
@pytest.mark.parametrize("csr", [False, True])
def test_positions(cuda, seed, dtype, cache_dtype, csr):
    """Requests that are none of the table's and positions behind its pages skip a token as -1
    does."""
    rng = np.random.default_rng(seed)
    for page_size in (1, 3, 16):
        check_positions(
            rng,
            cuda,
            strays=((-2, 0), (5, 0), (2**31 - 1, 3), (0, -1), (0, 2**31 - 1), (3, 200)),
            dtype=dtype,
            cache_dtype=cache_dtype,
            page_size=page_size,
            csr=csr,
        )


@pytest.mark.parametrize(("dtype", "cache_dtype"), ALL_DTYPES)
@pytest.mark.parametrize(("dims", "num_kv_heads"), SHAPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_scales_of_heads(cuda, rng, dtype, cache_dtype, dims, num_kv_heads, kv_layout):
    """Tensors of one scale, or of one for each kv head; the other side has a number or a tensor."""
    one, heads = scales_of_heads(rng, num_kv_heads).values()
    for scales in ((one, heads), (heads, one), (heads, 0.7), (0.7, heads)):
        Append(
            dtype,
            cache_dtype,
            dims=dims,
            num_kv_heads=num_kv_heads,
            kv_layout=kv_layout,
            scales=scales,
        ).check(cuda)


def test_scales_of_heads_for_many_tokens(cuda, rng):
    """Each thread moves several tokens of one head."""
    for dtypes in ({}, {"v_dtypes": ("float16", "float8_e4m3fn")}):
        one, heads = scales_of_heads(rng, 8).values()
        Append(**APPENDS["9000 tokens"] | dtypes, scales=(heads, one)).check(cuda)


def test_scales_in_a_graph(cuda, torch):
    """Are read at each replay. One has no dimensions, which is a tensor on a GPU."""
    k = torch.ones(3, 2, 64, device=DEVICE)
    caches = [torch.zeros(4, 16, 2, 64, device=DEVICE) for _ in range(2)]
    slots = torch.arange(3, device=DEVICE)
    k_scale, v_scale = torch.ones(2, device=DEVICE), torch.ones((), device=DEVICE)
    options = {"slot_mapping": slots, "k_scale": k_scale, "v_scale": v_scale}
    fp.append_paged_kv(k, k, *caches, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.append_paged_kv(k, k, *caches, **options)
    k_scale.copy_(torch.tensor([0.5, 4.0]))
    v_scale.fill_(0.25)
    graph.replay()
    assert (caches[0][0, :3, 0] == 2).all()
    assert (caches[0][0, :3, 1] == 0.25).all()
    assert (caches[1][0, :3] == 4).all()


def test_slots_in_a_graph(cuda, torch):
    """Are read at each replay."""
    k = torch.arange(3.0, device=DEVICE).view(3, 1, 1).expand(3, 2, 64).contiguous()
    caches = [torch.zeros(4, 16, 2, 64, device=DEVICE) for _ in range(2)]
    slots = torch.full((3,), -1, device=DEVICE)
    fp.append_paged_kv(k, k, *caches, slot_mapping=slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.append_paged_kv(k, k, *caches, slot_mapping=slots)
    slots.copy_(torch.tensor([-1, 17, 63]))
    graph.replay()
    for cache in caches:
        assert (cache[1, 1] == 1).all()
        assert (cache[3, 15] == 2).all()
        assert cache.count_nonzero() == 4 * 64


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [16, 1])  # words, elements
def test_append_converts_as_the_cpu(cuda, cache_dtype, dtype, dim):
    """Every value of the format, midpoints and their neighbours, what saturates, infinity, NaN."""
    every = np.arange(256, dtype=np.uint8).view(cache_dtype).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    middle = (every[:-1] + every[1:]) / 2
    largest = float(ml_dtypes.finfo(cache_dtype).max)
    values = [every, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]
    values += [[-0.0, 1e-30, 1.05 * largest, -2 * largest, 6e4, -1e9, np.inf, -np.inf, np.nan]]
    values = np.concatenate(values).astype(np.float32)
    values = np.resize(values, (-(-len(values) // dim), 1, dim))
    with np.errstate(over="ignore"):
        values = values.astype(dtype)
    rows = len(values)
    lengths = np.array([0, rows], np.int32), np.array([rows], np.int32)
    table = np.array([[1]], np.int32)
    for scale in (1.0, 1.7):
        on_cpu = [np.zeros((2, rows, 1, dim), cache_dtype) for _ in range(2)]
        scales = {"k_scale": scale, "v_scale": 1 / scale}
        fp.append_paged_kv(values, values, *on_cpu, *lengths, block_table=table, **scales)
        on_gpu = [cuda.tensor(np.zeros_like(cache)) for cache in on_cpu]
        arguments = [cuda.tensor(x) for x in (values, values)]
        arguments += [*on_gpu, *(cuda.tensor(x) for x in lengths)]
        fp.append_paged_kv(*arguments, block_table=cuda.tensor(table), **scales)
        for tensor, wanted in zip(on_gpu, on_cpu, strict=True):
            actual = cuda.array(tensor)
            is_nan = np.isnan(wanted.astype(np.float32))
            assert np.array_equal(np.isnan(actual.astype(np.float32)), is_nan)
            assert np.array_equal(bits(actual)[~is_nan], bits(wanted)[~is_nan])


def test_append_skips_pages_outside_the_cache(cuda):
    """Not checked on the host, but not written either."""
    append = Append()
    tensors, options = append.arguments(cuda)
    options["block_table"][0] = -1
    options["block_table"][1] = len(append.caches[0])
    append.new_lens, append.kv_lens = append.new_lens[2:], append.kv_lens[2:]
    append.indptr, append.pages = append.indptr[2:], append.pages[2:]
    expected = append.expected()
    fp.append_paged_kv(*tensors, **options)
    for cache, tensor, wanted in zip(append.caches, tensors[2:4], expected, strict=True):
        cuda.fetch(cache, tensor)
        assert np.array_equal(bits(owner_of(cache)), bits(wanted))


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("length", [9, 2000, 2**31 - 1, -1, -(2**31)])
def test_append_stays_in_its_row_of_the_table(cuda, torch, length, csr, rope):
    """The ids behind it are those of another request, which must not be written."""
    k = torch.ones(2, 2, 64, device=cuda.device, dtype=torch.bfloat16)
    caches = torch.zeros(2, 8, 4, 2, 64, device=cuda.device, dtype=torch.bfloat16)
    lengths = [cuda.tensor(np.int32(x)) for x in ([0, 1, 2], [length, 3])]
    table = np.int32([[1, 2, 5], [3, 4, 6]])[:, :2]  # a view: the next column is in memory
    indptr, ids = np.int32([0, 2, 4]), np.int32([1, 2, 3, 4, 5])
    tables = {"page_indptr": indptr, "page_indices": ids} if csr else {"block_table": table}
    tables = {name: cuda.tensor(x) for name, x in tables.items()}
    if rope:
        fp.rope_append_paged_kv(k, k, k, *caches, *lengths, fp.Rope(), **tables)
    else:
        fp.append_paged_kv(k, k, *caches, *lengths, **tables)
    written = (caches != 0).permute(1, 2, 0, 3, 4).flatten(2).any(2).cpu().numpy()
    expected = np.zeros((8, 4), bool)
    expected[3, 2] = True  # the other request's
    assert np.array_equal(written, expected)


@pytest.mark.parametrize("indptr", [[0, 2**31 - 1, 4], [-5, 2, 4], [3, 1, 4], [2**31 - 1, 4, 4]])
def test_append_follows_no_indptr_out_of_the_ids(cuda, torch, indptr):
    k = torch.ones(2, 2, 64, device=cuda.device, dtype=torch.bfloat16)
    caches = torch.zeros(2, 8, 4, 2, 64, device=cuda.device, dtype=torch.bfloat16)
    lengths = [cuda.tensor(np.int32(x)) for x in ([0, 1, 2], [30, 30])]
    ids = cuda.tensor(np.int32([1, 2, 3, 4]))
    fp.append_paged_kv(
        k, k, *caches, *lengths, page_indptr=cuda.tensor(np.int32(indptr)), page_indices=ids
    )
    assert not caches.any()


def test_append_in_a_graph(cuda, torch):
    """One graph serves every batch up to its bounds: lengths and pages are read on the device."""
    first = Append(spare_rows=2032, num_kv_heads=8, dims=(128, 128))
    tensors, options = first.arguments(cuda)
    fp.append_paged_kv(*tensors, **options)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp.append_paged_kv(*tensors, **options)

    second = dataclasses.replace(
        first, new_lens=(0, 4, 12, 1, 40), kv_lens=(3, 20, 12, 1, 40), spare_rows=2000
    )
    expected = second.expected()
    others, other_options = second.arguments(cuda)
    for target, source in zip(tensors, others, strict=True):
        target.copy_(source)
    options["block_table"].copy_(other_options["block_table"])
    graph.replay()
    torch.cuda.synchronize()
    for tensor, wanted in zip(tensors[2:4], expected, strict=True):
        assert np.array_equal(bits(cuda.array(tensor)), bits(wanted))


def test_ops_on_another_stream(cuda, torch):
    """What `stream` names is used: work queued on it before the call has been done by then."""
    append, stream = Append(), torch.cuda.Stream()
    tensors, options = append.arguments(cuda)
    new = [x.clone() for x in tensors[:2]]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for tensor in tensors[:2]:
            tensor.zero_()
        torch.cuda._sleep(50_000_000)
        for tensor, values in zip(tensors[:2], new, strict=True):
            tensor.copy_(values)
    fp.append_paged_kv(*tensors, **options, stream=stream)
    stream.synchronize()
    for cache, tensor, wanted in zip(append.caches, tensors[2:4], append.expected(), strict=True):
        cuda.fetch(cache, tensor)
        assert np.array_equal(bits(owner_of(cache)), bits(wanted))
