# SPDX-License-Identifier: Apache-2.0
"""Draws the JSON of bench.py or bench_gpu.py as an SVG bar chart that is readable on light and dark
pages."""

import argparse
import json
import pathlib
from xml.sax.saxutils import escape

WIDTH, LABELS, NUMBERS = 760, 210, 90
BAR, GAP, TOP = 12, 12, 62
CLASSES = ("own", "peer1", "peer2", "peer3", "peer4", "peer5")

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 15px; font-weight: 600; }
.faint { fill: #6e7781; }
.own { fill: #0969da; } .peer1 { fill: #afb8c1; } .peer2 { fill: #d8a657; }
.peer3 { fill: #76c7a0; } .peer4 { fill: #d48fb0; } .peer5 { fill: #9d8fd4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .faint { fill: #8d96a0; }
  .own { fill: #4493f8; } .peer1 { fill: #57606a; } .peer2 { fill: #9e6a03; }
  .peer3 { fill: #2f7d57; } .peer4 { fill: #8c4a68; } .peer5 { fill: #5f529c; }
}
"""


def text(x, y, content, classes="", anchor="start"):
    where = f'x="{x:.1f}" y="{y}" text-anchor="{anchor}"'
    return f'<text {where} class="{classes}">{escape(content)}</text>'


def rect(x, y, width, classes):
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" class="{classes}"/>'


def duration(us):
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"


def legend(series):
    parts, x = [], LABELS
    for name, color in zip(series, CLASSES, strict=False):
        parts += [rect(x, 34, BAR, color), text(x + 18, 44, name)]
        x += 40 + 7 * len(name)
    return parts


def where(results):
    if "gpu" in results:
        return results["gpu"]["name"]
    return f"{results['machine']['cpu']}, {results['threads']} threads"


def chart(results):
    rows = [row for row in results["rows"] if "error" not in row]
    series = ["flashplan"]
    for row in rows:
        series += [peer for peer in row["peers_us"] if peer not in series]
    series = series[: len(CLASSES)]
    parts = [
        text(0, 16, "Time of one call, lower is better; each row to its own scale", "title"),
        *legend(series),
    ]
    y = TOP
    longest_bar = WIDTH - LABELS - NUMBERS
    for row in rows:
        times = {"flashplan": row["us"]} | row["peers_us"]
        times = {name: us for name, us in times.items() if name in series}
        parts.append(text(LABELS - 12, y + BAR - 2, row["name"], anchor="end"))
        for name, us in times.items():
            length = longest_bar * us / max(times.values())
            parts.append(rect(LABELS, y, length, CLASSES[series.index(name)]))
            parts.append(text(LABELS + length + 6, y + BAR - 2, duration(us), "faint"))
            y += BAR + 2
        y += GAP
    note = f"{where(results)}, torch {results['versions']['torch']}, {results['date']}"
    parts.append(text(0, y + 8, note, "faint"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 16}" '
        f'role="img" aria-label="flashplan beside other libraries">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=pathlib.Path, help="what bench.py or bench_gpu.py wrote")
    parser.add_argument("--out", type=pathlib.Path, help="default: beside it, .svg")
    args = parser.parse_args()
    out = args.out or args.json.with_suffix(".svg")
    out.write_text(chart(json.loads(args.json.read_text())))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
