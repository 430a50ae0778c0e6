# SPDX-License-Identifier: Apache-2.0
"""Draws what bench.py or bench_gpu.py wrote: rates of prompts and of decodes, beside the machine's
ceilings and other libraries, as an SVG that is readable on light and dark pages.

pip install --group bench; python bench/plot.py bench/results/h200.json
"""

import argparse
import json
import math
import pathlib
import re

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

OWN, PAGED = "flashplan", "flashplan, pages of 16"
COLORS = {OWN: "#2f81f7", PAGED: "#79b8ff"}
# Which kernels these backends of scaled_dot_product_attention are.
PEER_NAMES = {"torch flash": "torch flash (FlashAttention 2)"}
PEER_COLORS = ("#9aa4af", "#d8a657", "#57ab8a", "#c586c0")
TEXT, DARK_TEXT, ON_BARS = "#24292f", "#e6edf3", "#0d1117"
STYLE = f"""
:root {{ --text: {TEXT}; }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: {DARK_TEXT}; }} }}
"""

# What the README shows of an H200.
SHORT = ["s512", "s1024", "s4096", "s16384", "b4 s8192 32/8"]
SHORT += ["b1 kv8k", "b16 kv1k", "b64 kv4k", "b64 kv4k 64/8", "b256 kv2k", "b64 kv4k e4m3"]

# Names of rows in words.
WORDS = (
    (r"\bb(\d+)\b", r"batch \1,"),
    (r"\bs(\d+)\b", r"\1 tokens"),
    (r"\bkv(\d+[kM]?)\b", r"\1 keys"),
    (r"\bzipf (\d+k?)", r"Zipf lengths, mean \1"),
    (r"\buniform (\d+-\d+)", r"lengths \1"),
    (r" (\d+/\d+)", r", \1 heads"),
    (r" d(\d+)", r", head dim \1"),
    (r" full", ", no mask"),
    (r" window (\d+k)", r", window of \1"),
    (r" page 16 e4m3$", ", fp8 pages"),
    (r" page (\d+)", r", pages of \1"),
    (r" e4m3$", ", fp8 cache"),
    (r" (f16|f32)$", r", \1"),
    (r"^(decode|prefill) ", ""),
)


def words(name):
    for pattern, replacement in WORDS:
        name = re.sub(pattern, replacement, name)
    return name.replace(",,", ",")


def rates(row, key):
    """Of each library, by name."""
    peers = {
        PEER_NAMES.get(peer, peer): row[key] * row["us"] / us
        for peer, us in row["peers_us"].items()
    }
    return {OWN: row[key]} | peers


def libraries_of(rows):
    """The names of the libraries in rows of panels, each once."""
    return list(dict.fromkeys(library for _, values in rows for library in values))


def number(value, longest):
    """With as many decimals as give the longest bar three digits, so that they stand in line."""
    return f"{value:.{max(0, 2 - int(math.log10(longest)))}f}"


def panel(axes, colors, title, note, rows, unit, ceilings):
    """Horizontal bars. rows: [(name, {library: rate})]; ceilings: {name: rate}, drawn as lines."""
    if libraries_of(rows) == [OWN]:
        unit += "\nno other library was measured"
    y, ticks = 0.0, []
    longest = max(value for _, values in rows for value in values.values())
    for name, values in rows:
        ticks.append((y + (len(values) - 1) / 2, name))
        for library, value in values.items():
            axes.barh(y, value, height=0.9, color=colors[library])
            outside = value < longest / 8
            color, side = (TEXT, "left") if outside else (ON_BARS, "right")
            axes.text(
                value,
                y,
                f" {number(value, longest)} ",
                va="center",
                ha=side,
                color=color,
                fontsize=8,
            )
            y += 1
        y += 0.7
    for name, value in ceilings.items():
        axes.axvline(value, color="#e5534b", linestyle="--", linewidth=1)
        text = f"{name}: {number(value, longest)}"
        axes.text(value, -1.0, text, color="#e5534b", ha="right", fontsize=8)
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set_ylim(y - 0.5, -1.7)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=18)
    axes.text(0, 1.0, note + "\n", transform=axes.transAxes, fontsize=8.5, va="center")
    axes.spines[["top", "right"]].set_visible(False)


