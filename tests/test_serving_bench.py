# SPDX-License-Identifier: Apache-2.0
"""bench/serving and the tables that are made from its records."""

import argparse
import contextlib
import json
import pathlib
import sys
import types
from typing import ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

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
    return replay.Replay(replay.shape_of(steps, options), 2)


def test_logs_are_read_as_they_were_written(log):
    for one, expected in zip(read_steps(log), STEPS, strict=True):
        for part, other in zip(one, expected, strict=True):
            np.testing.assert_array_equal(part, other)


def test_flashplan_is_timed_on_all_steps(made):
    times = replay.summary(made.run(libraries.Flashplan(made.shape), STEPS))
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
        made.run(Wrong(made.shape), STEPS)


class FakeGraph:
    """A CUDA graph whose pool of memory is gone for good with its last graph, as torch's."""

    users: ClassVar[dict[int, int]] = {}
    is_capturing = False
    num_replays = 0

    def capture_begin(self, pool=None):
        assert not FakeGraph.is_capturing
        assert pool is None or self.users[pool] > 0, "the pool has no graph"
        self.own_pool = len(self.users) if pool is None else pool
        self.users[self.own_pool] = self.users.get(self.own_pool, 0) + 1
        FakeGraph.is_capturing = True

    def capture_end(self):
        assert FakeGraph.is_capturing
        FakeGraph.is_capturing = False

    def pool(self):
        return self.own_pool

    def replay(self):
        FakeGraph.num_replays += 1

    def __del__(self):
        if self.own_pool in self.users:  # the test has not ended
            self.users[self.own_pool] -= 1


@pytest.fixture
def on_gpu(made, monkeypatch):
    """As `made`, with a clock for a GPU, though there is none."""
    event = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(FakeGraph, "users", {})
    monkeypatch.setattr(FakeGraph, "num_replays", 0)
    made.clock = replay.Clock(torch.device("cuda"))
    return made


def test_graphs_of_all_steps_have_one_pool(on_gpu):
    class Captured(libraries.Flashplan):
        def is_captured(self, step):
            return self.has_graphs

    rows = on_gpu.run(Captured(on_gpu.shape), STEPS) + on_gpu.run(Captured(on_gpu.shape), STEPS)
    assert [row["run_ms"] for row in rows] == [1.0] * 6
    assert FakeGraph.users == {0: 1}  # the last one
    assert FakeGraph.num_replays == 6 * (1 + replay.REPEATS)


def test_libraries_that_can_not_be_captured_are_timed_without_a_graph(on_gpu):
    class Loud(libraries.Flashplan):
        def plan(self, step):
            run = super().plan(step)

            def loud(*args, **kwargs):
                if FakeGraph.is_capturing:
                    raise RuntimeError("not while a stream is captured")
                return run(*args, **kwargs)

            return loud

    library = Loud(on_gpu.shape)
    assert len(on_gpu.run(library, STEPS)) == 3
    assert not library.has_graphs and FakeGraph.num_replays == 0


