# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests share: what is planned, and that results do not depend on it."""

import dataclasses
import itertools

import numpy as np
import pytest

import flashplan as fp
from case import Case
from feature_cases import PREFIXES
from frameworks import NumPy, bits
from inputs import indptr, make_inputs
from solve import Runner, problem

PAGE = 4


def tables_of(rows):
    """The same page table in both forms; ids behind a row's last are not to be read."""
    block_table = np.full((len(rows), max(map(len, rows)) + 1), -7, np.int32)
    for to, row in zip(block_table, rows, strict=True):
        to[: len(row)] = row
    page_indices = np.concatenate([*rows, [-7]]).astype(np.int32)
    csr = {"page_indptr": indptr([len(row) for row in rows]), "page_indices": page_indices}
    return {"block_table": block_table}, csr


def find(qo_lens, kv_lens, rows):
    found = [
        fp.find_shared_prefixes(indptr(qo_lens), np.array(kv_lens, np.int32), PAGE, **tables)
        for tables in tables_of(rows)
    ]
    assert found[0].dtype == np.int32
    assert found[0].shape == (len(found[0]), 3)
    assert np.array_equal(*found)
    return found[0].tolist()


def slow_groups(qo_lens, kv_lens, rows):
    """Every run of neighbours that cannot grow without sharing less."""
    old = [max(kv - qo, 0) for qo, kv in zip(qo_lens, kv_lens, strict=True)]
    tokens = [[(page, i) for page in row for i in range(PAGE)] for row in rows]

    def common(first, last):
        keys = [tokens[r][: old[r]] for r in range(first, last + 1)]
        same = itertools.takewhile(lambda at: len(set(at)) == 1, zip(*keys, strict=False))
        return sum(1 for _ in same)

    size = len(rows)
    groups = []
    for first, last in itertools.combinations(range(size), 2):
        n = common(first, last)
        grows = [(first - 1, last)] * (first > 0) + [(first, last + 1)] * (last + 1 < size)
        if n > 0 and all(common(*wider) < n for wider in grows):
            groups.append([first, last - first + 1, n])
    return sorted(groups, key=lambda group: (group[0], -group[1]))


def test_prefixes_are_found(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        size = int(rng.integers(1, 9))
        kv_lens = rng.integers(0, 30, size).tolist()
        qo_lens = [int(rng.integers(0, 4)) for _ in range(size)]
        rows = [rng.integers(0, 2, -(-n // PAGE)).tolist() for n in kv_lens]
        for row in rows:
            same = min(int(rng.integers(0, 6)), len(row))
            row[:same] = [5] * same
        found = find(qo_lens, kv_lens, rows)
        assert found == slow_groups(qo_lens, kv_lens, rows)
        attn = fp.Attention(4, 2, 8, page_size=PAGE, device="cpu")
        attn.plan(indptr(qo_lens), kv_lens, shared_prefixes=found)


def test_long_prefixes_are_found():
    """More pages than are compared at once."""
    for length in (63, 64, 65, 128, 200):
        row = np.arange(300)
        other = np.where(np.arange(300) < length, row, row + 1000)
        assert find([1, 1], [1200, 1200], [row, other]) == [[0, 2, length * PAGE]]


def test_prefixes_of_few_requests():
    assert find([1], [9], [[1, 2, 3]]) == []
    none = np.zeros((0, 1), np.int32)
    assert fp.find_shared_prefixes([0], [], 16, block_table=none).shape == (0, 3)


SHARED = Case((1,) * 24, (1500,) * 24, num_qo_heads=8, shared_prefixes=((0, 24, 1400),), num_ctas=7)


def described(case):
    inputs = make_inputs(case, seed=0)
    attn = fp.Attention(**case.options())
    return attn.plan(*inputs.plan_args(), **inputs.plan_options()).describe()


@pytest.mark.parametrize("case", PREFIXES, ids=str)
def test_groups_do_not_change_results(case):
    inputs, exact, _ = problem(case, 0)
    runner = Runner(case)
    with_groups = runner.run(inputs, NumPy())
    plain = dataclasses.replace(inputs, shared_prefixes=None)
    without = runner.run(plain, NumPy())
    scale = np.abs(exact[0]).max()
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[case.q_dtype] * scale
    assert np.allclose(with_groups[0].astype(float), without[0].astype(float), atol=tolerance)
    assert np.allclose(with_groups[1], without[1], rtol=1e-5, atol=1e-5)
    if case.batch_invariant:
        assert np.array_equal(bits(with_groups[0]), bits(without[0]))
    # Nothing of the groups is left in the next plan.
    assert np.array_equal(bits(runner.run(inputs, NumPy())[0]), bits(with_groups[0]))


def test_most_cases_share():
    shares = [
        "computed once: " in described(case) and "none" not in described(case) for case in PREFIXES
    ]
    assert sum(shares) >= len(shares) // 2


def test_the_decision_is_described():
    text = described(SHARED)
    assert "1 shared prefixes given, 1 row tiles of them computed once" in text
    assert "p0: keys [0, 1376) of requests 0 to 23" in text
    assert " p0.0 h" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window_left": 2000}, "window_left"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"rope": "plain"}, "rope"),
        ({"shared_prefixes": ((0, 24, 31),)}, "it would take no less time"),
    ],
)
def test_why_nothing_is_shared(changes, reason):
    text = described(dataclasses.replace(SHARED, **changes))
    assert f"1 shared prefixes given, none computed once: {reason}" in text


def test_a_plan_without_groups_says_nothing_of_them():
    assert "shared" not in described(dataclasses.replace(SHARED, shared_prefixes=()))


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 2, 8]],
        [(0, 2, 8)],
        ((0, 2, 8),),
        np.array([[0, 2, 8]]),
        np.array([[0, 2, 8]], np.uint8),
        np.array([[0, 0, 2, 2, 8, 8]], np.int32)[:, ::2],
        np.array([[0], [2], [8]], np.int32).T,
        np.lib.stride_tricks.as_strided(np.array([0, 7, 2, 7, 8], np.int32), (1, 3), (12, 8)),
        [],
        np.zeros((0, 3), np.int32),
    ],
    ids=str,
)
def test_groups_are_lists_or_tensors(groups):
    attn = fp.Attention(4, 2, 8, device="cpu")
    text = attn.plan([0, 1, 2], [9, 12], shared_prefixes=groups).describe()
    assert ("1 shared prefixes given" in text) == (len(groups) == 1)


