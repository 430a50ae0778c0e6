# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests share: what is planned, and that results do not depend on it."""

import dataclasses

import numpy as np
import pytest

import flashplan as fp
from cases import PREFIXES, Case
from frameworks import NumPy, bits
from inputs import make_inputs
from solve import Runner, problem

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
        [],
        np.zeros((0, 3), np.int32),
    ],
    ids=str,
)
def test_groups_are_lists_or_tensors(groups):
    attn = fp.Attention(4, 2, 8, device="cpu")
    text = attn.plan([0, 1, 2], [9, 12], shared_prefixes=groups).describe()
    assert ("1 shared prefixes given" in text) == (len(groups) == 1)


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
