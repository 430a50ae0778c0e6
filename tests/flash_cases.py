# SPDX-License-Identifier: Apache-2.0
"""Calls of flashplan.flash_attn against the reference, on the CPU or a GPU.

`device` is a framework of frameworks.py. Sequences are lists of their queries, keys and values.
"""

import dataclasses

import ml_dtypes
import numpy as np

import reference

POISON = float("nan")


@dataclasses.dataclass(frozen=True)
class Call:
    """Options of one call, and the shapes of what it gets."""

    causal: bool = True
    window_size: tuple = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    dtype: str = "float32"
    kv_dtype: str | None = None
    heads: tuple = (4, 2)
    dims: tuple = (64, 64)
    page_size: int = 16
    sinks: bool = False
    scaled: bool = False
    alibi: str | None = None  # slopes of "heads", the same for all sequences, or of "sequences"

    def options(self):
        return {
            "causal": self.causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "softmax_scale": self.softmax_scale,
        }

    def __str__(self):
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(changed) or "plain"


CALLS = [
    Call(),
    Call(causal=False),
    Call(heads=(6, 1), dims=(64, 32), softmax_scale=0.3),
    Call(window_size=(5, -1), causal=False),
    Call(window_size=(9, 9)),
    Call(window_size=(-1, 0), causal=False),
    Call(window_size=(5, 3), causal=False),
    Call(window_size=(-1, 2), causal=False, softcap=2.0, sinks=True),
    Call(alibi="heads"),
    Call(alibi="sequences", window_size=(9, 3), causal=False),
    Call(softcap=2.0, sinks=True),
    Call(page_size=5),
    Call(dtype="bfloat16"),
    Call(dtype="float16", kv_dtype="float8_e4m3fn", scaled=True),
    Call(dtype="float8_e4m3fn", scaled=True),
]


