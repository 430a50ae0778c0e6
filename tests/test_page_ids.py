# SPDX-License-Identifier: Apache-2.0
"""Page ids that no query sees may be anything; those that a query sees are checked on the CPU."""

import numpy as np
import pytest

import flashplan as fp

NUM_PAGES = 64
GARBAGE = (-1, 2**31 - 1, -(2**31), NUM_PAGES)


def tables_of(table, lens, page_size, csr):
    if not csr:
        return {"block_table": table}
    counts = -(-np.asarray(lens) // page_size)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    ids = np.concatenate([row[:n] for row, n in zip(table, counts)]).astype(np.int32)
    return {"page_indptr": indptr, "page_indices": ids}


@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("real_lens", [False, True])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize("window_left", [-1, 0, 3, 40])
def test_ids_that_no_query_sees(rng, page_size, window_left, real_lens, csr):
    """Before the window of the first query, behind the length, and of requests without queries."""
    qo_lens, kv_lens = [1, 7, 0, 3], [90, 33, 20, 2]
    columns = -(-100 // page_size) + 1
    table = rng.integers(0, NUM_PAGES, (4, columns)).astype(np.int32)
    attn = fp.Attention(
        4, 2, 8, page_size=page_size, q_dtype="float32", window_left=window_left, device="cpu"
    )
    q = rng.standard_normal((sum(qo_lens), 4, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, NUM_PAGES, page_size, 2, 8)).astype(np.float32)
    planned = [n + 10 for n in kv_lens] if real_lens else kv_lens
    attn.plan(np.concatenate([[0], np.cumsum(qo_lens)]), planned)
    options = {"kv_lens": np.int32(kv_lens)} if real_lens else {}
    expected = attn.run(q, k, v, **tables_of(table, planned, page_size, csr), **options)

    hidden = table.copy()
    for request, (qo_len, kv_len) in enumerate(zip(qo_lens, kv_lens)):
        first = max(kv_len - qo_len - window_left, 0) if window_left >= 0 else 0
        seen = range(first // page_size, -(-kv_len // page_size)) if qo_len > 0 else ()
        for column in set(range(columns)) - set(seen):
            hidden[request, column] = rng.choice(GARBAGE)
        for column in list(seen)[:1] + list(seen)[-1:]:
            wrong = table.copy()
            wrong[request, column] = rng.choice(GARBAGE)
            tables = tables_of(wrong, planned, page_size, csr)
            name = "page_indices" if csr else rf"block_table\[{request}, {column}\]"
            with pytest.raises(ValueError, match=f"^{name}.*: expected a page in "):
                attn.run(q, k, v, **tables, **options)
    actual = attn.run(q, k, v, **tables_of(hidden, planned, page_size, csr), **options)
    assert np.array_equal(actual, expected)
