# SPDX-License-Identifier: Apache-2.0
"""Functions that append to a paged cache: a pair (k, v), or one tensor [pages, 2, ...]."""

import torch

import flashplan as fp
from flashplan.flashinfer._arguments import unpack_cache
from flashplan.flashinfer._missing import (
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from flashplan.types import KvLayout

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]


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
    """Calls `flashplan.append_paged_kv` with batch_indices and positions; kv_last_page_len is not
    needed.

    Tokens whose batch index is -1 are skipped.
    """
    k_cache, v_cache = unpack_cache(paged_kv_cache, kv_layout)
    fp.append_paged_kv(
        append_key,
        append_value,
        k_cache,
        v_cache,
        page_indptr=kv_indptr.int(),
        page_indices=kv_indices.int(),
        batch_indices=batch_indices.int(),
        positions=positions.int(),
        kv_layout=kv_layout,
    )


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Calls `append_paged_kv_cache` for multi-head latent attention, whose rows have one head.

    append_ckv and append_kpe are [tokens, dim], ckv_cache and kpe_cache [pages, page_size, dim].
    """
    append_paged_kv_cache(
        append_ckv.unsqueeze(1),
        append_kpe.unsqueeze(1),
        batch_indices,
        positions,
        (ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2)),
        kv_indices,
        kv_indptr,
        kv_last_page_len,
    )


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Keys of each request: (pages - 1) * page_size + kv_last_page_len, 0 without pages."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0)


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each appended token and its position there, int32 [nnz].

    The tokens of a request end at its seq_len. Rows behind the last request have -1 and 0. The
    results are written to batch_indices and positions, if these are given.
    """
    rows = torch.arange(nnz, dtype=append_indptr.dtype, device=append_indptr.device)
    request = torch.searchsorted(append_indptr, rows, right=True) - 1
    request = torch.where(rows < append_indptr[-1], request, -1)
    # Rows of no request (-1) read begins[0], which their result does not use. This entry exists
    # because a length of 0 is put in front of seq_lens.
    begins = append_indptr - torch.nn.functional.pad(seq_lens, (1, 0))
    position = torch.where(request >= 0, rows - begins[request + 1], 0)
    return _written(request.int(), batch_indices), _written(position.int(), positions)


def _written(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None else out.copy_(result)
