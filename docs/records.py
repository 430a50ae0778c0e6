# SPDX-License-Identifier: Apache-2.0
"""Tables of pages, from records of measurements: docs/blocks.py puts them there.

Of bench/serving, for the page "End to end": each number is the median over the runs of a setting,
each of which had another seed. Of bench/bench_gpu.py, for the page "Speed".
"""

import json
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORKLOADS = {
    "sharegpt": "ShareGPT, 16 a second",
    "uniform:512:2048:256": "U(512, 2048), 8 a second",
    "uniform:4096:16384:256": "U(4096, 16384), 1 a second",
}
# Of tables 6 and 7 of the paper: FlashInfer balanced and not balanced, and Triton.
PAPER = {
    "itl_ms_p50": ((8.96, 9.16, 9.36), (8.21, 8.42, 8.49), (8.63, 13.89, 11.08)),
    "ttft_ms_p50": ((39.05, 39.42, 52.92), (66.78, 67.38, 68.48), (411.02, 421.60, 566.30)),
}
# Of table 8: tokens a second, time between tokens, time to the first token.
PAPER_CACHES = {
    "vLLM's default": (6062.89, 10.42, 35.85),
    "vLLM with FlashInfer": (6065.41, 10.63, 36.60),
    "vLLM's default, e4m3": (6015.86, 12.56, 39.74),
    "vLLM with FlashInfer, e4m3": (6020.32, 10.92, 37.93),
}
SWITCHES = ("no-attention", "no-sharing", "no-graphs", "no-look-ahead", "8bit-cache")
SWITCHES += ("rope-in-attention", "FLASHPLAN_SCHEDULE=in_order")
MISSING = "–"
IN_TURN = ("without it", "bfloat16 cache")  # columns of bench_gpu.py that are timed with the row

Row = dict[str, Any]
Cell = str | float | None


class Record:
    """Runs of bench/serving, or rows of bench/bench_gpu.py."""

    def __init__(self, path: str) -> None:
        record = json.loads((ROOT / path).read_text())
        self.rows: list[Row] = record["rows"] if isinstance(record, dict) else record

    def find(self, *switches: str, **values: str | None) -> list[Row]:
        """Runs with exactly these switches, and these values of options."""
        return [
            row
            for row in self.rows
            if {name for name in SWITCHES if row.get(name) or name in row.get("setting", ())}
            == set(switches)
            and all(row.get(name.replace("_", "-")) == value for name, value in values.items())
        ]


