# SPDX-License-Identifier: Apache-2.0
"""The base of the wrappers over a paged cache. It keeps page tables, in buffers for CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashplan.flashinfer._arguments import Cache, check_buffer, product, refuse, unpack_cache
from flashplan.flashinfer._narrow_queries import take_scales
from flashplan.flashinfer._plans import on_host, paged_kv_lens
from flashplan.flashinfer._wrapper import Wrapper

if TYPE_CHECKING:
    import numpy.typing as npt


class PagedWrapper(Wrapper):
    # Whether plan() is given the number of all keys of each request (kv_len_arr), instead of the
    # number of keys on its last page (last_page_len).
    _counts_all_keys = False

    def _set_buffers(
        self, indptr: Tensor | None, indices: Tensor | None, last_page_len: Tensor | None
    ) -> None:
        """Keeps the buffers of the page table that the constructor got. With CUDA graphs their
        sizes fix the size of the batch."""
        self._paged_kv_indptr_buf = indptr
        self._paged_kv_indices_buf = indices
        self._paged_kv_last_page_len_buf = last_page_len
        self._fixed_batch_size = 0
        if self._use_cuda_graph:
            check_buffer("paged_kv_indices_buffer", indices)
            self._fixed_batch_size = len(
                check_buffer("paged_kv_last_page_len_buffer", last_page_len)
            )
            check_buffer("paged_kv_indptr_buffer", indptr, self._fixed_batch_size + 1)

    def _lengths(
        self, others: list[Tensor], page_indptr: Tensor, last_page_len: Tensor, page_size: int
    ) -> tuple[list[npt.NDArray[Any]], npt.NDArray[Any]]:
        """Returns (others, kv_lens), on the host. kv_lens: the number of keys of each request."""
        if not self._counts_all_keys and page_size == 1:
            *rest, pages = on_host(*others, page_indptr)
            return rest, paged_kv_lens(pages, None, page_size)
        *rest, pages, last = on_host(*others, page_indptr, last_page_len)
        if not self._counts_all_keys:
            return rest, paged_kv_lens(pages, last, page_size)
        most = paged_kv_lens(pages, None, page_size) * page_size
        if (last > most).any():
            raise ValueError(
                f"kv_len_arr: expected at most the keys of the pages, {most.tolist()}, "
                f"got {last.tolist()}"
            )
        return rest, last

    def _check_fits_buffers(self, batch_size: int, indices: Tensor) -> None:
        if not self._use_cuda_graph:
            return
        self._check_batch_size(batch_size)
        assert self._paged_kv_indices_buf is not None
        if len(indices) > len(self._paged_kv_indices_buf):
            raise ValueError(
                f"indices: expected at most {len(self._paged_kv_indices_buf)} pages, the size of "
                f"the allocated buffer, got {len(indices)}"
            )

    def _set_pages(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, non_blocking: bool
    ) -> None:
        """Keeps the page table on the device. With CUDA graphs it is copied into the buffers."""
        if self._use_cuda_graph:
            assert self._paged_kv_indptr_buf is not None
            assert self._paged_kv_indices_buf is not None
            assert self._paged_kv_last_page_len_buf is not None
            self._paged_kv_indptr_buf.copy_(indptr, non_blocking)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices, non_blocking)
            self._paged_kv_last_page_len_buf.copy_(last_page_len, non_blocking)
            return
        self._paged_kv_indptr_buf = self._there(indptr, non_blocking)
        self._paged_kv_indices_buf = self._there(indices, non_blocking)
        self._paged_kv_last_page_len_buf = self._there(last_page_len, non_blocking)

    def _there(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        return tensor.to(self.device, torch.int32, non_blocking)

    def _most_mask_words(self) -> int:
        """How many words a row of the mask needs at most: a request has no more keys than the
        pages of the buffer hold, and no more than the mask has bits."""
        assert self._shape is not None
        assert self._shape.page_size is not None
        assert self._paged_kv_indices_buf is not None
        most = len(self._paged_kv_indices_buf) * self._shape.page_size
        if self._custom_mask_buf is not None:
            most = min(most, 8 * self._custom_mask_buf.numel())
        return -(-most // 32)

    def _run_pages(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        args: tuple[Any, ...],
        *,
        q_scale: float | Tensor | None,
        k_scale: float | Tensor | None,
        v_scale: float | Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        window_left: int | None,
        sinks: Tensor | None,
        kv_cache_sf: Any,
    ) -> Any:
        if kv_cache_sf is not None:
            refuse(kv_cache_sf=kv_cache_sf)
        are_scales, scale_q, k_scale, v_scale = take_scales(q, args, k_scale, v_scale)
        if args and not are_scales:
            sinks = self._sinks_of(args)
        k, v = unpack_cache(paged_kv_cache, self._kv_layout)
        planned_window = self._window_left
        if window_left is not None:
            self._window_left = window_left
        try:
            return self._run(
                q,
                k,
                v,
                out,
                lse,
                return_lse,
                product(q_scale, k_scale),
                v_scale,
                sinks,
                lse_base,
                lse_layout,
                scale_q,
                page_indptr=self._paged_kv_indptr_buf,
                page_indices=self._paged_kv_indices_buf,
            )
        finally:
            self._window_left = planned_window
