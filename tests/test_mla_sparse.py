# SPDX-License-Identifier: Apache-2.0
"""Attention over lists of keys (topk) on the CPU, against a float64 reference."""

import dataclasses

import numpy as np
import pytest

import flashplan as fp
import reference
from frameworks import bits
from mla_cases import DIMS, SCALE, ds_mla_rows, real_keys

INT_MIN, INT_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class SparseCase:
    qo_lens: tuple[int, ...] = (1, 2, 0, 1)
    kv_lens: tuple[int, ...] = (90, 40, 7, 3)
    topk: int = 64
    columns: int | None = None  # of the lists; default: topk
    num_heads: int = 16
    dims: tuple[int, int] = DIMS
    page_size: int = 16
    q_dtype: str = "bfloat16"
    kv_dtype: str | None = None
    pair: bool = False
    strided: bool = False
    lens: bool = False  # topk_lens are given
    sinks: bool = False
    num_ctas: int | None = None
    batch_invariant: bool = False

    def __str__(self):
        default = SparseCase()
        fields = (f.name for f in dataclasses.fields(self))
        changed = (n for n in fields if getattr(self, n) != getattr(default, n))
        return "-".join(f"{n}={getattr(self, n)}" for n in changed).replace(" ", "") or "default"

    def attention(self):
        return fp.Attention(
            self.num_heads,
            1,
            self.dims,
            shared_kv=True,
            topk=self.topk,
            softmax_scale=SCALE,
            page_size=self.page_size,
            q_dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
            max_batch_size=max(1, len(self.qo_lens)),
            max_qo_tokens=max(1, sum(self.qo_lens)),
            num_ctas=self.num_ctas,
            batch_invariant=self.batch_invariant,
            device="cpu",
        )


CASES = [
    SparseCase(),
    SparseCase(columns=40),
    SparseCase(topk=2048, kv_lens=(2500, 2048, 7, 300), num_ctas=7),
    SparseCase(topk=2048, kv_lens=(2500, 2048), num_ctas=7, num_heads=128, qo_lens=(1, 1)),
    SparseCase(topk=2048, kv_lens=(2500, 2048, 7, 300), num_ctas=5, batch_invariant=True),
    SparseCase(lens=True, sinks=True, pair=True),
    SparseCase(lens=True, columns=50, topk=100, kv_lens=(90, 80, 7, 60), strided=True),
    SparseCase(page_size=1, num_heads=8, q_dtype="float16"),
    SparseCase(page_size=64, kv_dtype="fp8_ds_mla", num_heads=64),
    SparseCase(kv_dtype="float8_e4m3fn", pair=True, lens=True),
    SparseCase(dims=(512, 512), q_dtype="float32"),
    SparseCase(qo_lens=(40, 30), kv_lens=(400, 300), num_heads=4, dims=(72, 64)),
    SparseCase(kv_lens=(0, 1, 0, 0)),
    SparseCase(qo_lens=(0, 0), kv_lens=(3, 4)),
]


@dataclasses.dataclass
class SparseInputs:
    q: np.ndarray
    cache: np.ndarray
    lists: np.ndarray
    lens: np.ndarray | None
    sinks: np.ndarray | None
    seen: list  # of each token: the slots that it sees, each as often as it is listed

    def arguments(self):
        arguments = {"topk_indices": self.lists, "topk_lens": self.lens, "sinks": self.sinks}
        return {name: x for name, x in arguments.items() if x is not None}