def median(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def change(new: float | None, old: float | None) -> str | None:
    return None if new is None or old is None else f"{100 * (new / old - 1):+.1f} %"


def cell(value: Cell) -> str:
    if isinstance(value, str):
        return value
    return MISSING if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    lines = [head, ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    text = (
        "|---" * len(head) + "|" if line[0] == "---" else f"| {' | '.join(line)} |"
        for line in lines
    )
    return "\n".join(text) + "\n"


def beside_paper(record: Record, key: str) -> str:
    """Table 6 or 7 beside those of the engine."""
    rows = []
    for (workload, name), paper in zip(WORKLOADS.items(), PAPER[key], strict=True):
        runs = {"workload": workload, "samples": None}
        ours = record.find(set="loads", **runs)
        unbalanced = record.find("FLASHPLAN_SCHEDULE=in_order", **runs)
        without = record.find("no-attention", set="loads", **runs)
        rows.append((name, *paper, *(median(part, key) for part in (ours, unbalanced, without))))
    head = ("", "FlashInfer", "not balanced", "Triton", "flashplan's engine")
    return markdown((*head, "not balanced", "without attention"), rows)


def loads(record: Record) -> str:
    keys = ("itl_ms_p50", "itl_ms_p99", "ttft_ms_p50", "ttft_ms_p99", "output_tokens_per_s")
    rows = []
    for workload, name in WORKLOADS.items():
        runs = record.find(set="loads", workload=workload)
        idle = median(runs, "device_idle_part")
        rows.append(
            (
                name,
                str(len(runs)),
                *(median(runs, key) for key in keys),
                median(runs, "host_us_per_step"),
                None if idle is None else f"{100 * idle:.2f} %",
            )
        )
    head = ("", "runs", "between tokens p50", "p99", "to the first token p50", "p99")
    return markdown((*head, "tokens a second", "host, µs a step", "GPU idle"), rows)


def rates(record: Record) -> str:
    """Rising rates of requests, to the knee."""
    keys = ("itl_ms_p50", "itl_ms_p99", "ttft_ms_p50", "ttft_ms_p99", "output_tokens_per_s")
    rows = []
    for workload, name in WORKLOADS.items():
        runs = record.find(set="rates", workload=workload)
        name = name.rpartition(", ")[0]
        for rate in sorted({row["rate"] for row in runs}, key=float):
            same = [row for row in runs if row["rate"] == rate]
            rows.append((name, rate, str(len(same)), *(median(same, key) for key in keys)))
            name = ""
    head = ("", "requests a second", "runs", "between tokens p50", "p99", "to the first token p50")
    return markdown((*head, "p99", "tokens a second"), rows)


def caches(record: Record) -> str:
    """Table 8 beside the engine; the paper's tokens a second are with those of prompts."""
    rows: list[tuple[Cell, ...]] = [(name, *values) for name, values in PAPER_CACHES.items()]
    for name, switches in (
        ("flashplan's engine", ()),
        ("flashplan's engine, e4m3", ("8bit-cache",)),
    ):
        runs = record.find(*switches, set="ablations", workload="sharegpt")
        speeds = [{"speed": row["computed_tokens"] / row["seconds"]} for row in runs]
        times = (median(runs, key) for key in ("itl_ms_p50", "ttft_ms_p50"))
        rows.append((name, median(speeds, "speed"), *times))
    return markdown(("", "tokens a second", "between tokens, ms", "to the first token, ms"), rows)


def samples(record: Record) -> str:
    rows = []
    for workload, name in WORKLOADS.items():
        for count in ("4", "8"):
            options = {"set": "samples", "workload": workload, "samples": count}
            pairs = (record.find(**options), record.find("no-sharing", **options))
            if not all(pairs):
                continue
            times = [[median(runs, key) for runs in pairs] for key in ("itl_ms_p50", "ttft_ms_p50")]
            rate = pairs[0][0]["rate"]
            place = name.split(", ")[0] if workload == "sharegpt" else name.rpartition(", ")[0]
            parts = [value for new, old in times for value in (new, old, change(new, old))]
            rows.append((f"{place}, {rate} a second", count, *parts))
    head = ("", "samples", "between tokens, ms", "not shared", "", "to the first token, ms")
    return markdown((*head, "not shared", ""), rows)


def rotations(record: Record) -> str:
    """Decodes with keys that were rotated when they were written, and in attention."""
    rows = []
    options = [
        ("Llama 3.1 8B", {"set": "decodes", "decode": batch, "context": "2048"})
        for batch in ("1", "16", "64")
    ]
    options += [
        ("Vicuna-13B", {"set": "rotations", "decode": "1", "context": window})
        for window in ("256", "1024", "2048")
    ]
    for model, values in options:
        inside = median(record.find("rope-in-attention", **values), "itl_ms_p50")
        if inside is None:
            continue
        before = median(record.find(**values), "itl_ms_p50")
        counts = values["decode"], values["context"]
        rows.append((model, *counts, before, inside, change(inside, before)))
    head = ("", "sequences", "tokens of context", "rotated once, ms", "rotated in attention, ms")
    return markdown((*head, ""), rows)


def replay(record: Record, runs_of: str = "replay") -> str:
    """Attention of the engine's steps with each library."""
    rows: list[tuple[Cell, ...]] = []
    for workload, name in WORKLOADS.items():
        stem = workload.removesuffix(":256").replace(":", "_")
        runs = [row for row in record.rows if row["set"] == runs_of and row["workload"] == stem]
        own = [row["decodes"] for row in runs if row["library"] == "flashplan"]
        itl = median(record.find(set="loads", workload=workload), "itl_ms_p50")
        for row in runs:
            decodes, prompts = row["decodes"], row.get("prompts", {})
            mean = decodes["run_ms_mean"]
            step = itl + mean - own[0]["run_ms_mean"] if own and itl is not None else None
            library = row["library"] if row["graphs"] else f"{row['library']}, without a graph"
            parts = mean, prompts.get("run_ms_mean"), decodes["plan_ms_p50"], step
            rows.append((name, library, *parts))
            name = ""
    head = ("steps of", "library", "decodes, ms", "steps with prompts, ms", "to plan, ms")
    return markdown((*head, "between tokens with it, ms"), rows or [(None,) * 6])


# Options, by how the names of their rows end: what the rest of the name is the row without it of.
OPTIONS = {
    "cache of float8_e4m3fn": ("8-bit cache", " e4m3"),
    "cache of float8_e5m2": ("8-bit cache", " e5m2"),
    "queries and cache of float8_e4m3fn": ("8-bit cache", " e4m3, also queries"),
    "batch_invariant": ("invariant", " invariant"),
    "ALiBi": ("variants", " alibi"),
    "rope=": ("variants", " rope"),
    "cache of float8_e4m3fn, decodes": ("decode", " e4m3"),
    "MLA, cache of float8_e4m3fn": ("mla", " e4m3"),
    "MLA, fp8_ds_mla": ("mla", " ds"),
    "MLA, fp8_ds_mla, lists of keys": ("mla", " 656"),
    "MLA, batch_invariant": ("mla", " invariant"),
}


def options(record: Record) -> str:
    """What options cost: each row beside that without the option, timed in turn with it or, where
    no such time is recorded, as a row of its own."""
    times = {(row["section"], row["name"]): row for row in record.rows if "us" in row}
    rows: list[tuple[Cell, ...]] = []
    for option, (section, end) in OPTIONS.items():
        for (in_section, name), row in times.items():
            if in_section != section or not name.endswith(end):
                continue
            in_turn = [us for peer, us in row["peers_us"].items() if peer in IN_TURN]
            plain = times.get((section, name.removesuffix(end)))
            without = in_turn[0] if in_turn else plain["us"] if plain else None
            factor = None if without is None else f"{row['us'] / without:.2f}"
            rows.append((option, name.removesuffix(end), row["us"], without, factor))
            option = ""
    return markdown(("option", "workload", "µs", "without it, µs", "times as long"), rows)


TABLES: dict[str, Callable[[Record], str]] = {
    "itl": lambda record: beside_paper(record, "itl_ms_p50"),
    "ttft": lambda record: beside_paper(record, "ttft_ms_p50"),
    "loads": loads,
    "rates": rates,
    "caches": caches,
    "samples": samples,
    "rotations": rotations,
    "replay": replay,
    "replay_flash_attention": lambda record: replay(record, "replay_flash_attention"),
    "options": options,
}


def table(path: str, name: str) -> str:
    """A table in Markdown; `path` is that of the record, from the root of the repository."""
    if name not in TABLES:
        raise ValueError(f"{path}: expected one of {', '.join(TABLES)}, got {name}")
    return TABLES[name](Record(path))
