# SPDX-License-Identifier: Apache-2.0
"""Runs the serving benchmark with many settings, and keeps the results in a JSON file.

python bench/serving/sweep.py build/serving/serving ablations --out serving.json

Each run is a process of its own. Settings of a set are run for each seed; `plot.py` shows the
medians. Options that are not those below are passed to the program, after those of the setting.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MODEL = Path(__file__).parent / "models" / "llama-3.1-8b"
SHAREGPT = ("--workload", "sharegpt")
LONG = ("--workload", "uniform:4096:16384:256", "--requests", "60", "--drop", "5")
MIDDLE = ("--workload", "uniform:512:2048:256")
LOADS = ((SHAREGPT, 16), (MIDDLE, 8), (LONG, 1))
SWITCHES = (
    (),
    ("--no-graphs",),
    ("--no-look-ahead",),
    ("--no-pdl",),
    ("--no-sharing",),
    ("--no-attention",),
    ("--8bit-cache",),
    ("--batch-invariant",),
    ("--rope-in-attention",),
    ("FLASHPLAN_SCHEDULE=whole",),  # of the environment
    ("FLASHPLAN_SCHEDULE=in_order",),
)

KNEE_MS = 200  # of the 99th percentile of the time to the first token
NUM_DROPPED = 20  # requests that the program does not measure unless it is told otherwise

Setting = tuple[str, ...]


def loads() -> Iterator[Setting]:
    """What tables 6 and 7 of FlashInfer's paper measure."""
    for workload, rate in LOADS:
        yield (*workload, "--rate", str(rate))


def rates() -> Iterator[Setting]:
    """Rising rates. Those of a workload end with the first one past the knee."""
    for workload, values in (
        (SHAREGPT, (4, 8, 16, 24, 32, 48, 64, 80, 96)),
        (MIDDLE, (2, 4, 8, 12, 16, 20, 24, 32)),
        (LONG, (0.5, 1, 1.5, 2)),
    ):
        for rate in values:
            yield (*workload, "--rate", str(rate))


def ablations() -> Iterator[Setting]:
    for workload, rate in LOADS:
        for switch in SWITCHES:
            yield (*workload, "--rate", str(rate), *switch)


def samples() -> Iterator[Setting]:
    """Continuations of one prompt, which read its keys once or each for itself."""
    batch = ("--max-batch", "512")
    for count, switch in itertools.product((1, 2, 4, 8, 16, 32), ((), ("--no-sharing",))):
        rate = "16" if count < 16 else "4"
        yield (*SHAREGPT, "--rate", rate, *batch, "--samples", str(count), *switch)
    for (count, rate), switch in itertools.product(((4, 8), (8, 4)), ((), ("--no-sharing",))):
        yield (*MIDDLE, "--rate", str(rate), *batch, "--samples", str(count), *switch)


def decodes() -> Iterator[Setting]:
    switches = ((), ("--8bit-cache",), ("--rope-in-attention",))
    for batch, switch in itertools.product((1, 4, 16, 64, 128), switches):
        yield ("--decode", str(batch), "--context", "2048", *switch)


def rotations() -> Iterator[Setting]:
    """Windows of StreamingLLM, as in figure 9 of the paper: --model .../models/vicuna-13b."""
    for window, switch in itertools.product((256, 1024, 2048), ((), ("--rope-in-attention",))):
        yield ("--decode", "1", "--context", str(window), "--pages", "1024", *switch)


def bursts() -> Iterator[Setting]:
    for variation in (1, 2, 4):
        yield (*SHAREGPT, "--rate", "16", "--variation", str(variation))


SETS = {
    "loads": loads,
    "rates": rates,
    "ablations": ablations,
    "samples": samples,
    "decodes": decodes,
    "rotations": rotations,
    "bursts": bursts,
}


def value_of(setting: Setting, option: str, otherwise: str = "") -> str:
    return setting[setting.index(option) + 1] if option in setting else otherwise


def for_seconds(setting: Setting, seconds: float | None) -> Setting:
    """With so many requests that those that are measured come for `seconds`."""
    if seconds is None or "--rate" not in setting:
        return setting
    dropped = int(value_of(setting, "--drop", str(NUM_DROPPED)))
    measured = max(1, round(seconds * float(value_of(setting, "--rate"))))
    return (*setting, "--requests", str(dropped + measured))


def is_past_knee(rows: list[dict]) -> bool:
    times = [row["ttft_ms_p99"] for row in rows if row.get("ttft_ms_p99") is not None]
    return bool(times) and statistics.median(times) > KNEE_MS


def run(program: str, model: str, setting: Setting, seed: str, others: list[str]) -> dict:
    variables = [part for part in setting if "=" in part]
    switches = [part for part in setting if part not in variables]
    environment = os.environ | dict(variable.split("=") for variable in variables)
    command = [program, model, *switches, "--seed", seed, *others]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="the executable `serving`")
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--model", default=str(MODEL), help="a folder with config.json")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--only", default="", help="settings that match this regular expression")
    parser.add_argument("--seconds", type=float, help="how long measured requests come")
    parser.add_argument("--out", type=Path, required=True, help="runs are added to this file")
    arguments, others = parser.parse_known_args()
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    past_knee = set()  # workloads
    for setting in SETS[arguments.set]():
        workload = value_of(setting, "--workload")
        if not re.search(arguments.only, " ".join(setting)) or workload in past_knee:
            continue
        bounded = for_seconds(setting, arguments.seconds)
        rows = []
        for seed in arguments.seeds.split(","):
            print(f"{' '.join(bounded)} --seed {seed}", file=sys.stderr)
            row = run(arguments.program, arguments.model, bounded, seed, others)
            rows.append({"set": arguments.set, "setting": list(bounded), **row})
            arguments.out.write_text(json.dumps(results + rows, indent=1) + "\n")
        results += rows
        if arguments.set == "rates" and is_past_knee(rows):
            past_knee.add(workload)


if __name__ == "__main__":
    main()
