# SPDX-License-Identifier: Apache-2.0
"""Finds the NVRTC that pip has installed. It compiles variants and rotations for GPUs."""

from __future__ import annotations

from flashplan import _core

_has_looked = False


def find_nvrtc() -> None:
    """Tells the core where the package nvidia-cuda-nvrtc has its library, once per process."""
    global _has_looked
    if _has_looked:
        return
    _has_looked = True
    from importlib import metadata  # takes 28 ms, and most programs have no variant

    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name.startswith("libnvrtc.so."):
                _core.set_nvrtc_path(str(file.locate()))
                return