def test_libraries_with_larger_pages_read_as_many_keys(made):
    for one in STEPS:
        other = replay.with_pages(one, 16, 128)
        assert len(set(other.page_indices)) == len(other.page_indices) == other.page_indptr[-1]
        np.testing.assert_array_equal(np.diff(other.page_indptr), -(-one.kv_lens // 128))
        assert other.page_indices.max() < made.shape.num_pages // 8


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("plans", [True, False])
def test_flash_attention_3_is_given_the_step(made, monkeypatch, page_size, plans):
    def schedule(batch, max_rows, max_keys, heads, kv_heads, dim, kv_lens, **options):
        assert max_keys % options["page_size"] == 0 and max_keys >= kv_lens.max()
        assert len(kv_lens) == batch and len(options["cu_seqlens_q"]) == batch + 1
        return max_rows, options["page_size"]

    def attend(q, k, v, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, **options):
        assert options["causal"] and k.shape[1] == page_size
        expected = (max_seqlen_q, page_size) if plans else None
        assert options["scheduler_metadata"] == expected
        lens, counts = cache_seqlens.numpy(), -(-cache_seqlens.numpy() // page_size)
        pages = [ids[:count] for ids, count in zip(page_table.tolist(), counts, strict=True)]
        return replay.exact(step(np.diff(cu_seqlens_q.numpy()), lens, pages), q, k, v)

    interface = types.ModuleType("flash_attn_interface")
    interface.get_scheduler_metadata = schedule
    interface.flash_attn_with_kvcache = attend
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    library = libraries.FlashAttention3(made.shape, page_size, plans)
    assert len(made.run(library, STEPS)) == len(STEPS)


def test_libraries_are_timed_in_turn_until_they_fail(made, tmp_path, monkeypatch):
    calls = []

    class Named(libraries.Flashplan):
        def __init__(self, name, num_steps):
            super().__init__(made.shape)
            self.name, self.num_steps = name, num_steps

        def prepare(self, *step):
            if not calls or calls[-1] != self.name:
                calls.append(self.name)

        def plan(self, step):
            self.num_steps -= 1
            if self.num_steps < 0:
                raise ValueError("no kernel")
            return super().plan(step)

    def missing():
        raise ImportError("not installed")

    def makers(shape, sglang):
        yield "first", lambda: Named("first", 100)
        yield "missing", missing
        yield "fails later", lambda: Named("fails later", 8)
        yield "left out", lambda: Named("left out", 100)

    monkeypatch.setattr(replay, "libraries", makers)
    path = tmp_path / "out.json"
    only = ["first", "missing", "fails"]
    options = argparse.Namespace(out=path, sglang=None, only=only, rounds=3)
    replay.run_all(made, {"made": STEPS}, options)
    assert calls == ["first", "fails later"] * 2 + ["first"]
    rows = json.loads(path.read_text())
    assert [row["library"] for row in rows] == ["first"]
    assert rows[0]["decodes"]["steps"] == 1 and rows[0]["prompts"]["steps"] == 2


def test_times_of_a_step_are_medians_over_rounds():
    def row(plan_ms, run_ms):
        return {"is_decode": True, "plan_ms": plan_ms, "run_ms": run_ms}

    rounds = [[row(1, 10), row(5, 50)], [row(3, 20), row(6, 40)], [row(2, 90), row(4, 60)]]
    assert replay.medians(rounds) == [row(2, 20), row(5, 50)]


def test_steps_of_both_kinds_are_chosen():
    steps = [STEPS[0]] * 50 + STEPS[1:]
    assert replay.sample(steps, 9) == [STEPS[0]] * 9 + STEPS[1:]
    assert replay.sample(STEPS[1:], 1) == [STEPS[1]]


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


@pytest.fixture
def program(tmp_path):
    """Stands for `serving`: a first token takes 20 ms times the rate, 10 ms more with each seed."""
    path = tmp_path / "serving"
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "given = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "time = 20 * float(given['--rate']) + 10 * int(given['--seed'])\n"
        "names = ('rate', 'seed', 'requests', 'workload')\n"
        "options = {name: given.get('--' + name) for name in names}\n"
        "print(json.dumps({**options, 'ttft_ms_p99': time}))\n"
    )
    path.chmod(0o755)
    return path


def run_sweep(monkeypatch, program, *options):
    out = program.with_suffix(".json")
    arguments = ["sweep.py", str(program), *options, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    sweep.main()
    return json.loads(out.read_text())


def test_rates_end_with_the_first_one_past_the_knee(monkeypatch, program):
    rows = run_sweep(monkeypatch, program, "rates", "--seeds", "1,2,3")
    rates = {}
    for row in rows:
        rates.setdefault(row["workload"], []).append(row["rate"])
    # Of seeds 1, 2 and 3 the median passes 200 ms with rates above 9.
    assert rates.pop("sharegpt") == [rate for rate in ("4", "8", "16") for _ in range(3)]
    assert rates.pop("uniform:512:2048:256")[-4:] == ["8", "12", "12", "12"]
    assert rates.pop("uniform:4096:16384:256") == [
        rate for rate in ("0.5", "1", "1.5", "2") for _ in range(3)
    ]
    assert not rates


def test_runs_are_chosen_and_bounded(monkeypatch, program):
    options = ["--seeds", "1", "--only", r"--rate (8|1)$"]
    rows = run_sweep(monkeypatch, program, "rates", *options, "--seconds", "14")
    # 20 requests are not measured, 5 of the long ones.
    assert [row["requests"] for row in rows] == ["132", "132", "19"]
    assert rows[0]["setting"] == ["--workload", "sharegpt", "--rate", "8", "--requests", "132"]
    rows = run_sweep(monkeypatch, program, "loads", *options)
    assert [row["requests"] for row in rows[3:]] == [None, "60"]
    decode = ("--decode", "1", "--context", "2048")
    assert sweep.for_seconds(decode, 14) == decode
    assert not sweep.is_past_knee([{"rate": "8"}])


def test_a_row_for_each_rate(tmp_path):
    def row(rate, ttft, **values):
        row = {"set": "rates", "setting": [], "workload": "sharegpt", "rate": rate}
        return row | {"ttft_ms_p99": ttft, "itl_ms_p50": 5.0} | values

    rows = [row("16", 50.0), row("8", 10.0), row("8", 30.0), row("16", 1.0, set="loads")]
    path = tmp_path / "record.json"
    path.write_text(json.dumps([*rows, row("16", 60.0), row("16", 70.0)]))
    assert records.table(str(path), "rates").splitlines()[2:] == [
        "| ShareGPT | 8 | 2 | 5 | – | – | 20 | – |",
        "|  | 16 | 3 | 5 | – | – | 60 | – |",
    ]


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


def test_a_library_is_worth_the_difference_of_its_decodes(tmp_path):
    def row(library, decodes_ms, **values):
        decodes = {"run_ms_mean": decodes_ms, "plan_ms_p50": 0.1}
        row = {"set": "replay", "workload": "uniform_512_2048", "library": library}
        return row | {"graphs": True, "decodes": decodes} | values

    load = {"set": "loads", "setting": [], "workload": "uniform:512:2048:256", "itl_ms_p50": 5.0}
    rows = [load, row("flashplan", 0.5), row("other", 0.75, prompts={"run_ms_mean": 8.0})]
    path = tmp_path / "record.json"
    path.write_text(json.dumps([*rows, row("slow", 2.0, graphs=False)]))
    lines = records.table(str(path), "replay").splitlines()[2:]
    assert lines == [
        "| U(512, 2048), 8 a second | flashplan | 0.5 | – | 0.1 | 5 |",
        "|  | other | 0.75 | 8 | 0.1 | 5.25 |",
        "|  | slow, without a graph | 2 | – | 0.1 | 6.5 |",
    ]
    path.write_text("[]")
    assert records.table(str(path), "replay").splitlines()[2] == "|" + " – |" * 6


def test_options_stand_beside_what_they_were_timed_with(tmp_path):
    def row(section, name, us, **peers):
        return {"section": section, "name": name, "us": us, "peers_us": peers}

    rows = [
        row("8-bit cache", "s1024 e4m3", 3.0, **{"bfloat16 cache": 2.0}),
        row("invariant", "b1 kv8k invariant", 5.0, **{"without it": 4.0}),
        row("mla", "h16 b1 kv4k", 20.0),
        row("mla", "h16 b1 kv4k e4m3", 25.0),
        row("mla", "h16 b1 kv8k e4m3", 25.0),
        {"section": "mla", "name": "h16 b1 kv4k ds", "error": "no kernel"},
    ]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"rows": rows}))
    assert records.table(str(path), "options").splitlines()[2:] == [
        "| cache of float8_e4m3fn | s1024 | 3 | 2 | 1.50 |",
        "| batch_invariant | b1 kv8k | 5 | 4 | 1.25 |",
        "| MLA, cache of float8_e4m3fn | h16 b1 kv4k | 25 | 20 | 1.25 |",
        "|  | h16 b1 kv8k | 25 | – | – |",
    ]
