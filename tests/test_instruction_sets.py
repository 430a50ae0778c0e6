# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels for processors older than this one: numerics, in a process of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

import flashplan as fp

TESTS = pathlib.Path(__file__).parent


def environment(isa):
    return os.environ | {"FLASHPLAN_MAX_CPU_ISA": isa}


def pytest_in(isa, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=TESTS, env=environment(isa), capture_output=True, text=True)


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_the_variable_names_the_kernels(isa):
    command = [sys.executable, "-c", "import flashplan; print(flashplan.show_config())"]
    config = subprocess.run(
        command, env=environment(isa), capture_output=True, text=True, check=True
    ).stdout
    if f"cpu_{isa}" not in config:
        assert isa == "avx2"  # this processor has less
        assert "cpu kernels: cpu_baseline" in fp.show_config()


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_attention(isa):
    """Every case, against the reference."""
    result = pytest_in(isa, "test_attention.py", "-k", "numpy")
    assert result.returncode == 0, result.stdout[-4000:]


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_nonfinite(isa):
    result = pytest_in(isa, "test_nonfinite.py")
    assert result.returncode == 0, result.stdout[-4000:]
