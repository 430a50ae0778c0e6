# SPDX-License-Identifier: Apache-2.0
"""Output buffers full of NaN, with canaries round them."""

import numpy as np

from frameworks import bits

POISON = 0xFF  # bytes: NaN in every float dtype
MARGIN = 4  # rows before and after the view


class Canary:
    """An uninitialised-looking buffer and the view of it that a call may write."""

    def __init__(self, shape, dtype, strided=False):
        rows, *inner = shape
        outer = [rows + 2 * MARGIN, *inner]
        if strided:
            outer[1:] = [n + 1 for n in inner[:-1]] + [inner[-1] + 3]
        self.buffer = np.empty(outer, dtype)
        self.buffer.view(np.uint8).fill(POISON)
        self.view = self._window(self.buffer, shape)

    @staticmethod
    def _window(buffer, shape):
        rows, *inner = shape
        return buffer[(slice(MARGIN, MARGIN + rows), *(slice(n) for n in inner))]

    def assert_only_written(self, rows):
        """Nothing but the first `rows` rows of the view has changed."""
        copy = self.buffer.copy()
        self._window(copy, self.view.shape)[:rows].fill(0)
        expected = np.empty_like(copy)
        expected.view(np.uint8).fill(POISON)
        self._window(expected, self.view.shape)[:rows].fill(0)
        assert np.array_equal(bits(copy), bits(expected)), "memory outside the output was written"


def workspace(num_bytes):
    """(buffer, view): `num_bytes` poisoned bytes, aligned to 256, with canaries round them."""
    buffer = np.full(num_bytes + 1024, POISON, np.uint8)
    begin = 256 + -(buffer.ctypes.data) % 256
    return buffer, buffer[begin : begin + num_bytes]


def assert_workspace_canaries(buffer, view):
    begin = view.ctypes.data - buffer.ctypes.data
    outside = np.concatenate([buffer[:begin], buffer[begin + view.size :]])
    assert (outside == POISON).all(), "memory outside the workspace was written"
