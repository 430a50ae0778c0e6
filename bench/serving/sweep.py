# SPDX-License-Identifier: Apache-2.0
"""Runs the serving benchmark with many settings, and keeps the results in a JSON file.

python bench/serving/sweep.py build/serving/serving ablations --out serving.json

Each run is a process of its own. Settings of a set are run for each seed; `plot.py` shows the
medians. Options that are not those below are passed to the program.
"""

import argparse
import itertools
import json
import os
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

Setting = tuple[str, ...]


def loads() -> Iterator[Setting]:
    """What tables 6 and 7 of FlashInfer's paper measure."""
    for workload, rate in LOADS:
        yield (*workload, "--rate", str(rate))


def rates() -> Iterator[Setting]:
    """To the knee, where the 99th percentile of the time to the first token passes 200 ms."""
    for workload, values in ((SHAREGPT, (4, 8, 16, 24, 32, 48)), (MIDDLE, (2, 4, 8, 12, 16))):
        for rate in values:
            yield (*workload, "--rate", str(rate))
    for rate in (0.5, 1, 1.5, 2):
        yield (*LONG, "--rate", str(rate))


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
    parser.add_argument("--only", default="", help="settings with this text in them")
    parser.add_argument("--out", type=Path, required=True, help="runs are added to this file")
    arguments, others = parser.parse_known_args()
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    settings = [setting for setting in SETS[arguments.set]() if arguments.only in " ".join(setting)]
    runs = list(itertools.product(settings, arguments.seeds.split(",")))
    for number, (setting, seed) in enumerate(runs, 1):
        print(f"{number} of {len(runs)}: {' '.join(setting)} --seed {seed}", file=sys.stderr)
        row = run(arguments.program, arguments.model, setting, seed, others)
        results.append({"set": arguments.set, "setting": list(setting), **row})
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
