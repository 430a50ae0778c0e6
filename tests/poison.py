# SPDX-License-Identifier: Apache-2.0
"""Output buffers full of NaN, with canaries before and behind them."""

import numpy as np

from frameworks import bits

POISON = 0xFF  # bytes: NaN in every float dtype
MARGIN = 4  # rows before and after the view


class Canary:
    """A buffer of NaN, and the view of it that a call may write."""

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
        """Checks that only the first `rows` rows of the view have changed."""
        copy = self.buffer.copy()
        self._window(copy, self.view.shape)[:rows].fill(0)
        expected = np.empty_like(copy)
        expected.view(np.uint8).fill(POISON)
        self._window(expected, self.view.shape)[:rows].fill(0)
        assert np.array_equal(bits(copy), bits(expected)), "memory outside the output was written"


class Workspace:
    """Host memory with canaries before and behind it: `num_bytes` at `memory`, aligned to 256."""

    def __init__(self, num_bytes):
        self.buffer = np.full(num_bytes + 1024, POISON, np.uint8)
        self._begin = 256 + -self.buffer.ctypes.data % 256
        self._end = self._begin + num_bytes
        self.memory = self.buffer[self._begin : self._end]

    def poison(self):
        self.memory.fill(POISON)

    def assert_canaries(self):
        for outside in (self.buffer[: self._begin], self.buffer[self._end :]):
            assert (outside == POISON).all(), "memory outside the workspace was written"


class CudaWorkspace(Workspace):
    """The same in memory of a GPU."""

    def __init__(self, num_bytes, torch, device):
        self._torch = torch
        self.buffer = torch.full((num_bytes + 512,), POISON, dtype=torch.uint8, device=device)
        self._begin, self._end = 256, 256 + num_bytes
        self.memory = self.buffer[self._begin : self._end]

    def poison(self):
        """Writes the canaries, and waits until every stream sees them."""
        self.memory.fill_(POISON)
        self._torch.cuda.synchronize(self.buffer.device)
