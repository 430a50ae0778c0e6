# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention is a page table: rows of a BSR mask, page lists of each head, Quest.

A block-sparse row (BSR) mask has blocks of R queries x C keys. With pages of C keys, a block row is
a request whose pages are its nonzero blocks: indptr and indices of the mask are page_indptr and
page_indices. No key is copied. causal=False, since all of a nonzero block is visible.
"""

import numpy as np

import flashplan as fp

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


def dense(q, k, v, visible):
    """Attention of one head in NumPy, for comparison: visible [queries, keys] of bool."""
    logits = np.where(visible, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def csr(lists):
    """(page_indptr, page_indices) of lists of pages."""
    indptr = np.cumsum([0] + [len(pages) for pages in lists]).astype(np.int32)
    return indptr, np.concatenate(lists).astype(np.int32)


def bsr_mask():
    """512 queries and keys, 4 heads, blocks of 64 x 32."""
    rows, columns, num_tokens, heads, dim = 64, 32, 512, 4, 64
    blocks = rng.random((num_tokens // rows, num_tokens // columns)) < 0.3
    blocks[:, 0] = True  # each row has a block
    q, k, v = (normal(num_tokens, heads, dim) for _ in range(3))
    page_indptr, page_indices = csr([np.flatnonzero(row) for row in blocks])

    attn = fp.Attention(
        heads, heads, dim, page_size=columns, causal=False, q_dtype="float32", device="cpu"
    )
    attn.plan(np.arange(0, num_tokens + 1, rows), np.diff(page_indptr) * columns)
    o = attn.run(
        q,
        k.reshape(-1, columns, heads, dim),  # a view: block column c is page c
        v.reshape(-1, columns, heads, dim),
        page_indptr=page_indptr,
        page_indices=page_indices,
    )

    visible = blocks.repeat(rows, axis=0).repeat(columns, axis=1)
    for head in range(heads):
        np.testing.assert_allclose(
            o[:, head], dense(q[:, head], k[:, head], v[:, head], visible), rtol=1e-4, atol=1e-5
        )
    print(f"BSR mask: {blocks.sum()} of {blocks.size} blocks")


def heads_as_requests(cache):
    """A view of a cache [pages, page_size, heads, dim] as one of a single head, whose page
    p * page_size * heads + h is page p of head h. Its pages lie over one another."""
    pages, page_size, heads, dim = cache.shape
    token, last = cache.strides[1], cache.strides[3]
    return np.lib.stride_tricks.as_strided(
        cache,
        ((pages - 1) * page_size * heads + heads, page_size, 1, dim),
        (cache.strides[2], token, cache.strides[2], last),
    )


def pages_of_each_head():
    """A decode of 3 requests with 8 query heads, whose 2 kv heads read different pages."""
    num_pages, page_size, heads, kv_heads, dim = 40, 16, 8, 2, 64
    q = normal(3, heads, dim)
    k_cache, v_cache = normal(2, num_pages, page_size, kv_heads, dim)
    lists = [
        [rng.choice(num_pages, rng.integers(1, 9), replace=False) for _ in range(kv_heads)]
        for _ in range(3)
    ]

    # Each (request, kv head) is a request with the query heads of its group.
    group = heads // kv_heads
    page_indptr, page_indices = csr(
        [pages * page_size * kv_heads + h for own in lists for h, pages in enumerate(own)]
    )
    attn = fp.Attention(
        group, 1, dim, page_size=page_size, causal=False, q_dtype="float32", device="cpu"
    )
    attn.plan(np.arange(3 * kv_heads + 1), np.diff(page_indptr) * page_size)
    o = attn.run(
        q.reshape(-1, group, dim),  # a view
        heads_as_requests(k_cache),
        heads_as_requests(v_cache),
        page_indptr=page_indptr,
        page_indices=page_indices,
    ).reshape(3, heads, dim)

    for r, own in enumerate(lists):
        for head in range(heads):
            k, v = (
                x[own[head // group], :, head // group].reshape(-1, dim) for x in (k_cache, v_cache)
            )
            expected = dense(q[r, head][None], k, v, np.ones((1, len(k)), bool))[0]
            np.testing.assert_allclose(o[r, head], expected, rtol=1e-4, atol=1e-5)
    print(f"pages of each head: {[[len(pages) for pages in own] for own in lists]}")


def quest():
    """Quest (Tang et al., 2024): a decode reads the pages whose keys may have the largest logits.

    For each page and channel the minimum and maximum of the keys give an upper bound of q.k. The
    last page is always read: it holds the newest tokens, and may be partly filled.
    """
    num_pages, page_size, heads, dim, budget = 64, 16, 4, 64, 12
    kv_len = num_pages * page_size - 5
    q = normal(1, heads, dim)
    k_cache, v_cache = normal(2, num_pages, page_size, heads, dim)
    least, most = k_cache.min(axis=1), k_cache.max(axis=1)  # [pages, heads, dim], kept as metadata

    bounds = np.maximum(q * least, q * most).sum(axis=-1)  # [pages, heads]
    chosen = np.sort(np.argsort(-bounds[:-1], axis=0)[: budget - 1], axis=0)
    chosen = np.vstack([chosen, np.full((1, heads), num_pages - 1)])  # [budget, heads]

    page_indptr, page_indices = csr([chosen[:, h] * page_size * heads + h for h in range(heads)])
    attn = fp.Attention(1, 1, dim, page_size=page_size, q_dtype="float32", device="cpu")
    attn.plan(np.arange(heads + 1), [budget * page_size - 5] * heads)
    o = attn.run(
        q.reshape(heads, 1, dim),
        heads_as_requests(k_cache),
        heads_as_requests(v_cache),
        page_indptr=page_indptr,
        page_indices=page_indices,
    ).reshape(1, heads, dim)

    for head in range(heads):
        visible = np.isin(np.arange(kv_len) // page_size, chosen[:, head])[None]
        k, v = (x[:, :, head].reshape(-1, dim)[:kv_len] for x in (k_cache, v_cache))
        np.testing.assert_allclose(
            o[:, head], dense(q[:, head], k, v, visible), rtol=1e-4, atol=1e-5
        )
    print(f"Quest: {budget} of {num_pages} pages for each head")


if __name__ == "__main__":
    bsr_mask()
    pages_of_each_head()
    quest()
