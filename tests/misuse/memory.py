# SPDX-License-Identifier: Apache-2.0
"""Memory between forbidden pages, so that each access outside of a tensor is a crash."""

import ctypes
import dataclasses
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
CANARY = 0xFF  # NaN in every float dtype, -1 in an index
_NO_ACCESS = 0
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python has a name for from 3.13 on
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _forbid(address, num_bytes):
    if _libc.mprotect(address, num_bytes, _NO_ACCESS) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


class Pages:
    """At least `num_bytes` bytes, with a forbidden page on each side. Untouched pages cost nothing,
    so that tensors of many gigabytes can be real."""

    def __init__(self, num_bytes, fill=CANARY):
        rounded = -(-max(num_bytes, 1) // PAGE) * PAGE
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
        whole = np.frombuffer(mmap.mmap(-1, rounded + 2 * PAGE, flags=flags), np.uint8)
        self.bytes = whole[PAGE:-PAGE]
        self.address = self.bytes.ctypes.data
        if fill:
            self.bytes.fill(fill)
        _forbid(self.address - PAGE, PAGE)
        _forbid(self.address + rounded, PAGE)

    def revoke(self):
        """Makes any later access a crash."""
        _forbid(self.address, self.bytes.size)


def extent(shape, strides, itemsize):
    """Bytes from the first element to the end of the last; strides in bytes, none negative."""
    if 0 in shape:
        return 0
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + itemsize


@dataclasses.dataclass
class Placed:
    """An array that lies in pages of its own."""

    array: np.ndarray
    pages: Pages


def padded_strides(shape, itemsize, rng):
    """Strides in bytes of a tensor whose last dimension is contiguous, with gaps in some others."""
    strides, step = [], itemsize
    for d in range(len(shape) - 1, -1, -1):
        strides.insert(0, step)
        step *= max(shape[d], 1)
        if d == len(shape) - 1 or rng.random() < 0.3:
            step += itemsize * int(rng.integers(0, 3)) if len(shape) > 1 else 0
    return strides


def view_at(pages, offset, shape, strides, dtype):
    """The array at `offset` of the pages; an empty array may be at any offset."""
    dtype = np.dtype(dtype)
    if 0 in shape:
        return np.empty(shape, dtype)
    window = pages.bytes[offset : offset + extent(shape, strides, dtype.itemsize)]
    return np.ndarray(shape, dtype, window, strides=strides)


def place(array, rng, strides=None):
    """A copy of `array` that touches a forbidden page on one side."""
    if strides is None:
        strides = padded_strides(array.shape, array.itemsize, rng)
    num_bytes = extent(array.shape, strides, array.itemsize)
    pages = Pages(num_bytes)
    offset = pages.bytes.size - num_bytes if rng.random() < 0.7 else 0
    placed = view_at(pages, offset, array.shape, strides, array.dtype)
    placed[...] = array
    return Placed(placed, pages)


def place_bytes(num_bytes, alignment=256):
    """Aligned memory that ends at a forbidden page, or less than `alignment` before it."""
    pages = Pages(num_bytes)
    offset = (pages.bytes.size - num_bytes) // alignment * alignment
    return Placed(pages.bytes[offset : offset + num_bytes], pages)
