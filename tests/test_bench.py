# SPDX-License-Identifier: Apache-2.0
"""The rows of the GPU benchmark: right at a small size on the CPU, and known by their names."""

import dataclasses
import pathlib
import re
import sys
import types

import numpy as np
import pytest

import flashplan.bench.__main__ as installed
from bench_cases import GPU_BENCH, MLA_BENCH, MLA_PROMPTS, SPARSE_BENCH
from frameworks import NumPy
from mla_cases import MlaCase, assert_mla_correct, expected, make_mla_inputs, run_mla
from solve import Runner, assert_correct, problem
from sparse_cases import SparseCase, assert_sparse_correct, make_sparse_inputs, run_sparse

sys.path.append(str(pathlib.Path(__file__).parent.parent / "bench"))

import bench_gpu

CASES = GPU_BENCH | {"mla": MLA_PROMPTS}
ROWS = [(section, name) for section, rows in CASES.items() for name in rows]
MAX_KV_LEN, MAX_BATCH_SIZE = 30, 3


def small(case):
    """The first requests of a case, all lengths divided by the same number."""
    divisor = max(1, max(case.kv_lens) // MAX_KV_LEN)

    def short(lens):
        return tuple(-(-n // divisor) for n in lens[:MAX_BATCH_SIZE])

    lens = {"qo_lens": short(case.qo_lens), "kv_lens": short(case.kv_lens)}
    if isinstance(case, SparseCase):
        lens["topk"] = case.topk // divisor
    if isinstance(case, MlaCase | SparseCase):
        return dataclasses.replace(case, **lens)
    if case.planned_lens:
        lens["planned_lens"] = short(case.planned_lens)
    groups = (
        (first, min(count, MAX_BATCH_SIZE), keys // divisor)
        for first, count, keys in case.shared_prefixes
    )
    window = case.window_left if case.window_left < 0 else case.window_left // divisor
    return dataclasses.replace(case, **lens, shared_prefixes=tuple(groups), window_left=window)


@pytest.mark.parametrize("section, name", ROWS, ids=str)
def test_rows_are_right_at_a_small_size(section, name, seed):
    case = small(CASES[section][name])
    inputs, exact, twin = problem(case, seed)
    assert_correct(case, inputs, exact, twin, *Runner(case).run(inputs, NumPy()))


@pytest.mark.parametrize("name", MLA_BENCH)
def test_mla_rows_are_right_at_a_small_size(name, seed):
    case = small(MLA_BENCH[name])
    inputs = make_mla_inputs(case, seed)
    assert_mla_correct(case, inputs, *run_mla(case, inputs), expected(case, inputs))


@pytest.mark.parametrize("name", SPARSE_BENCH)
def test_sparse_rows_are_right_at_a_small_size(name, seed):
    case = small(SPARSE_BENCH[name])
    inputs = make_sparse_inputs(case, seed)
    assert_sparse_correct(case, inputs, *run_sparse(case, inputs))


@pytest.mark.parametrize("section", bench_gpu.SECTIONS)
def test_targets_and_quick_rows_are_rows(section):
    rows = bench_gpu.ROWS[section]
    assert bench_gpu.TARGETS.get(section, {}).keys() <= rows.keys()
    assert set(bench_gpu.QUICK[section].split(", ")) <= rows.keys()


def test_work_of_a_row():
    """Counted by formulas, as by looking at every pair of a query and a key."""
    for rows in GPU_BENCH.values():
        for case in rows.values():
            case = small(case)
            own_keys = sum(n / 2 for n in case.qo_lens if n > 1) if case.causal else 0
            half_a_row = 2 * sum(case.head_dims) * case.num_qo_heads * own_keys
            assert bench_gpu.flops(case) == case.flops - half_a_row, str(case)
            shared = sum((count - 1) * keys for _, count, keys in case.shared_prefixes)
            item_size = np.dtype(case.cache_dtype).itemsize
            row_bytes = case.num_kv_heads * sum(case.head_dims) * item_size
            k = types.SimpleNamespace(element_size=lambda size=item_size: size)
            inputs = types.SimpleNamespace(k=k)
            assert bench_gpu.kv_bytes(case, inputs) == case.kv_bytes - shared * row_bytes, str(case)


def test_of_the_installed_package(capsys):
    assert installed.main(["--device", "cpu", "--repeats", "1", "--only", "512 tokens"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"prompt, 1 x 512 tokens +[\d.]+ ms .*% of its GFLOP/s$", lines[2]), lines[2]


def test_columns_of_the_installed_package_stand_in_line(capsys):
    """And decodes are compared with the rate of memory, whatever the machine can compute."""
    for unit, rows in (("G", installed.CPU_ROWS), ("T", installed.GPU_ROWS)):
        machine = installed.Machine("m", unit, 1e9, 1e-9, lambda row: 1.5 * sum(row.kv_lens), "x")
        installed.measure(machine, rows)
        lines = capsys.readouterr().out.splitlines()[2 : 2 + len(rows)]
        points = [[at for at, x in enumerate(line[46:]) if x == "."] for line in lines]
        assert len(points[0]) == 3
        assert all(found == points[0] for found in points)
        for row, line in zip(rows, lines):
            assert line.endswith(f"{unit}B/s" if row.name.startswith("decode") else f"{unit}FLOP/s")


@pytest.mark.gpu
def test_of_the_installed_package_on_a_gpu(capsys):
    assert installed.main(["--device", "cuda", "--repeats", "1", "--only", "8192 keys"]) == 0
    assert "TB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--device", "tpu"], "device: expected 'cpu', 'cuda' or 'cuda:<index>', got 'tpu'"),
        (["--device", "cpu", "--only", "training"], "--only: expected a part of a row's name"),
        (["--device", "cpu", "--repeats", "0"], "--repeats: expected >= 1, got 0"),
    ],
)
def test_wrong_arguments_of_the_installed_package(arguments, expected, capsys):
    with pytest.raises(SystemExit):
        installed.main(arguments)
    assert expected in capsys.readouterr().err
