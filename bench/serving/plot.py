# SPDX-License-Identifier: Apache-2.0
"""Draws what sweep.py has measured, and prints it as a table.

python bench/serving/plot.py serving.json rates --out rates.svg

Points are medians over the seeds.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

# Key of a result -> what the axis says.
METRICS = {
    "itl_ms_p50": "time between tokens, median (ms)",
    "itl_ms_p99": "time between tokens, 99th percentile (ms)",
    "ttft_ms_p50": "time to the first token, median (ms)",
    "ttft_ms_p99": "time to the first token, 99th percentile (ms)",
}
# For each set of runs: the key of its rows that the x axis shows, and the label of that axis.
AXES = {
    "rates": ("rate", "requests per second"),
    "samples": ("samples", "samples of a request"),
    "decodes": ("decode", "sequences in a batch"),
    "rotations": ("context", "tokens of context"),
    "bursts": ("variation", "coefficient of variation of the time between requests"),
}
BARS = ("loads", "ablations")  # sets that have no x axis

SWITCHES = {"no-graphs", "no-look-ahead", "no-sharing", "no-attention", "8bit-cache"}
SWITCHES |= {"batch-invariant", "no-pdl", "rope-in-attention"}

Row = dict[str, Any]


def label_of(row: Row) -> str:
    """Workload and switches of a run."""
    switches = [f"--{name}" for name in sorted(SWITCHES) if row.get(name)]
    switches += [part for part in row["setting"] if "=" in part]
    return " ".join([row.get("workload", "decodes"), *switches])


def medians(rows: list[Row]) -> list[Row]:
    """One row for each setting, with medians over its seeds."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row["setting"]), []).append(row)
    return [
        group[0]
        | {
            key: statistics.median(row[key] for row in group)
            for key, value in group[0].items()
            if isinstance(value, float) and all(row.get(key) is not None for row in group)
        }
        for group in groups.values()
    ]


def table(rows: list[Row]) -> str:
    """Markdown."""
    columns = [*METRICS, "output_tokens_per_s", "host_us_per_step", "device_idle_part"]
    lines = ["| run | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = [format(row[key], ".4g") if row.get(key) is not None else "" for key in columns]
        lines.append(f"| {' '.join(row['setting'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[Row], x: str, x_label: str, path: Path) -> None:
    metrics = [key for key in METRICS if any(row.get(key) is not None for row in rows)]
    figure, axes = plt.subplots(1, len(metrics), figsize=(5 * len(metrics), 4), squeeze=False)
    for axis, metric in zip(axes[0], metrics, strict=True):
        for label in dict.fromkeys(map(label_of, rows)):
            points = sorted((float(row[x]), row[metric]) for row in rows if label_of(row) == label)
            axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set_xlabel(x_label)
        axis.set_ylabel(METRICS[metric])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def draw_bars(rows: list[Row], path: Path) -> None:
    metrics = [key for key in METRICS if any(row.get(key) is not None for row in rows)]
    figure, axes = plt.subplots(1, len(metrics), figsize=(5 * len(metrics), 5), sharey=True)
    labels = [label_of(row) for row in rows]
    for axis, metric in zip(axes, metrics, strict=True):
        axis.barh(labels, [row[metric] for row in rows])
        axis.set_xlabel(METRICS[metric])
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("set", choices=[*AXES, *BARS])
    parser.add_argument("--out", type=Path, required=True, help="an SVG file")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    rows = medians([row for row in results if row["set"] == arguments.set])
    if not rows:
        parser.error(f"results: expected runs of the set {arguments.set}, got none")
    print(table(rows))
    if arguments.set in BARS:
        draw_bars(rows, arguments.out)
    else:
        draw(rows, *AXES[arguments.set], arguments.out)


if __name__ == "__main__":
    main()
