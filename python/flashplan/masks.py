# SPDX-License-Identifier: Apache-2.0
"""Packs masks into bits, for `Attention.run`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pack_mask(bools: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """The words of a mask: bit j % 32 of word j // 32 of a row is bools[row, j].

    Args:
        bools: [tokens, keys] of bool on the host, an array or nested lists: row t says which keys
            query t sees. Column 0 is key mask_begin of its request; see `Attention.plan`. Rows of
            requests with fewer keys are padded with any value.

    Returns:
        [tokens, ceil(keys / 32)] uint32, a NumPy array. Bits after the last key are 0. For a
        GPU copy it there, with torch.from_numpy(words).cuda() for example.

    Raises:
        TypeError: bools has another dtype than bool, or is not on the host.
        ValueError: bools does not have two dimensions.

    Examples:
        >>> fp.pack_mask([[True, False, True], [True, True, False]])
        array([[5],
               [3]], dtype=uint32)
    """
    try:
        array = np.asarray(bools)
    except Exception as error:  # frameworks raise various types for tensors on a GPU
        raise TypeError(
            f"bools: expected an array of bool on the host, got {type(bools).__name__} ({error})"
        ) from None
    if array.dtype != np.bool_:
        raise TypeError(f"bools: expected an array of bool on the host, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"bools: expected two dimensions, got {array.ndim}")
    tokens, keys = array.shape
    num_bytes = -(-keys // 32) * 4
    padded = np.zeros((tokens, num_bytes), np.uint8)
    padded[:, : -(-keys // 8)] = np.packbits(array, axis=1, bitorder="little")
    return padded.view("<u4").astype(np.uint32, copy=False)
