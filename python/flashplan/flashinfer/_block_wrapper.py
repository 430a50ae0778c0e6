# SPDX-License-Identifier: Apache-2.0
"""The base of the wrappers of block-sparse attention."""

from __future__ import annotations

from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.flashinfer._prefill import BatchPrefillWithPagedKVCacheWrapper


class BlockWrapper:
    """Runs on a wrapper for paged prompts: each row of blocks is a request of that wrapper, and the
    keys of the row's blocks are the request's pages.

    Args:
        float_workspace_buffer: memory on the device of the tensors, used if it is large enough.
        backend: "auto", "fa2" or "fa3", without effect.
    """

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, backend=backend)

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self) -> None:
        """Does nothing, since there is nothing to release."""


def refuse_positions(pos_encoding_mode: str) -> None:
    """Raises UnsupportedError for rotations and biases: keys in blocks have other positions than
    the keys of a request."""
    if pos_encoding_mode != "NONE":
        raise UnsupportedError(f"pos_encoding_mode: expected 'NONE', got {pos_encoding_mode!r}")