def make_inputs(case, seed):
    """Unlisted keys, and what lies behind lists and lengths, must not be read: keys are NaN, and
    entries name keys that are NaN, or are far outside."""
    rng = np.random.default_rng(seed)
    num_pages = sum(case.kv_lens) // case.page_size + 5
    num_slots = num_pages * case.page_size
    tokens = sum(case.qo_lens)
    keys = rng.standard_normal((num_slots, case.dims[0]), np.float32)
    slots = rng.permutation(num_slots)
    listed, nan_slots = slots[: num_slots // 2], slots[num_slots // 2 :]
    if case.kv_dtype == "fp8_ds_mla":
        rows = ds_mla_rows(keys)
        rows[nan_slots] = 0xFF
    else:
        keys[nan_slots] = np.nan
        rows = keys.astype(case.kv_dtype or case.q_dtype)
    shape = (num_pages, case.page_size, rows.shape[1])
    memory = np.zeros((*shape[:2], shape[2] + 16 * case.strided), rows.dtype)
    cache = memory[..., : shape[2]]
    cache[...] = rows.reshape(shape)
    columns = case.columns or case.topk
    outside = [-1, INT_MIN, num_slots, INT_MAX]
    lists = rng.choice([-1, -7, num_slots], (tokens + 2, columns + 3)).astype(np.int32)[:, :columns]
    lens = np.full(tokens, columns)
    seen = []
    requests = np.repeat(np.arange(len(case.qo_lens)), case.qo_lens)
    for token, request in enumerate(requests):
        most = min(case.topk, case.kv_lens[request], columns)
        own = rng.choice(listed, most).astype(np.int32)  # some twice
        own = np.where(rng.random(most) < 0.2, rng.choice(outside, most), own)
        lists[token, :most] = own
        if case.lens:
            lens[token] = rng.integers(0, most + 1)
            lists[token, lens[token] :] = rng.choice(nan_slots)
            own = own[: lens[token]]
        seen.append(own[(own >= 0) & (own < num_slots)])
    q = np.full((tokens + 2, case.num_heads, case.dims[0]), np.nan, case.q_dtype)
    q[:tokens] = rng.standard_normal(q[:tokens].shape, np.float32)
    lens = lens.astype(np.int32) if case.lens else None
    sinks = rng.standard_normal(case.num_heads, np.float32) if case.sinks else None
    return SparseInputs(q, cache, lists, lens, sinks, seen)


def run(case, inputs, attn=None):
    attn = attn or case.attention()
    indptr = np.concatenate([[0], np.cumsum(case.qo_lens)])
    attn.plan(indptr, case.kv_lens)
    cache = inputs.cache
    if case.pair:
        cache = (cache[..., : case.dims[1]], np.array(cache[..., case.dims[1] :]))
    return attn.run(inputs.q, cache, **inputs.arguments(), return_lse=True)


def expected(case, inputs, **options):
    stored = inputs.cache.reshape(-1, inputs.cache.shape[-1])
    results = []
    for token, slots in enumerate(inputs.seen):
        keys = real_keys(np.ascontiguousarray(stored[slots]))[:, None]
        results.append(
            reference.attention(
                inputs.q[token : token + 1],
                keys,
                keys[..., : case.dims[1]],
                causal=False,
                softmax_scale=SCALE,
                sinks=inputs.sinks,
                **options,
            )
        )
    shape = (0, case.num_heads)
    o = np.concatenate([np.zeros((*shape, case.dims[1])), *(o for o, _ in results)])
    return o, np.concatenate([np.zeros(shape), *(lse for _, lse in results)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sparse(case, seed):
    inputs = make_inputs(case, seed)
    o, lse = run(case, inputs)
    exact, twin = expected(case, inputs), expected(case, inputs, dtype=case.q_dtype)
    empty = np.isneginf(exact[1])
    assert np.array_equal(np.isneginf(lse), empty)
    assert np.all(o[empty] == 0)
    for actual, wanted, rounded, unit in zip((o, lse), exact, twin, (20, 10), strict=True):
        finite = np.where(np.isfinite(wanted), wanted, 0)
        given = np.where(np.isfinite(wanted), actual, 0).astype(actual.dtype)
        rounded = np.where(np.isfinite(wanted), rounded, 0).astype(o.dtype if unit == 20 else "f")
        reference.assert_close(given, finite, rounded, unit=unit, what="result")


def test_a_list_of_all_keys_is_dense_attention(seed):
    """Up to roundings: in the order of the keys, the same bits."""
    case = SparseCase(qo_lens=(1, 1), kv_lens=(90, 33), topk=128)
    rng = np.random.default_rng(seed)
    cache = rng.standard_normal((9, 16, 576), np.float32).astype("bfloat16")
    q = rng.standard_normal((2, 16, 576), np.float32).astype("bfloat16")
    pages = rng.permutation(9)[:8].astype(np.int32)
    table = np.stack([pages[:6], np.append(pages[5:8], [0, 0, 0])]).astype(np.int32)
    lists = np.full((2, 128), -1, np.int32)
    for r, kv_len in enumerate(case.kv_lens):
        key = np.arange(kv_len)
        lists[r, :kv_len] = table[r, key // 16] * 16 + key % 16
    sparse = case.attention()
    sparse.plan([0, 1, 2], case.kv_lens)
    options = sparse.options | {"topk": None}
    dense = fp.Attention(**options)
    dense.plan([0, 1, 2], case.kv_lens)
    wanted = dense.run(q, cache, block_table=table)
    assert np.array_equal(bits(sparse.run(q, cache, topk_indices=lists)), bits(wanted))


def test_tokens_do_not_depend_on_their_neighbours(seed):
    """Batch invariant, with lists that are split."""
    case = SparseCase(
        qo_lens=(2, 3),
        kv_lens=(2500, 2100),
        topk=2048,
        num_heads=4,
        num_ctas=1,
        batch_invariant=True,
    )
    inputs = make_inputs(case, seed)
    wanted = run(case, inputs)
    for num_ctas in (3, 8):
        other = dataclasses.replace(case, num_ctas=num_ctas)
        for actual, expect in zip(run(other, inputs), wanted, strict=True):
            assert np.array_equal(bits(actual), bits(expect))
    alone = dataclasses.replace(case, qo_lens=(1,), kv_lens=(2100,))
    last = dataclasses.replace(inputs, q=inputs.q[4:], lists=inputs.lists[4:])
    for actual, expect in zip(run(alone, last), wanted, strict=True):
        assert np.array_equal(bits(actual[0]), bits(expect[4]))


def test_repeated_keys_count_each_time():
    attn = SparseCase(dims=(16, 8), q_dtype="float32", num_heads=1, topk=4, page_size=1).attention()
    attn.plan([0, 1], [4])
    cache = np.zeros((2, 1, 16), np.float32)
    cache[0, 0, :8], cache[1, 0, :8] = 1, 4
    q = np.zeros((1, 1, 16), np.float32)
    lists = np.array([[0, 1, 0, -1]], np.int32)
    o, lse = attn.run(q, cache, topk_indices=lists, return_lse=True)
    assert np.allclose(o, 2) and np.allclose(lse, np.log(3))


def test_describe_counts_lists():
    attn = SparseCase().attention()
    attn.plan([0, 1, 3], [90, 40])
    assert "3 lists of keys, 3 query tokens, 144 keys" in attn.plan([0, 1, 3], [90, 40]).describe()
    assert attn.options["topk"] == 64
    assert fp.Attention(**attn.options).options == attn.options


def test_planning_allocates_for_the_most_tokens(seed):
    """Many tokens in one request: each of them is scheduled by itself."""
    case = SparseCase(qo_lens=(300,), kv_lens=(500,), topk=8, num_heads=2, dims=(24, 16))
    attn = case.attention()
    for tokens in (300, 0, 17):
        batch = dataclasses.replace(case, qo_lens=(tokens,))
        inputs = make_inputs(batch, seed)
        o, lse = run(batch, inputs, attn)
        exact = expected(batch, inputs)
        assert np.allclose(lse, exact[1], rtol=1e-3, atol=2e-2)
        assert o.shape == (tokens, 2, 16)
