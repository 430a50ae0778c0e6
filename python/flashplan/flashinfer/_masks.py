# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's masks, one string of bits for each request, as rows of words.

All is done on the device of the mask. The host knows the lengths, and waits for nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashplan.flashinfer._plans import Batch
from flashplan.flashinfer.quantization import packbits

# Bits of masks that are moved in one operation. It takes 8 bytes of memory for each bit.
MAX_BITS = 1 << 24


def num_words(batch: Batch) -> int:
    """Words of a row: enough for the longest request, and at least one."""
    return max(-(-int(batch.kv_lens.max(initial=0)) // 32), 1)


def to_words(
    batch: Batch,
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    device: torch.device,
) -> Tensor:
    """The mask for `Attention.run`, with mask_begin = 0: [tokens, words] uint32.

    Args:
        batch: whose requests the mask is of.
        custom_mask: bool, flat: for each request [qo_len, kv_len]; ignored beside
        packed_custom_mask: uint8: the same as bits, the lowest of a byte first. Each request
            begins at a byte of its own.

    Raises:
        ValueError: the mask has fewer elements than the batch.
    """
    qo_lens = np.diff(batch.qo_indptr).astype(np.int64)
    kv_lens = batch.kv_lens.astype(np.int64)
    sizes = qo_lens * kv_lens
    if packed_custom_mask is not None:
        given, name = packed_custom_mask.flatten(), "packed_custom_mask"
        wanted = int(((sizes + 7) // 8).sum())
        sizes = (sizes + 7) // 8 * 8
    else:
        assert custom_mask is not None
        given, name = custom_mask.flatten(), "custom_mask"
        wanted = int(sizes.sum())
    if given.numel() < wanted:
        raise ValueError(f"{name}: expected {wanted} elements for this batch, got {given.numel()}")
    request = np.repeat(np.arange(len(qo_lens)), qo_lens)
    row_in_request = np.arange(len(request)) - batch.qo_indptr[:-1].astype(np.int64)[request]
    first_bit = (np.cumsum(sizes) - sizes)[request] + row_in_request * kv_lens[request]
    rows = torch.from_numpy(np.stack((first_bit, kv_lens[request]))).to(device)

    words = torch.zeros(len(request), num_words(batch), dtype=torch.int32, device=device)
    if wanted == 0:
        return words.view(torch.uint32)
    given = given.to(device)
    key = torch.arange(words.shape[1] * 32, device=device)
    rows_at_once = max(MAX_BITS // key.numel(), 1)
    for begin in range(0, len(request), rows_at_once):
        first, kv_len = rows[:, begin : begin + rows_at_once].unsqueeze(2)
        bit = torch.where(key < kv_len, first + key, 0)
        if packed_custom_mask is None:
            is_seen = given[bit] != 0
        else:
            is_seen = (given[bit >> 3] >> (bit & 7).to(torch.uint8)) & 1 != 0
        is_seen &= key < kv_len
        part = packbits(is_seen, "little").view(torch.int32)
        words[begin : begin + rows_at_once] = part.view(-1, words.shape[1])
    return words.view(torch.uint32)
