# SPDX-License-Identifier: Apache-2.0
"""Every example that the README or the docs name runs; the README's code blocks are examples."""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TEXT = "\n".join([README, *(page.read_text() for page in (ROOT / "docs").rglob("*.md"))])
# `make demo` runs the model, which the package index serves; test_streaming.py its short version.
WITH_MODEL = {"examples/generate.py", "examples/streaming.py"}
ON_GPU = {"examples/cuda_graph.py"}
NAMED = sorted(set(re.findall(r"examples/\w+\.py", TEXT)) - WITH_MODEL)
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    "example", [pytest.param(x, marks=[pytest.mark.gpu] * (x in ON_GPU)) for x in NAMED]
)
def test_example_runs(example):
    done = subprocess.run(
        [sys.executable, ROOT / example], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("example", "package", "command"),
    [
        ("cuda_graph", "torch", "pip install torch"),
        ("context_parallel", "torch", "pip install torch"),
        ("tensor_parallel", "torch", "pip install torch"),
        ("generate", "gguf", "pip install '.[demo]'"),
    ],
)
def test_examples_name_what_is_missing(example, package, command):
    path = str(ROOT / "examples" / f"{example}.py")
    code = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_path({path!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert package in done.stderr
    assert done.stderr.endswith(f": {command}\n")


def test_code_blocks_are_examples():
    """What the README shows is, to the letter, part of a file that is run."""
    sources = [(ROOT / example).read_text() for example in NAMED]
    for block in BLOCKS:
        assert any(block in source for source in sources), f"in no example:\n{block}"


@pytest.mark.parametrize("has_kernels", [False, True])
def test_demo_names_what_a_gpu_needs(has_kernels, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    devices = importlib.import_module("devices")
    if has_kernels:
        monkeypatch.setattr(devices.fp, "is_supported", lambda *_, **__: (True, ""))
        monkeypatch.setattr(devices.importlib.util, "find_spec", lambda _: None)
        wanted = "found neither: pip install torch, or pip install cupy-cuda13x"
    else:
        reason = "device: expected cpu (built without CUDA), got cuda:0"
        monkeypatch.setattr(devices.fp, "is_supported", lambda *_, **__: (False, reason))
        wanted = f"{reason}; install its wheel for CUDA"
    with pytest.raises(RuntimeError, match=re.escape(wanted)):
        devices.array_module(None, "cuda")


def test_frameworks_of_the_demo(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    devices = importlib.import_module("devices")
    assert devices.array_module(None, "cpu").__name__ == "numpy"
    with pytest.raises(RuntimeError, match="cupy has no arrays on cpu"):
        devices.array_module("cupy", "cpu")
