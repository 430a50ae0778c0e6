# SPDX-License-Identifier: Apache-2.0
"""Attention over lists of keys (topk) on the CPU, against a float64 reference."""

import dataclasses

import numpy as np
import pytest

import flashplan as fp
from frameworks import bits
from sparse_cases import (
    SparseCase,
    assert_sparse_correct,
    expected_sparse,
    make_sparse_inputs,
    run_sparse,
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sparse(case, seed):
    inputs = make_sparse_inputs(case, seed)
    assert_sparse_correct(case, inputs, *run_sparse(case, inputs))


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
    inputs = make_sparse_inputs(case, seed)
    wanted = run_sparse(case, inputs)
    for num_ctas in (3, 8):
        other = dataclasses.replace(case, num_ctas=num_ctas)
        for actual, expect in zip(run_sparse(other, inputs), wanted, strict=True):
            assert np.array_equal(bits(actual), bits(expect))
    alone = dataclasses.replace(case, qo_lens=(1,), kv_lens=(2100,))
    last = dataclasses.replace(inputs, q=inputs.q[4:], lists=inputs.lists[4:])
    for actual, expect in zip(run_sparse(alone, last), wanted, strict=True):
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
        inputs = make_sparse_inputs(batch, seed)
        o, lse = run_sparse(batch, inputs, attn)
        exact = expected_sparse(batch, inputs)
        assert np.allclose(lse, exact[1], rtol=1e-3, atol=2e-2)
        assert o.shape == (tokens, 2, 16)