class Batch:
    """Random sequences of these lengths, and what attention of them is."""

    def __init__(self, rng, call, qo_lens, kv_lens):
        self.rng, self.call = rng, call
        self.qo_lens, self.kv_lens = qo_lens, kv_lens
        kv_dtype = call.kv_dtype or call.dtype
        self.q = [self.normal(n, call.heads[0], call.dims[0], call.dtype) for n in qo_lens]
        self.k = [self.normal(n, call.heads[1], call.dims[0], kv_dtype) for n in kv_lens]
        self.v = [self.normal(n, call.heads[1], call.dims[1], kv_dtype) for n in kv_lens]
        self.scales = rng.uniform(0.5, 2, (3, call.heads[1])).astype(np.float32)
        # Of 16 bits, or 32; those of 8 bits have results of bfloat16.
        self.o_dtype = "bfloat16" if call.dtype.startswith("float8") else call.dtype
        self.sinks = rng.normal(size=call.heads[0]).astype(np.float32)
        self.slopes = rng.uniform(0, 0.5, (len(qo_lens), call.heads[0])).astype(np.float32)
        if call.alibi == "heads":
            self.slopes[1:] = self.slopes[:1]

    def normal(self, tokens, heads, dim, dtype):
        return self.rng.standard_normal((tokens, heads, dim)).astype(np.dtype(dtype))

    def extra(self, device, num_sequences):
        """Sinks and scales, as arguments."""
        arguments = {}
        if self.call.sinks:
            arguments["s_aux"] = device.tensor(self.sinks)
        if self.call.alibi:
            slopes = self.slopes[0] if self.call.alibi == "heads" else self.slopes
            arguments["alibi_slopes"] = device.tensor(slopes)
        if self.call.scaled:
            names = ("k_descale", "v_descale", "q_descale")
            for name, scales in zip(names, self.scales):
                arguments[name] = device.tensor(scales)[None].expand(num_sequences, -1)
        return arguments

    def check(self, o, lse):
        """o [tokens, heads, dim] and lse [heads, tokens], as NumPy arrays."""
        call = self.call
        left, right = call.window_size
        options = {
            "causal": call.causal or right == 0,
            "window_left": left,
            "softcap": call.softcap,
            "softmax_scale": call.softmax_scale,
            "sinks": self.sinks if call.sinks else None,
        }
        bodies = {}
        if right >= 0 and not options["causal"]:
            bodies["mask"] = lambda request, query, key, *_: key <= query + right
        if call.alibi:
            bodies["logits"] = lambda x, request, query, key, qo_head, *_: (
                x - self.slopes[request, qo_head] * np.abs(key - query)
            )
        options["bodies"] = bodies
        if call.scaled:
            k_scale, v_scale, q_scale = self.scales
            if call.dtype.startswith("float8"):  # other queries ignore it
                k_scale = k_scale * q_scale
            options |= {"k_scale": k_scale, "v_scale": v_scale}
        qo_indptr = np.cumsum([0, *self.qo_lens])
        arguments = (np.concatenate(self.q), list(zip(self.k, self.v)), qo_indptr)
        exact = reference.batch_attention(*arguments, **options)
        twin = reference.batch_attention(*arguments, **options, dtype=self.o_dtype)
        unit = max((float(np.abs(v.astype(np.float32)).max(initial=0)) for v in self.v), default=0)
        reference.assert_close(o, exact[0], twin[0], unit=unit * 4, what="o")
        largest = np.abs(np.where(np.isfinite(exact[1]), exact[1], 0)).max(initial=1)
        reference.assert_close(lse.T, exact[1], twin[1], unit=largest, what="lse")

    def paged(self, extra_columns=2, pages=None):
        """(k_cache, v_cache, block_table), pages in random order. Slots without a key hold NaN, and
        ids behind the last page of a sequence are -1."""
        size, call = self.call.page_size, self.call
        counts = pages or [-(-n // size) for n in self.kv_lens]
        ids = self.rng.permutation(sum(counts) + 3)
        table = np.full((len(counts), max(counts, default=0) + extra_columns), -1, np.int32)
        dtype = self.k[0].dtype
        caches = [
            np.full((len(ids), size, call.heads[1], dim), POISON, np.float32).astype(dtype)
            for dim in call.dims
        ]
        begin = 0
        for row, (count, k, v) in enumerate(zip(counts, self.k, self.v)):
            table[row, :count] = ids[begin : begin + count]
            begin += count
            for cache, tokens in zip(caches, (k, v)):
                for j, token in enumerate(tokens):
                    cache[table[row, j // size], j % size] = token
        return (*caches, table)


def ends_of(device, lens):
    return device.tensor(np.cumsum([0, *lens]).astype(np.int32))


def int32(device, numbers):
    return device.tensor(np.array(numbers, np.int32))


def check_func(device, rng, call, flash):
    batch_size, qo_len, kv_len = 3, 5, 21
    batch = Batch(rng, call, [qo_len] * batch_size, [kv_len] * batch_size)
    q, k, v = (device.tensor(np.stack(x)) for x in (batch.q, batch.k, batch.v))
    arguments = call.options() | batch.extra(device, batch_size)
    o, lse = flash.flash_attn_func(q, k, v, return_softmax_lse=True, **arguments)
    assert lse.shape == (batch_size, call.heads[0], qo_len)
    assert lse.is_contiguous()
    batch.check(device.array(o.flatten(0, 1)), rows_of(device, lse))
    alone = flash.flash_attn_func(q, k, v, **arguments)
    assert device.torch.equal(alone, o)


def rows_of(device, lse):
    """[heads, tokens] from [batch, heads, tokens]."""
    return device.array(lse.transpose(0, 1).flatten(1).contiguous())


VARLEN = ([1, 7, 0, 3, 4], [30, 7, 9, 1, 0])


def check_varlen(device, rng, call, flash, qo_lens=VARLEN[0], kv_lens=VARLEN[1]):
    """Ragged keys."""
    batch = Batch(rng, call, qo_lens, kv_lens)
    q, k, v = (device.tensor(np.concatenate(x)) for x in (batch.q, batch.k, batch.v))
    ends = (ends_of(device, qo_lens), ends_of(device, kv_lens))
    longest = (max(qo_lens), max(kv_lens))
    arguments = call.options() | batch.extra(device, len(qo_lens))
    results = flash.flash_attn_varlen_func(
        q, k, v, *ends, *longest, return_softmax_lse=True, **arguments
    )
    batch.check(*(device.array(x) for x in results))


def check_varlen_paged(device, rng, call, flash, qo_lens=VARLEN[0], kv_lens=VARLEN[1], used=False):
    batch = Batch(rng, call, qo_lens, kv_lens)
    k_cache, v_cache, table = (device.tensor(x) for x in batch.paged())
    q = device.tensor(np.concatenate(batch.q))
    name = "seqused_k" if used else "cu_seqlens_k"
    lens = int32(device, kv_lens) if used else ends_of(device, kv_lens)
    dtype = getattr(device.torch, batch.o_dtype)
    out = device.torch.full((*q.shape[:2], call.dims[1]), POISON, dtype=dtype, device=q.device)
    arguments = call.options() | batch.extra(device, len(qo_lens)) | {name: lens}
    o, lse = flash.flash_attn_varlen_func(
        q=q,
        k=k_cache,
        v=v_cache,
        cu_seqlens_q=ends_of(device, qo_lens),
        max_seqlen_q=max(qo_lens),
        max_seqlen_k=max(kv_lens),
        block_table=table,
        out=out,
        return_softmax_lse=True,
        **arguments,
    )
    assert o is out
    batch.check(device.array(o), device.array(lse))


def check_kvcache(device, rng, call, flash, qo_len=1, kv_lens=(40, 0, 3, 17)):
    """A paged cache; the sequence of length 0 is a padded row, whose page ids are all -1."""
    batch = Batch(rng, call, [qo_len] * len(kv_lens), list(kv_lens))
    k_cache, v_cache, table = (device.tensor(x) for x in batch.paged())
    o, lse = flash.flash_attn_with_kvcache(
        device.tensor(np.stack(batch.q)),
        k_cache,
        v_cache,
        cache_seqlens=int32(device, kv_lens),
        page_table=table,
        return_softmax_lse=True,
        **call.options(),
        **batch.extra(device, len(kv_lens)),
    )
    assert lse.shape == (len(kv_lens), call.heads[0], qo_len)
    batch.check(device.array(o.flatten(0, 1)), rows_of(device, lse))


def check_kvcache_places(device, rng, call, flash, append):
    """A cache with a place for each sequence, chosen by cache_batch_idx."""
    kv_lens, qo_len, places, cache_len = [20, 4, 9], 3, [4, 0, 2], 24
    batch = Batch(rng, call, [qo_len] * 3, kv_lens)
    caches = []
    for tokens, dim in zip((batch.k, batch.v), call.dims):
        cache = np.full((5, cache_len, call.heads[1], dim), POISON).astype(tokens[0].dtype)
        for place, rows in zip(places, tokens):
            kept = rows[: len(rows) - qo_len] if append else rows
            cache[place, : len(kept)] = kept
        caches.append(device.tensor(cache))
    given = [n - qo_len if append else n for n in kv_lens]
    new = [device.tensor(np.stack([x[-qo_len:] for x in y])) for y in (batch.k, batch.v)]
    o, lse = flash.flash_attn_with_kvcache(
        device.tensor(np.stack(batch.q)),
        *caches,
        *(new if append else ()),
        cache_seqlens=int32(device, given),
        cache_batch_idx=int32(device, places),
        return_softmax_lse=True,
        **call.options(),
        **batch.extra(device, 3),
    )
    batch.check(device.array(o.flatten(0, 1)), rows_of(device, lse))


def check_kvcache_append(device, rng, call, flash, ragged):
    """New keys are written behind the old ones of a paged cache."""
    new_lens = [2, 1, 4] if ragged else [2, 2, 2]
    kv_lens = [33, 2, 16]
    batch = Batch(rng, call, new_lens, kv_lens)
    k_cache, v_cache, table = batch.paged()
    wanted = k_cache.copy()
    for cache in (k_cache, v_cache):
        for row, (kv_len, new) in enumerate(zip(kv_lens, new_lens)):
            for j in range(kv_len - new, kv_len):
                page = table[row, j // call.page_size]
                cache[page, j % call.page_size] = np.array(POISON).astype(cache.dtype)
    tokens = [[x[-n:] for x, n in zip(y, new_lens)] for y in (batch.k, batch.v)]
    join = np.concatenate if ragged else np.stack
    ends = ends_of(device, new_lens)
    ragged_arguments = {"cu_seqlens_q": ends, "cu_seqlens_k_new": ends, "max_seqlen_q": 4}
    caches = [device.tensor(x) for x in (k_cache, v_cache)]
    o, lse = flash.flash_attn_with_kvcache(
        device.tensor(join(batch.q)),
        *caches,
        *(device.tensor(join(x)) for x in tokens),
        cache_seqlens=int32(device, [n - new for n, new in zip(kv_lens, new_lens)]),
        block_table=device.tensor(table),
        return_softmax_lse=True,
        **(ragged_arguments if ragged else {}),
        **call.options(),
        **batch.extra(device, 3),
    )
    if not ragged:
        o, lse = o.flatten(0, 1), lse.transpose(0, 1).flatten(1).contiguous()
    batch.check(device.array(o), device.array(lse))
    written = device.array(caches[0]).astype(np.float32)
    assert np.array_equal(written, wanted.astype(np.float32), equal_nan=True)


assert ml_dtypes.bfloat16  # registers the names of dtypes with NumPy


def arguments_of(torch, name):
    """Positional arguments of a small valid call of this function."""
    q, k = torch.ones(2, 1, 4, 64), torch.ones(2, 16, 2, 64)
    if name != "flash_attn_varlen_func":
        return [q, k, k]
    ends_q, ends_k = torch.arange(3), torch.arange(3) * 16
    rows = (q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1))
    return [*rows, ends_q, ends_k, 1, 16]
