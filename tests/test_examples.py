# SPDX-License-Identifier: Apache-2.0
"""Every example that the README or the docs name runs; the README's code blocks are examples."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TEXT = "\n".join([README, *(page.read_text() for page in (ROOT / "docs").rglob("*.md"))])
# `make demo` runs the model, which the package index serves.
ON_GPU = {"examples/cuda_graph.py"}
NAMED = sorted(set(re.findall(r"examples/\w+\.py", TEXT)) - {"examples/generate.py"})
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    "example", [pytest.param(x, marks=[pytest.mark.gpu] * (x in ON_GPU)) for x in NAMED]
)
def test_example_runs(example):
    done = subprocess.run(
        [sys.executable, ROOT / example], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_code_blocks_are_examples():
    """What the README shows is, to the letter, part of a file that is run."""
    sources = [(ROOT / example).read_text() for example in NAMED]
    for block in BLOCKS:
        assert any(block in source for source in sources), f"in no example:\n{block}"
