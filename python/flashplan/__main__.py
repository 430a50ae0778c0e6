# SPDX-License-Identifier: Apache-2.0
"""Prints what a bug report should say, as `key: value` lines: the version, what was built, the
machine, the installed frameworks, and the environment variables FLASHPLAN_* and
CUDA_VISIBLE_DEVICES.

python -m flashplan.bench measures attention.
"""

import argparse
import os
import pathlib
import platform
from collections.abc import Iterator
from importlib import metadata

import flashplan

PACKAGES = ("numpy", "nanobind-backend", "torch", "jax", "jaxlib", "cupy-cuda13x", "ml_dtypes")
DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def report() -> Iterator[str]:
    """Yields the lines of the report. It reads versions from the metadata of packages, because
    importing the frameworks takes seconds."""
    yield flashplan.show_config().strip()
    yield f"package: {pathlib.Path(flashplan.__file__).parent}"
    yield f"python: {platform.python_version()} ({platform.python_implementation()})"
    yield f"platform: {platform.platform()}"
    yield f"nvidia driver: {DRIVER.read_text().splitlines()[0] if DRIVER.exists() else 'none'}"
    for package in ("flashplan", *PACKAGES):
        try:
            yield f"{package}: {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            yield f"{package}: not installed"
    for name, value in sorted(os.environ.items()):
        if name.startswith("FLASHPLAN_") or name == "CUDA_VISIBLE_DEVICES":
            yield f"{name}: {value or '(empty)'}"


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m flashplan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    print("\n".join(report()))
