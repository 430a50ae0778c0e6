# SPDX-License-Identifier: Apache-2.0
"""Problems of attention over lists of keys (topk)."""

import dataclasses

import numpy as np

import flashplan as fp
import reference
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

    def options(self):
        return {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": 1,
            "head_dim": self.dims,
            "shared_kv": True,
            "topk": self.topk,
            "softmax_scale": SCALE,
            "page_size": self.page_size,
            "q_dtype": self.q_dtype,
            "kv_dtype": self.kv_dtype,
            "max_batch_size": max(1, len(self.qo_lens)),
            "max_qo_tokens": max(1, sum(self.qo_lens)),
            "num_ctas": self.num_ctas,
            "batch_invariant": self.batch_invariant,
            "device": "cpu",
        }

    def attention(self):
        return fp.Attention(**self.options())


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


def make_sparse_inputs(case, seed):
    """Unlisted keys, and what lies behind lists and lengths, must not be read: keys are NaN, and
    entries name keys that are NaN, or are far outside. The CPU refuses keys that are named behind
    the planned lengths: there entries are none."""
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


def run_sparse(case, inputs, attn=None, framework=None):
    """(o, lse) as NumPy arrays, from a plan and a run."""
    tensor = framework.tensor if framework else (lambda x: x)
    array = framework.array if framework else (lambda x: x)
    attn = attn or case.attention()
    attn.plan(np.concatenate([[0], np.cumsum(case.qo_lens)]).astype(np.int32), case.kv_lens)
    cache = inputs.cache
    if case.pair:
        content = case.dims[1]
        cache = (tensor(cache[..., :content]), tensor(np.array(cache[..., content:])))
    else:
        cache = tensor(cache)
    arguments = {name: tensor(x) for name, x in inputs.arguments().items()}
    o, lse = attn.run(tensor(inputs.q), cache, **arguments, return_lse=True)
    return array(o), array(lse)


def expected_sparse(case, inputs, **options):
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


def assert_sparse_correct(case, inputs, o, lse):
    exact, twin = expected_sparse(case, inputs), expected_sparse(case, inputs, dtype=case.q_dtype)
    empty = np.isneginf(exact[1])
    assert np.array_equal(np.isneginf(lse), empty)
    assert np.all(o[empty] == 0)
    for actual, wanted, rounded, unit in zip((o, lse), exact, twin, (20, 10), strict=True):
        finite = np.where(np.isfinite(wanted), wanted, 0)
        given = np.where(np.isfinite(wanted), actual, 0).astype(actual.dtype)
        rounded = np.where(np.isfinite(wanted), rounded, 0).astype(o.dtype if unit == 20 else "f")
        reference.assert_close(given, finite, rounded, unit=unit, what="result")