def gpu_panels(results):
    rows = [row for row in results["rows"] if "error" not in row]
    by_name = {(row["section"], row["name"]): row for row in rows}
    prefill = []
    for row in rows:
        if row["section"] == "prefill":
            values = rates(row, "tflop_s")
            paged = by_name.get(("paged", f"{row['name']} page 16"))
            if paged:
                values = {OWN: values.pop(OWN), PAGED: paged["tflop_s"]} | values
            prefill.append((words(row["name"]), values))
    decode = [
        (words(row["name"]), rates(row, "tb_s")) for row in rows if row["section"] == "decode"
    ]
    ceilings = results["ceilings"]
    yield (
        "Prompts",
        "16 requests, 16 heads, head dim 128, causal, unless said",
        prefill,
        "TFLOP/s of the two matrix products, bfloat16",
        {"matrix product of cuBLAS": ceilings["matmul_bf16_tflop_s"]},
    )
    yield (
        "Decodes",
        "32 query heads, 8 kv heads, head dim 128, pages of 16, unless said",
        decode,
        "TB/s of keys and values, bfloat16 unless said",
        {"reading memory": ceilings["read_tb_s"]},
    )


def cpu_panels(results):
    decode, other = [], []
    for row in results["rows"]:
        is_decode = row["name"].startswith("decode")
        values = rates(row, "gb_s" if is_decode else "gflop_s")
        (decode if is_decode else other).append((words(row["name"]), values))
    ceilings = results["ceilings"]
    matmul = {
        f"matrix product, {dtype}": ceilings[f"matmul_{dtype}_gflop_s"]
        for dtype in ("float32", "bfloat16")
        if ceilings[f"matmul_{dtype}_gflop_s"]
    }
    note = "one request, 8 heads, head dim 128, causal, bfloat16, unless said"
    yield "Prompts", note, other, "GFLOP/s of the two matrix products", matmul
    yield (
        "Decodes",
        "32 query heads, 8 kv heads, head dim 128, pages of 16, bfloat16, unless said",
        decode,
        "GB/s of keys and values",
        {"reading memory": ceilings["read_gb_s"]},
    )


def figure(results):
    panels = list((gpu_panels if "gpu" in results else cpu_panels)(results))
    libraries = libraries_of(row for _, _, rows, _, _ in panels for row in rows)
    peers = [library for library in libraries if library not in COLORS]
    colors = COLORS | dict(zip(peers, PEER_COLORS, strict=False))
    bars = [sum(len(values) + 0.7 for _, values in rows) + 4 for _, _, rows, _, _ in panels]
    fig, axes = plt.subplots(
        len(panels), figsize=(8.6, 0.17 * sum(bars) + 0.6), height_ratios=bars, layout="constrained"
    )
    for ax, of_panel in zip(axes, panels, strict=True):
        panel(ax, colors, *of_panel)
    libraries.sort(key=list(colors).index)  # our own first
    fig.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colors[library]) for library in libraries],
        libraries,
        frameon=False,
        labelcolor=TEXT,
        loc="outside upper right",  # above the panels, where it hides no bar
        ncols=len(libraries),
        handlelength=1,
        columnspacing=1.2,
        fontsize=8.5,
    )
    machine = (
        results["gpu"]["name"]
        if "gpu" in results
        else (f"{results['machine']['cpu']}, {results['threads']} threads")
    )
    fig.get_layout_engine().set(w_pad=0.15)  # text may be wider in the reader's font
    note = f"{machine}, PyTorch {results['versions']['torch']}, {results['date']}; longer is better"
    fig.supxlabel(note, fontsize=9, x=0.01, ha="left")
    return fig


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=pathlib.Path, help="what bench.py or bench_gpu.py wrote")
    parser.add_argument("--out", type=pathlib.Path, help="default: beside it, .svg")
    parser.add_argument("--short", action="store_true", help="a few rows; beside it, -short.svg")
    args = parser.parse_args()
    out = args.out or args.json.with_name(args.json.stem + "-short" * args.short + ".svg")
    results = json.loads(args.json.read_text())
    if args.short:
        keep = [*SHORT, *(f"{name} page 16" for name in SHORT)]
        results["rows"] = [row for row in results["rows"] if row["name"] in keep]
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    plt.rcParams.update(dict.fromkeys(names, TEXT))
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "flashplan", "font.size": 9})
    fig = figure(results)
    fig.savefig(out, transparent=True, metadata={"Date": None, "Creator": None})
    # Text takes the colour of the page, in the page's font.
    svg = out.read_text().replace(TEXT, "var(--text)")
    svg = re.sub(r"font-family: [^;]*", "font-family: system-ui, sans-serif", svg)
    out.write_text(svg.replace("<defs>", f"<style>{STYLE}</style>\n <defs>", 1))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
