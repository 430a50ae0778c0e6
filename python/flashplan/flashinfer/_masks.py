# SPDX-License-Identifier: Apache-2.0
"""Converts FlashInfer's masks to words of 32 bits, in one row for each query. FlashInfer gives a
mask as one string of bits for each request, or as a rule for scored items.

The conversion runs on the device of the mask. The host knows the lengths, so it waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashplan.flashinfer._plans import Batch
from flashplan.flashinfer.quantization import packbits

if TYPE_CHECKING:
    from collections.abc import Callable

# How many bits of masks are converted at once. Each takes 8 bytes of memory while it is converted,
# so this bounds the memory to about 128 MiB.
MAX_BITS = 1 << 24


def num_words(batch: Batch) -> int:
    """The number of words of a row of the mask: enough for the longest request, at least one."""
    return max(-(-int(batch.kv_lens.max(initial=0)) // 32), 1)


def to_words(
    batch: Batch,
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    device: torch.device,
) -> Tensor:
    """The mask for `Attention.run`, with mask_begin = 0: [tokens, words] uint32.

    Args:
        batch: the requests that the mask is for.
        custom_mask: bool, flat: for each request [qo_len, kv_len]. Ignored if packed_custom_mask is
            given.
        packed_custom_mask: uint8: the elements of custom_mask as bits, the lowest of a byte first.
            Each request begins at a byte of its own.

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

    def is_seen(key: Tensor, first: Tensor, kv_len: Tensor) -> Tensor:
        bit = torch.where(key < kv_len, first + key, 0)
        if packed_custom_mask is None:
            seen = given[bit] != 0
        else:
            seen = (given[bit >> 3] >> (bit & 7).to(torch.uint8)) & 1 != 0
        return seen & (key < kv_len)

    return _fill(words, rows, is_seen)


def _fill(words: Tensor, rows: Tensor, is_seen: Callable[..., Tensor]) -> Tensor:
    """Sets the bits of words [tokens, words] to what is_seen returns. Returns words as uint32.

    Args:
        rows: [count, tokens]: `count` numbers of each token, which are passed to is_seen.
        is_seen: takes the indices of keys [keys], and each of the `count` numbers as [tokens, 1].
            Returns bool [tokens, keys]: whether the token's query sees the key.
    """
    key = torch.arange(words.shape[1] * 32, device=words.device)
    rows_at_once = max(MAX_BITS // key.numel(), 1)
    for begin in range(0, len(words), rows_at_once):
        seen = is_seen(key, *rows[:, begin : begin + rows_at_once].unsqueeze(2))
        part = packbits(seen, "little").view(torch.int32)
        words[begin : begin + rows_at_once] = part.view(-1, words.shape[1])
    return words.view(torch.uint32)


class Items(NamedTuple):
    """Prompts that are a prefix and items after it, which are scored without seeing each other.

    Args:
        prefix_lens: [batch_size], for one request also []: tokens of the prefix.
        positions: flat, `stride` entries for each request: how many tokens of its item each token
            after the prefix sees, itself included. Tokens between items see the prefix alone and
            have 0.
        stride: entries of `positions` for each request.
    """

    prefix_lens: Tensor
    positions: Tensor
    stride: int


def items_of(
    prefix_len_ptr: Tensor | None,
    token_pos_in_items_ptr: Tensor | None,
    token_pos_in_items_len: int,
    max_item_len_ptr: Tensor | None,
) -> Items | None:
    """The `Items` that arguments of plan() describe, or None. max_item_len_ptr is not read.

    Raises:
        ValueError: only one of both tensors is given.
    """
    if prefix_len_ptr is None and token_pos_in_items_ptr is None and max_item_len_ptr is None:
        return None
    if prefix_len_ptr is None or token_pos_in_items_ptr is None:
        missing = "prefix_len_ptr" if prefix_len_ptr is None else "token_pos_in_items_ptr"
        raise ValueError(f"{missing}: expected a tensor, as the others of scored items, got None")
    return Items(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len)


def item_words(batch: Batch, items: Items, device: torch.device) -> Tensor:
    """The mask of scored items, as words of bits like those of `to_words`.

    It is causal, too: no query sees a key after itself.
    """
    qo_lens = np.diff(batch.qo_indptr).astype(np.int64)
    kv_lens = batch.kv_lens.astype(np.int64)
    request = np.repeat(np.arange(len(qo_lens)), qo_lens)
    ends = batch.qo_indptr[1:].astype(np.int64)
    query = np.arange(len(request)) - ends[request] + kv_lens[request]
    rows = torch.from_numpy(np.stack((query, request))).to(device)
    prefix_len = items.prefix_lens.to(device, torch.int64).flatten()[rows[1]]
    given = items.positions.flatten().to(device, torch.int64)
    after_prefix = rows[0] - prefix_len
    place = (rows[1] * items.stride + after_prefix).clamp(0, given.numel() - 1)
    seen_of_item = torch.where(after_prefix >= 0, given[place], 0)

    def is_seen(key: Tensor, query: Tensor, prefix_len: Tensor, seen_of_item: Tensor) -> Tensor:
        return (key <= query) & ((key < prefix_len) | (query - key < seen_of_item))

    words = torch.zeros(len(request), num_words(batch), dtype=torch.int32, device=device)
    return _fill(words, torch.stack((rows[0], prefix_len, seen_of_item)), is_seen)
