# SPDX-License-Identifier: Apache-2.0
"""bench/serving and the tables that are made from its records."""

import argparse
import json
import pathlib
import sys

import numpy as np
import pytest

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "bench" / "serving"))
sys.path.append(str(ROOT / "docs"))

import libraries  # noqa: E402
import records  # noqa: E402
import replay  # noqa: E402
import sweep  # noqa: E402
from steps import Step, read_steps  # noqa: E402


def step(qo_lens, kv_lens, pages):
    """`pages`: of each sequence."""
    counts = [len(ids) for ids in pages]
    return Step(
        *(
            np.array(values, np.int32)
            for values in (
                np.cumsum([0, *qo_lens]),
                kv_lens,
                np.cumsum([0, *counts]),
                [page for ids in pages for page in ids],
            )
        )
    )


STEPS = [
    step([1, 1, 1], [20, 18, 3], [[5, 0], [5, 2], [3]]),  # two of them share a page
    step([1, 7], [33, 24], [[5, 0, 6], [1, 4]]),
    step([12], [12], [[7]]),
]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "made"
    with path.open("wb") as file:
        for one in STEPS:
            sizes = len(one.kv_lens), one.qo_indptr[-1], len(one.page_indices)
            for part in (np.array(sizes, np.int32), *one):
                file.write(part.tobytes())
    return path


@pytest.fixture
def made(log):
    options = argparse.Namespace(heads="4,2,16", layers=2, page_size=16)
    steps = list(read_steps(log))
    return replay.Replay(replay.shape_of(steps, options), steps, 2)


def test_logs_are_read_as_they_were_written(log):
    for one, expected in zip(read_steps(log), STEPS, strict=True):
        for part, other in zip(one, expected, strict=True):
            np.testing.assert_array_equal(part, other)


def test_flashplan_is_timed_on_all_steps(made):
    times = replay.summary(made.run(libraries.Flashplan(made.shape)))
    assert {kind: row["steps"] for kind, row in times.items()} == {"decodes": 1, "prompts": 2}
    assert all(value > 0 for row in times.values() for value in row.values())


@pytest.mark.parametrize("which", ["decodes", "prompts"])
def test_wrong_results_are_not_timed(made, which):
    class Wrong(libraries.Flashplan):
        """It takes another page where there is a second one."""

        def plan(self, step):
            if libraries.is_decode(step) == (which == "decodes"):
                step = step._replace(page_indices=np.where(step.page_indices == 0, 1, 2))
            return super().plan(step._replace(page_indices=step.page_indices.astype(np.int32)))

    with pytest.raises(ValueError, match=f"o of {which}: expected an error below"):
        made.run(Wrong(made.shape))


def test_libraries_with_larger_pages_read_as_many_keys(made):
    for one in STEPS:
        other = replay.with_pages(one, 16, 128)
        assert len(set(other.page_indices)) == len(other.page_indices) == other.page_indptr[-1]
        np.testing.assert_array_equal(np.diff(other.page_indptr), -(-one.kv_lens // 128))
        assert other.page_indices.max() < made.shape.num_pages // 8


def test_new_tokens_are_where_the_table_says():
    np.testing.assert_array_equal(libraries.new_slots(STEPS[1], 0, 16), [6 * 16])
    np.testing.assert_array_equal(libraries.new_slots(STEPS[1], 1, 16), 4 * 16 + np.arange(1, 8))
    np.testing.assert_array_equal(libraries.block_table(STEPS[1]), [[5, 0, 6], [1, 4, 0]])


def test_every_setting_of_the_sweep_is_one(tmp_path):
    for name, settings in sweep.SETS.items():
        settings = list(settings())
        assert settings and len(set(settings)) == len(settings), name
    switches = {part for switch in sweep.SWITCHES for part in switch}
    assert set(records.SWITCHES) <= {part.removeprefix("--") for part in switches}


def test_tables_have_medians_over_seeds_and_keep_switches_apart(tmp_path):
    def row(itl, **values):
        return {"set": "loads", "setting": [], "workload": "sharegpt", "itl_ms_p50": itl} | values

    rows = [row(1.0), row(9.0), row(2.0), row(100.0, **{"no-attention": True})]
    rows += [row(50.0, set="ablations"), row(70.0, samples="4")]
    unbalanced = {"set": "ablations", "setting": ["FLASHPLAN_SCHEDULE=in_order"]}
    path = tmp_path / "record.json"
    path.write_text(json.dumps([*rows, row(30.0, **unbalanced)]))
    lines = records.table(str(path), "itl").splitlines()
    assert lines[2].split("|")[-4:-1] == [" 2 ", " 30 ", " 100 "]
    assert lines[3].split("|")[-4:-1] == [" – "] * 3
    with pytest.raises(ValueError, match="expected one of itl, .*, got no_such"):
        records.table(str(path), "no_such")
