# SPDX-License-Identifier: Apache-2.0
"""Where a measurement was taken, and the JSON file it goes to."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform

RESULTS = pathlib.Path(__file__).parent / "results"


def _first_line(path, key, default="unknown"):
    try:
        for line in pathlib.Path(path).read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return default


def last_level_cache_bytes():
    sizes = [0]
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes) or 32 << 20


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe():
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": _first_line("/proc/cpuinfo", "model name"),
            "cpus": len(os.sched_getaffinity(0)),
            "last_level_cache_mib": last_level_cache_bytes() >> 20,
            "memory": _first_line("/proc/meminfo", "MemTotal"),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in ("flashplan", "numpy", "torch")},
    }


def write_json(path, results):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(describe() | results, indent=1) + "\n")
    print(f"wrote {path}")
