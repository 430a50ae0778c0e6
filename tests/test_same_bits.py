# SPDX-License-Identifier: Apache-2.0
"""What must not change a single bit of a result: repetition, threads, neighbours, memory."""

import dataclasses
import random

import numpy as np
import pytest

import flashplan as fp
from batches import BATCH
from case import Case
from frameworks import NumPy, bits
from inputs import rearranged
from solve import Runner, assert_correct, problem, run_arguments


def equal_bits(states, others):
    return all(np.array_equal(bits(x), bits(y)) for x, y in zip(states, others, strict=True))


REPEATED = [
    Case(**BATCH, q_dtype="float32"),
    Case((1,) * 3, (4000, 10, 900), num_ctas=13),
    Case((1,), (9000,), num_qo_heads=8, num_ctas=64, kv_dtype="float8_e4m3fn"),
]


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_same_inputs_give_the_same_bits(case, seed):
    inputs, _, _ = problem(case, seed)
    runner = Runner(case)
    first = [x.copy() for x in runner.run(inputs, NumPy())]
    for _ in range(10):
        assert equal_bits(runner.run(inputs, NumPy()), first)


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_threads_do_not_change_the_bits(case, seed):
    inputs, _, _ = problem(case, seed)
    runner = Runner(dataclasses.replace(case, num_ctas=case.num_ctas or 8))
    before = fp.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 5):
            fp.set_num_threads(num_threads)
            assert fp.get_num_threads() == num_threads
            results.append(runner.run(inputs, NumPy()))
    finally:
        fp.set_num_threads(before)
    assert equal_bits(results[0], results[1])
    assert equal_bits(results[0], results[2])


INVARIANT = [
    Case((1,), (5000,), num_qo_heads=8, batch_invariant=True),
    Case((1,), (1024,), batch_invariant=True, q_dtype="float32"),
    Case((1,), (1025,), batch_invariant=True, q_dtype="float16"),
    Case((3,), (2100,), batch_invariant=True, q_dtype="float32", window_left=1500),
    Case((150,), (1500,), batch_invariant=True, page_size=None),
    Case((40,), (40,), batch_invariant=True, softcap=20.0),
]


@pytest.mark.parametrize("case", INVARIANT, ids=str)
def test_batch_invariance(case, seed):
    """Alone, among neighbours, and on any number of CTAs: the same bits."""
    rng = random.Random(seed)
    inputs, exact, twin = problem(case, seed)
    alone = Runner(case).run(inputs, NumPy())
    assert_correct(case, inputs, exact, twin, *alone)
    for num_ctas in (1, 2, 5, 16, 132):
        lens = [
            (rng.choice((0, 1, 1, 30)), rng.choice((0, 5, 600, 3000)))
            for _ in range(rng.randint(1, 8))
        ]
        place = rng.randint(0, len(lens))
        lens.insert(place, (case.qo_lens[0], case.kv_lens[0]))
        batch, crowd = rearranged(case, inputs, lens, [place], [seed, num_ctas])
        together = Runner(dataclasses.replace(batch, num_ctas=num_ctas)).run(crowd, NumPy())
        rows = slice(*crowd.qo_indptr[place : place + 2])
        assert equal_bits([x[rows] for x in together], alone)


def test_larger_workspace_changes_nothing(seed):
    case = Case(**BATCH)
    inputs, _, _ = problem(case, seed)
    expected = Runner(case).run(inputs, NumPy())
    num_bytes = fp.Attention(**case.options()).workspace_bytes
    workspace = np.full(2 * num_bytes + 256, 0xFF, np.uint8)
    workspace = workspace[-workspace.ctypes.data % 256 :]
    attn = fp.Attention(**case.options(), workspace=workspace)
    assert attn.workspace_bytes == num_bytes
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(case, inputs, NumPy())
    assert equal_bits(attn.run(*args, **kwargs, return_lse=True), expected)
