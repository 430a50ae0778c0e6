# SPDX-License-Identifier: Apache-2.0
"""Appends to a paged cache. A cache is a pair (k, v), or one tensor [pages, 2, ...]."""

import torch

import flashplan as fp
from flashplan.types import KvLayout


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: KvLayout = "NHD",
) -> None:
    """`flashplan.append_paged_kv` by request and position; kv_last_page_len is not needed.

    Tokens whose batch index is -1 are skipped.
    """
    if isinstance(paged_kv_cache, torch.Tensor):
        k_cache, v_cache = paged_kv_cache.unbind(1)
    else:
        k_cache, v_cache = paged_kv_cache
    fp.append_paged_kv(
        append_key,
        append_value,
        k_cache,
        v_cache,
        page_indptr=kv_indptr,
        page_indices=kv_indices,
        batch_indices=batch_indices,
        positions=positions,
        kv_layout=kv_layout,
    )


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Keys of each request: (pages - 1) * page_size + kv_last_page_len, pages at least 1."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return torch.clamp(pages - 1, min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each appended token and its position there, int32 [nnz].

    The tokens of a request end at its seq_len. Rows behind the last request have -1 and 0.
    """
    rows = torch.arange(nnz, dtype=append_indptr.dtype, device=append_indptr.device)
    request = torch.searchsorted(append_indptr, rows, right=True) - 1
    inside = rows < append_indptr[-1]
    known = request.clamp(max=seq_lens.numel() - 1)
    positions = rows - append_indptr[known + 1] + seq_lens[known]
    return (
        torch.where(inside, request, -1).int(),
        torch.where(inside, positions, 0).int(),
    )