def test_crossing_groups_are_refused():
    attn = fp.Attention(4, 2, 8, device="cpu")
    lens = [0, 1, 2, 3], [9, 9, 9]
    with pytest.raises(ValueError, match=r"shared_prefixes\[0\]: expected .+, got requests 1 to 2"):
        attn.plan(*lens, shared_prefixes=[[1, 2, 4], [0, 2, 4]])


def test_small_workspace_shares_less():
    """Partial results of all requests must fit; what does not fit is not shared."""
    inputs, exact, _ = problem(SHARED, 0)
    attn = fp.Attention(**SHARED.options())
    counts = set()
    for percent in range(100, 0, -5):
        workspace = np.zeros(attn.workspace_bytes * percent // 100, np.uint8)
        try:
            small = fp.Attention(**SHARED.options(), workspace=workspace)
        except ValueError:
            break
        plan = small.plan(*inputs.plan_args(), **inputs.plan_options())
        counts.add(plan.num_partial_rows)
        o = small.run(inputs.q, inputs.k, inputs.v, block_table=inputs.block_table)
        assert np.allclose(o.astype(float), exact[0], atol=0.02)
    assert len(counts) > 1
    assert "none computed once" in plan.describe()


def test_real_lengths_must_hold_the_prefixes():
    rng = np.random.default_rng(0)
    table = np.array([[*range(20), 20], [*range(20), 21], [22] * 21], np.int32)
    k, v = rng.standard_normal((2, 23, 16, 2, 8), np.float32)
    q = rng.standard_normal((3, 4, 8), np.float32)
    attn = fp.Attention(4, 2, 8, page_size=16, q_dtype="float32", device="cpu")
    attn.plan([0, 1, 3, 3], [330, 336, 9], shared_prefixes=[[0, 2, 320]])
    lens = np.array([321, 322, 0], np.int32)
    attn.run(q, k, v, block_table=table, kv_lens=lens)
    out = np.full((3, 4, 8), np.nan, np.float32)
    for request, least in ((0, 321), (1, 322)):
        short = lens.copy()
        short[request] -= 1
        expected = rf"^kv_lens\[{request}\]: expected >= {least}, .*shared_prefixes\[0\]"
        with pytest.raises(ValueError, match=expected):
            attn.run(q, k, v, block_table=table, kv_lens=short, out=out)
    assert np.isnan(out).all()
