# SPDX-License-Identifier: Apache-2.0
"""What a package is built for where nvcc is and no GPU, as on hosts that build containers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHOICES = ("FLASHPLAN_CUDA", "CUDAARCHS", "TORCH_CUDA_ARCH_LIST")


def configured(folder, **environment):
    """(exit status, output) of the configuration of a package."""
    inherited = {name: value for name, value in os.environ.items() if name not in CHOICES}
    process = subprocess.run(
        ["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, "-DSKBUILD=2", "-DFLASHPLAN_PYTHON=OFF"],
        env=inherited | environment,
        text=True,
        capture_output=True,
    )
    return process.returncode, " ".join((process.stdout + process.stderr).split())


@pytest.fixture(autouse=True)
def no_gpu_but_nvcc():
    if not (shutil.which("cmake") and shutil.which("ninja") and shutil.which("nvcc")):
        pytest.skip("needs cmake, ninja and nvcc")
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU, which decides")


def test_a_package_for_cpus_alone_must_be_asked_for(tmp_path):
    status, output = configured(tmp_path)
    assert status != 0
    assert "would be for CPUs alone" in output
    for choice in CHOICES:
        assert choice in output


@pytest.mark.parametrize(
    ("choice", "built"),
    [
        ({"FLASHPLAN_CUDA": "OFF"}, "CUDA kernels: off (FLASHPLAN_CUDA=OFF)"),
        ({"TORCH_CUDA_ARCH_LIST": "8.0 9.0+PTX"}, "architectures 80;90a"),
        ({"CUDAARCHS": "90a"}, "architectures 90a"),
    ],
)
def test_variables_of_the_environment_choose(tmp_path, choice, built):
    status, output = configured(tmp_path, **choice)
    assert built in output
    assert status == 0
