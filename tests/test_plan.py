# SPDX-License-Identifier: Apache-2.0
"""plan() in Python: the schedule that it makes, the arguments that it takes, and its reuse."""

import itertools
import random
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

import flashplan as fp
import reference
from batches import BATCH, DECODE
from case import Case
from cases import CASES
from frameworks import NumPy
from inputs import indptr, make_inputs
from solve import Runner, assert_correct, problem, run_arguments


class WorkTile(NamedTuple):
    cta: int
    request: int
    row_tile: int
    kv_head: int
    num_kv_heads: int
    kv_begin: int
    kv_end: int
    partial_row: int


def make_plan(case, **overrides):
    """(attn, plan); the attn keeps the plan alive."""
    attn = fp.Attention(**case.options() | overrides)
    return attn, attn.plan(indptr(case.qo_lens), np.array(case.kv_lens, np.int32))


def tiles_of(plan):
    return [WorkTile(*tile) for tile in plan.work_tiles]


def check_schedule(case, plan):
    """Every row tile of every head meets each key that one of its rows sees exactly once."""
    group_size = case.num_qo_heads // case.num_kv_heads
    ranges = defaultdict(list)  # (request, row tile, kv head) -> its tiles
    for tile in tiles_of(plan):
        assert 0 <= tile.cta < plan.num_ctas
        assert tile.num_kv_heads == 1 or tile.partial_row < 0
        for head in range(tile.kv_head, tile.kv_head + tile.num_kv_heads):
            ranges[tile.request, tile.row_tile, head].append(tile)

    expected = {
        (request, row_tile, head)
        for request, qo_len in enumerate(case.qo_lens)
        for row_tile in range(-(-qo_len * group_size // plan.tile_q))
        for head in range(case.num_kv_heads)
    }
    assert set(ranges) == expected

    slots = []
    for (request, row_tile, _), tiles in ranges.items():
        qo_len, kv_len = case.qo_lens[request], case.kv_lens[request]
        rows = range(row_tile * plan.tile_q, min((row_tile + 1) * plan.tile_q, qo_len * group_size))
        seen = case.visible(request)
        keys = np.flatnonzero(seen[rows[0] // group_size : rows[-1] // group_size + 1].any(axis=0))
        tiles.sort(key=lambda tile: tile.kv_begin)
        assert tiles[0].kv_begin >= 0
        assert tiles[-1].kv_end <= kv_len
        for left, right in itertools.pairwise(tiles):
            assert left.kv_end == right.kv_begin
        if keys.size:
            assert tiles[0].kv_begin <= keys[0]
            assert tiles[-1].kv_end == keys[-1] + 1
        if len(tiles) == 1:
            assert tiles[0].partial_row == -1
        else:
            assert all(tile.kv_begin < tile.kv_end for tile in tiles)
            slots += [tile.partial_row for tile in tiles]
    assert len(set(slots)) == len(slots)
    assert all(slot >= 0 for slot in slots)
    if not case.batch_invariant:
        assert len(slots) <= 2 * plan.num_ctas


@pytest.mark.parametrize("case", CASES, ids=str)
def test_schedule_covers_every_key_once(case):
    _, plan = make_plan(case)
    check_schedule(case, plan)


@pytest.mark.parametrize("num_ctas", [1, 3, 132])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_schedule_of_random_batches(num_ctas, batch_invariant, seed):
    rng = random.Random(seed)
    for _ in range(20):
        batch_size = rng.randint(0, 40)
        case = Case(
            qo_lens=tuple(rng.choice((0, 1, 1, 1, rng.randint(1, 300))) for _ in range(batch_size)),
            kv_lens=tuple(int(rng.paretovariate(0.5)) % 20000 for _ in range(batch_size)),
            num_qo_heads=8,
            causal=rng.choice((True, False)),
            window_left=rng.choice((-1, -1, 0, 100, 3000)),
            num_ctas=num_ctas,
            batch_invariant=batch_invariant,
        )
        _, plan = make_plan(case)
        check_schedule(case, plan)


def test_giant_request_is_split_and_spread():
    case = Case((1,) * 9, (30000,) + (100,) * 8, num_qo_heads=32, num_kv_heads=8, num_ctas=16)
    _, plan = make_plan(case)
    assert len({tile.cta for tile in tiles_of(plan) if tile.request == 0}) == 16
    mean = sum(plan.cta_costs) / 16
    assert max(plan.cta_costs) <= 1.25 * mean


def test_cta_costs_are_one_per_cta():
    _, plan = make_plan(Case(**BATCH, num_ctas=5))
    assert plan.num_ctas == 5
    assert len(plan.cta_costs) == 5
    assert all(isinstance(cost, int) and cost >= 0 for cost in plan.cta_costs)


def test_indptr_may_be_list_numpy_or_dlpack(framework):
    case = Case(**BATCH, page_size=None)
    lengths = [indptr(case.qo_lens), np.array(case.kv_lens, np.int32), indptr(case.kv_lens)]
    attn = fp.Attention(**case.options())
    expected = attn.plan(*lengths).work_tiles
    assert attn.plan(*(x.tolist() for x in lengths)).work_tiles == expected
    assert attn.plan(*(tuple(x.tolist()) for x in lengths)).work_tiles == expected
    assert attn.plan(*(framework.tensor(x) for x in lengths)).work_tiles == expected
    assert attn.plan(*lengths[:2]).work_tiles == expected  # kv_lens cumulated
    assert attn.plan(qo_indptr=lengths[0], kv_lens=lengths[1], kv_indptr=None).num_ctas > 0


def test_indptr_of_decodes_may_be_a_range():
    attn = fp.Attention(2, 2, 8, q_dtype="float32", device="cpu")
    expected = attn.plan([0, 1, 2, 3], [9, 8, 7]).work_tiles
    assert attn.plan(range(4), range(9, 6, -1)).work_tiles == expected
    for too_long in (range(1 << 40), range(1 << 70)):
        with pytest.raises(ValueError, match=r"^qo_indptr: expected <= .*, got "):
            attn.plan(too_long, [9, 8, 7])


def test_lengths_are_read_before_plan_returns(seed):
    case = Case(**BATCH)
    inputs, exact, twin = problem(case, seed)
    attn = fp.Attention(**case.options())
    qo_indptr, kv_lens = inputs.qo_indptr.copy(), inputs.kv_lens.copy()
    attn.plan(qo_indptr, kv_lens)
    qo_indptr[:] = -1
    kv_lens[:] = -1
    args, kwargs = run_arguments(case, inputs, NumPy())
    assert_correct(case, inputs, exact, twin, *attn.run(*args, **kwargs, return_lse=True))


def test_plan_is_reused_by_many_layers(seed):
    case = Case(**BATCH, num_ctas=7)
    attn = fp.Attention(**case.options())
    layers = [make_inputs(case, [seed, layer]) for layer in range(4)]
    attn.plan(*layers[0].plan_args())
    for layer in layers:
        # The lengths are those of the plan; data and page tables are the layer's own.
        args, kwargs = run_arguments(case, layer, NumPy())
        o, lse = attn.run(*args, **kwargs, return_lse=True)
        requests = layer.requests(case.kv_layout)
        options = case.reference_options()
        exact = reference.batch_attention(layer.q, requests, layer.qo_indptr, **options)
        twin = reference.batch_attention(
            layer.q, requests, layer.qo_indptr, **options, dtype=case.q_dtype
        )
        assert_correct(case, layer, exact, twin, o, lse)


def test_one_attention_serves_batches_of_any_size(seed):
    """Steps of a serving loop: what an earlier, larger batch left behind must not be seen."""
    rng = random.Random(seed)
    runner = Runner(Case(**BATCH), max_batch_size=12, max_qo_tokens=400)
    for step in range(30):
        batch_size = rng.randint(0 if step else 1, 12)
        runner.case = case = Case(
            qo_lens=tuple(rng.choice((0, 1, 1, 30)) for _ in range(batch_size)),
            kv_lens=tuple(rng.choice((0, 1, 40, 800)) for _ in range(batch_size)),
        )
        if batch_size == 0:
            assert runner.attn.plan([0], []).work_tiles == []
            continue
        inputs, exact, twin = problem(case, seed)
        assert_correct(case, inputs, exact, twin, *runner.run(inputs, NumPy()))


def test_batch_of_no_requests(framework):
    case = Case((), ())
    attn = fp.Attention(**case.options())
    plan = attn.plan([0], [])
    assert plan.work_tiles == []
    inputs = make_inputs(case, seed=0)
    args, kwargs = run_arguments(case, inputs, framework)
    o, lse = attn.run(*args, **kwargs, return_lse=True)
    assert isinstance(o, framework.tensor_type)
    assert tuple(o.shape) == (0, case.num_qo_heads, case.head_dims[1])
    assert tuple(lse.shape) == (0, case.num_qo_heads)


def test_small_workspace_means_fewer_splits(seed):
    case = Case((1, 4), (6000, 3000), num_qo_heads=8, num_ctas=32, q_dtype="float32")
    inputs, exact, twin = problem(case, seed)
    full = fp.Attention(**case.options()).workspace_bytes

    def splits_with(num_bytes):
        workspace = np.full(num_bytes + 256, 0xFF, np.uint8)
        workspace = workspace[-workspace.ctypes.data % 256 :][:num_bytes]
        attn = fp.Attention(**case.options(), workspace=workspace)
        assert attn.workspace_bytes <= num_bytes
        plan = attn.plan(*inputs.plan_args())
        check_schedule(case, plan)
        args, kwargs = run_arguments(case, inputs, NumPy())
        assert_correct(case, inputs, exact, twin, *attn.run(*args, **kwargs, return_lse=True))
        return sum(tile.partial_row >= 0 for tile in tiles_of(plan))

    with pytest.raises(ValueError, match="workspace") as too_small:
        splits_with(256)
    least = int(re.search(r">= (\d+) bytes", str(too_small.value)).group(1))
    splits = [splits_with(least + (full - least) * share // 4) for share in range(5)]
    assert splits == sorted(splits)
    assert splits[0] < splits[4]


def test_workspace_bytes_come_from_the_bounds_alone():
    attn = fp.Attention(**Case(**DECODE).options())
    before = attn.workspace_bytes
    attn.plan([0, 1], [100000])
    assert attn.workspace_bytes == before
    assert before % 256 == 0


def test_engines_in_parallel_threads(seed):
    """Each thread has an Attention of its own; the pool of threads behind them is shared."""
    cases = [
        Case((1,) * 4, (1500, 3, 700, 90), num_ctas=num_ctas, q_dtype="float32")
        for num_ctas in (2, 3, 8, 64)
    ]

    def serve(case):
        inputs, exact, twin = problem(case, seed)
        runner = Runner(case)
        for _ in range(30):
            assert_correct(case, inputs, exact, twin, *runner.run(inputs, NumPy()))
        return True

    with ThreadPoolExecutor(len(cases)) as pool:
        assert all(pool.map(serve, cases))


FORK = """
import os, signal
import numpy as np
import flashplan as fp

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((8000, 2, 64), np.float32) for _ in range(3))
attn = fp.Attention(2, 2, 64, page_size=None, q_dtype="float32", device="cpu", num_ctas=8)
attn.plan([0, 4], [8000])
expected = attn.run(q[:4], k, v)
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if np.array_equal(attn.run(q[:4], k, v), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_forked_process_can_serve():
    """Threads do not survive a fork: the child must not wait for the parent's."""
    subprocess.run([sys.executable, "-c", FORK], check=True)


def test_plan_is_a_view_of_the_current_plan():
    attn = fp.Attention(**Case(**DECODE).options())
    plan = attn.plan(indptr(DECODE["qo_lens"]), list(DECODE["kv_lens"]))
    attn.plan([0], [])
    assert plan.work_tiles == []
    del attn
    assert plan.kernel_name


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
@pytest.mark.parametrize("form", ["contiguous", "strided", "reversed", "misaligned", "torch"])
def test_lengths_of_any_integer_dtype(dtype, form, request):
    def lengths(values):
        array = np.array(values, dtype)
        if form == "strided":
            return np.repeat(array, 2)[::2]
        if form == "reversed":
            return array[::-1].copy()[::-1]
        if form == "misaligned":
            return np.frombuffer(b"." + array.tobytes(), np.uint8)[1:].view(dtype)
        if form == "torch":
            return request.getfixturevalue("torch").from_numpy(array)
        return array

    attn = fp.Attention(2, 2, 8, page_size=None, q_dtype="float32", device="cpu")
    lists = [0, 3, 4, 9], [120, 0, 6], [0, 121, 121, 127]
    expected = attn.plan(*lists).work_tiles
    attn.plan([0, 1], [1])
    assert attn.plan(*map(lengths, lists)).work_tiles == expected
