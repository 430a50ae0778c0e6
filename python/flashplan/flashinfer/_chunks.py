# SPDX-License-Identifier: Apache-2.0
"""Chunked attention: each chunk of a request's keys becomes a request of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashplan._core import UnsupportedError

if TYPE_CHECKING:
    from flashplan.flashinfer._direct_fmha import Inputs


def in_chunks(
    inputs: Inputs, lengths: list[list[int]], chunk: int
) -> tuple[Inputs, dict[str, Tensor]]:
    """Splits requests into one request for each chunk: the new inputs, and lengths on the CPU.

    Args:
        lengths: of the given requests: where their rows of q begin, where their ragged keys begin,
            and how many keys they have.
        chunk: tokens of a chunk.
    """
    q_ends, k_ends, kv_lens = lengths
    rows, begins, lens, requests, firsts = [0], [], [], [], []
    for request, kv_len in enumerate(kv_lens):
        qo_len = q_ends[request + 1] - q_ends[request]
        parts = [(0, 0, qo_len - kv_len)] if qo_len > kv_len else []  # rows before the first key
        position = max(kv_len - qo_len, 0)
        while position < kv_len:
            first = position // chunk * chunk
            end = min(first + chunk, kv_len)
            parts.append((first, end - first, end - position))
            position = end
        for first, seen, num_rows in parts:
            rows.append(rows[-1] + num_rows)
            begins.append(k_ends[request] + first)
            lens.append(seen)
            requests.append(request)
            firsts.append(first)
    host = {"cu_seqlens_q": rows, "cu_seqlens_k": [*begins, k_ends[-1]], "seqused_k": lens}
    if inputs.block_table is not None:
        inputs = _pages_of_chunks(inputs, requests, firsts, chunk)
    return inputs, {name: torch.tensor(x, dtype=torch.int32) for name, x in host.items()}


def _pages_of_chunks(inputs: Inputs, requests: list[int], firsts: list[int], chunk: int) -> Inputs:
    """The inputs with smaller pages, so that every chunk begins with a page."""
    table, page_size = inputs.block_table, inputs.page_size
    assert table is not None and page_size is not None
    size = math.gcd(page_size, chunk)
    k, k_step = _smaller_pages(inputs.k, inputs.kv_layout, page_size, size)
    v, v_step = _smaller_pages(inputs.v, inputs.kv_layout, page_size, size)
    if k_step != v_step:
        raise UnsupportedError(
            f"qkv: expected pages of k and v at the same strides (chunked), got {inputs.k.stride()}"
            f" and {inputs.v.stride()}"
        )
    device = table.device
    parts = torch.arange(page_size // size, dtype=torch.int32, device=device)
    small = (table[:, :, None] * k_step + parts).flatten(1)
    first = torch.tensor(firsts, device=device) // size
    columns = first[:, None] + torch.arange(-(-chunk // size), device=device)
    columns = columns.clamp(max=small.shape[1] - 1)
    chosen = small[torch.tensor(requests, device=device)[:, None], columns]
    return inputs._replace(k=k, v=v, page_size=size, block_table=chosen.contiguous())


def _smaller_pages(cache: Tensor, kv_layout: str, page_size: int, size: int) -> tuple[Tensor, int]:
    """A view of the cache as smaller pages, of `size` tokens each, and how many smaller pages there
    are from the start of one page of the cache to the start of the next."""
    tokens = 1 if kv_layout == "NHD" else 2
    page, *inner = cache.stride()
    step, rest = divmod(page, size * cache.stride(tokens))
    if rest:
        raise UnsupportedError(
            f"qkv: expected a page stride that is a multiple of {size} tokens (chunked), got "
            f"strides {cache.stride()}"
        )
    shape = list(cache.shape)
    shape[0] = (shape[0] - 1) * step + page_size // size
    shape[tokens] = size
    strides = (size * cache.stride(tokens), *inner)
    return cache.as_strided(shape, strides, cache.storage_offset()), step
