# SPDX-License-Identifier: Apache-2.0
"""check_device_data() of tensors on a GPU raises what the CPU raises for the same data."""

import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy, TorchCuda
from gpu_cases import DEVICE
from test_device_data import (
    NUM_PAGES,
    Problem,
    assert_slots_are_judged_alike,
    assert_tables_are_judged_alike,
    outcome_of_check,
)

pytestmark = pytest.mark.gpu

LONG = 400_000_000  # clock cycles: more than 0.2 s


def planned_on_gpu(problem):
    """The problem's batch, planned for the GPU."""
    options = problem.options | {"head_dim": 64}
    attn = fp.Attention(**options, q_dtype="bfloat16", device=DEVICE)
    attn.plan(*problem.plan_args)
    return attn


@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize(("page_size", "window_left"), [(5, -1), (16, 40)])
def test_tables_are_judged_as_on_the_cpu(rng, page_size, window_left, csr, gpu_framework):
    problem = Problem(rng, page_size, window_left, csr)
    assert_tables_are_judged_alike(problem, planned_on_gpu(problem), gpu_framework)


def test_slots_are_judged_as_on_the_cpu(rng, gpu_framework):
    if gpu_framework.name == "jax":
        pytest.skip("JAX has no int64 by default")
    problem = Problem(rng, 16)
    assert_slots_are_judged_alike(problem, planned_on_gpu(problem), gpu_framework)


def test_tables_on_the_host(rng):
    problem = Problem(rng, 16)
    assert_tables_are_judged_alike(problem, planned_on_gpu(problem), NumPy())


def test_strided_tables(rng, torch):
    problem = Problem(rng, 16)
    attn = planned_on_gpu(problem)
    table = problem.tables["block_table"]
    wide = torch.full((8, table.shape[1] + 5), -1, dtype=torch.int32, device=DEVICE)
    view = wide[::2, 2 : 2 + table.shape[1]]
    view.copy_(torch.from_numpy(table))
    fp.check_device_data(attn, block_table=view, num_pages=NUM_PAGES)
    wide[2, 3] = NUM_PAGES
    with pytest.raises(ValueError, match=r"^block_table\[1, 1\]: expected a page in \[0, 23\)"):
        fp.check_device_data(attn, block_table=view, num_pages=NUM_PAGES)


@pytest.mark.parametrize("named", [False, True])
def test_waits_for_the_stream(rng, named, torch):
    """A table that is written on the stream, long after the call began."""
    problem = Problem(rng, 16)
    attn = planned_on_gpu(problem)
    table = torch.from_numpy(problem.tables["block_table"]).to(DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        table[1, 0] = -5
        if not named:
            with pytest.raises(ValueError, match=r"^block_table\[1, 0\]: .* got -5$"):
                fp.check_device_data(attn, block_table=table, num_pages=NUM_PAGES)
    if named:
        with pytest.raises(ValueError, match=r"^block_table\[1, 0\]: .* got -5$"):
            fp.check_device_data(attn, block_table=table, num_pages=NUM_PAGES, stream=stream)


def test_a_capture_is_refused_and_goes_on(rng, torch):
    problem = Problem(rng, 16)
    attn = planned_on_gpu(problem)
    table = torch.from_numpy(problem.tables["block_table"]).to(DEVICE)
    counter = torch.zeros(1, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        with pytest.raises(RuntimeError, match="^stream: expected no capture under way"):
            fp.check_device_data(attn, block_table=table, num_pages=NUM_PAGES)
    graph.replay()
    assert counter.item() == 1


def test_devices_are_not_mixed(rng, torch):
    problem = Problem(rng, 16)
    framework = TorchCuda(torch)
    outcome = outcome_of_check(problem.attn, framework, **problem.tables)
    assert outcome == ("TypeError: block_table: expected a tensor on cpu, got one on cuda:0")


def test_nothing_is_written_and_the_plan_stays(rng, torch):
    problem = Problem(rng, 16)
    attn = planned_on_gpu(problem)
    framework = TorchCuda(torch)
    table = framework.tensor(problem.tables["block_table"])
    q = torch.randn(len(problem.q), 4, 64, device=DEVICE, dtype=torch.bfloat16)
    cache = torch.randn(2, NUM_PAGES, 16, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    before = attn.run(q, *cache, block_table=table)
    kept = table.clone()
    fp.check_device_data(attn, block_table=table, num_pages=NUM_PAGES)
    with pytest.raises(ValueError, match="^block_table"):
        fp.check_device_data(attn, block_table=table, num_pages=1)
    assert torch.equal(table, kept)
    assert torch.equal(attn.run(q, *cache, block_table=table), before)
    assert np.array_equal(framework.array(table), problem.tables["block_table"])
