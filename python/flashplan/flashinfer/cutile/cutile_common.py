# SPDX-License-Identifier: Apache-2.0
"""Tells whether FlashInfer's kernels in cuTile can run."""


def is_cuda_tile_available() -> bool:
    """False: flashplan has no kernels in cuTile. Its own serve every backend."""
    return False
