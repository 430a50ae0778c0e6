# SPDX-License-Identifier: Apache-2.0
"""Sizes near 2^31 and 2^32, in memory that is real but untouched where nothing must be read."""

import ml_dtypes
import numpy as np

import flashplan as fp
from misuse import note
from misuse.arguments import expect
from misuse.calls import pick
from misuse.finding import Finding, kind
from misuse.memory import Pages

NEAR = (2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1)
ENDS = ("v", "k", "k_cache", "v_cache", "block_table", "kv_lens", "indptr", "q", "page_size")


def zeros(*shape, dtype=np.uint8):
    """Zeros that lie in memory only where they are touched."""
    dtype = np.dtype(dtype)
    count = int(np.prod([int(n) for n in shape], dtype=object))
    pages = Pages(count * dtype.itemsize, fill=0)
    return np.ndarray(shape, dtype, pages.bytes)


@kind("huge append")
def huge_append(rng):
    """One new token at the end of a request of any length, in pages of any size."""
    page_size = pick(rng, *NEAR, 2**30, 2**16)
    num_pages = pick(rng, 1, 2) if page_size > 2**16 else pick(rng, 2**15, 2**16 + 1)
    kv_len = min(page_size * num_pages, pick(rng, 1, 2, 2**31 - 1, 2**31 - 2, page_size))
    hnd = bool(rng.integers(2))
    shape = (num_pages, 1, page_size, 1) if hnd else (num_pages, page_size, 1, 1)
    kv_len = min(kv_len, 2**31 - 1)
    note(f"append to {shape}, kv_len {kv_len}")
    k, v = (zeros(*shape).view(ml_dtypes.float8_e4m3fn) for _ in range(2))
    new = np.ones((1, 1, 1), np.float32)
    columns = -(-kv_len // page_size)
    table = zeros(1, columns, dtype=np.int32)
    table[0, -1] = num_pages - 1
    args = np.array([0, 1], np.int32), np.array([kv_len], np.int32)
    options = {"block_table": table, "kv_layout": "HND" if hnd else "NHD"}
    done = expect(set(ENDS), lambda: (fp.append_paged_kv(new, new, k, v, *args, **options), 1))
    if done is None:
        if page_size < 2**31:
            raise Finding(f"append to {shape}, kv_len {kv_len} was refused")
        return
    page, slot = num_pages - 1, (kv_len - 1) % page_size
    for cache in (k, v):
        flat = cache.reshape(num_pages, page_size)
        if float(flat[page, slot]) != 1:
            raise Finding(f"append to {shape}, kv_len {kv_len}: the token is not where it belongs")


@kind("huge cache")
def huge_cache(rng):
    """The last keys of a request of any length, seen through a window."""
    page_size = pick(rng, 2**31 - 1, 2**30, 2**28 + 1, 2**16, None)
    kv_len = int(pick(rng, 2**31 - 1, 2**31 - 2, 2**30 + 1, 2**31 - 100))
    window = int(rng.integers(0, 40))
    note(f"run with page_size {page_size}, kv_len {kv_len}, window_left {window}")
    kv_dtype = "float8_e4m3fn"
    attn = fp.Attention(1, 1, 1, page_size=page_size, q_dtype="float32", kv_dtype=kv_dtype,
                        window_left=window, device="cpu", num_ctas=pick(rng, 1, 4))  # fmt: skip
    attn.plan([0, 1], [kv_len])
    columns = 1 if page_size is None else -(-kv_len // page_size)
    rows = kv_len if page_size is None else columns * page_size
    k, v = (zeros(rows).view(ml_dtypes.float8_e4m3fn) for _ in range(2))
    v[kv_len - window - 1 : kv_len] = 1
    q = np.ones((1, 1, 1), np.float32)
    if page_size is None:
        o = attn.run(q, *(x.reshape(rows, 1, 1) for x in (k, v)))
    else:
        table = np.arange(columns, dtype=np.int32)[None]
        shape = (columns, page_size, 1, 1)
        o = attn.run(q, *(x.reshape(shape) for x in (k, v)), block_table=table)
    if o[0, 0, 0] != 1:
        raise Finding(f"page_size {page_size}, kv_len {kv_len}, window {window}: got {o[0, 0, 0]}")


@kind("huge rows")
def huge_rows(rng):
    """Rows of q, k, v and out far apart, so that offsets pass 2^31 and 2^32."""
    step = pick(rng, *NEAR) // 8 * 4
    note(f"rows {step} bytes apart")
    rows = {}
    for name in ("q", "k", "v", "out"):
        pages = Pages(2 * step + 4, fill=0)
        rows[name] = np.ndarray((3, 1, 1), np.float32, pages.bytes, strides=(step, 4, 4))
    rows["q"][...] = 1
    rows["v"][:, 0, 0] = [1, 2, 4]
    attn = fp.Attention(1, 1, 1, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 3], [3])
    attn.run(**rows)
    expected = [1, 1.5, 7 / 3]
    if not np.allclose(rows["out"][:, 0, 0], expected):
        raise Finding(f"rows {step} bytes apart: got {rows['out'].ravel()}")


@kind("huge bounds")
def huge_bounds(rng):
    """Attention of bounds so large that memory may not do."""
    names = ("num_qo_heads", "num_kv_heads", "head_dim", "max_batch_size", "max_qo_tokens",
             "num_ctas", "page_size")  # fmt: skip
    bounds = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    changed = {str(n) for n in rng.choice(names, int(rng.integers(1, 4)), replace=False)}
    for name in changed:
        bounds[name] = int(pick(rng, *NEAR, 2**20, 2**16, 2**12, 1000, 10**6)) // int(
            pick(rng, 1, 1, 2, 4)
        )
    note(f"Attention of {bounds}")
    limits = {*changed, "head_dim_qk", "head_dim_vo", "num_qo_heads", "workspace", "max_qo_tokens"}
    attn = expect(limits, lambda: fp.Attention(**bounds, q_dtype="float32", device="cpu"))
    if attn is None:
        return
    kv = int(pick(rng, 2**31 - 1, 2**24, 1))
    heads = max(1, bounds["num_qo_heads"])
    rows = int(min(attn._plan.options.max_qo_tokens, 2**24 // heads, pick(rng, 1, 64, 2**16)))
    expect({"qo_indptr", "kv_lens", "kv_indptr"}, lambda: attn.plan([0, rows], [kv]))
    tiles = attn._plan
    if sum(tiles.cta_costs) < 0:
        raise Finding(f"negative cost of {rows} rows and {kv} keys")


@kind("huge merge")
def huge_merge(rng):
    """Stacks of many states of no size, and of few far apart."""
    count = int(pick(rng, 10**5, 2**20, 10**7, 2**31, 2**32 + 1))
    shape = pick(rng, (0, 1, 1), (1, 0, 1), (1, 1, 0))
    note(f"merge of {count} states of shape {shape}")
    o, lse = np.empty((count, *shape), np.float32), None
    if 0 in shape[:2]:
        lse = np.empty((count, *shape[:2]), np.float32)
    else:
        lse = zeros(count, *shape[:2], dtype=np.float32)
        if count > 2**20:
            return  # adds up all of lse
    expect({"o", "o_a", "lse", "lse_a"}, lambda: fp.merge_states(o, lse))
