# SPDX-License-Identifier: Apache-2.0
"""The array module of a device: NumPy on the CPU, PyTorch or CuPy on a GPU."""

import importlib
import importlib.util
from typing import Any

import flashplan as fp

PACKAGES = {"numpy": "numpy", "torch": "torch", "cupy": "cupy-cuda13x"}


def default_framework(device: str) -> str:
    """What there is: on a GPU PyTorch, or else CuPy."""
    if device == "cpu":
        return "numpy"
    for name in ("torch", "cupy"):
        if importlib.util.find_spec(name):
            return name
    raise RuntimeError(
        "framework: expected PyTorch or CuPy for arrays on a GPU, found neither: "
        "pip install torch, or pip install cupy-cuda13x"
    )


def array_module(framework: str | None, device: str) -> Any:
    """NumPy, CuPy, or PyTorch with its tensors on `device`.

    Raises RuntimeError that says what to install.
    """
    if device == "cuda":
        supported, reason = fp.is_supported(8, 8, 64, q_dtype="float16", device=device)
        if not supported:
            raise RuntimeError(
                f"flashplan: {reason}; install its wheel for CUDA (flashplan-...+cu13...), or "
                "build one where nvcc is: pip install . -C cmake.define.FLASHPLAN_CUDA=ON"
            )
    framework = framework or default_framework(device)
    if framework == {"cpu": "cupy", "cuda": "numpy"}[device]:
        raise RuntimeError(f"framework: {framework} has no arrays on {device}; torch has")
    try:
        xp = importlib.import_module(framework)
    except ImportError as error:
        raise RuntimeError(f"framework: {error}: pip install {PACKAGES[framework]}") from None
    if framework == "torch":
        if device == "cuda" and not xp.cuda.is_available():
            raise RuntimeError(
                f"torch: expected a build for CUDA, got {xp.__version__}: pip install torch, from "
                "the index for your CUDA (pytorch.org)"
            )
        xp.set_default_device(device)
    return xp
