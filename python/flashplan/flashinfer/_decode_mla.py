# SPDX-License-Identifier: Apache-2.0
"""The wrapper for decodes with multi-head latent attention that FlashInfer had before
BatchMLAPagedAttentionWrapper."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashplan.flashinfer._arguments import check_buffer, one_of
from flashplan.flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashplan.flashinfer.page import get_seq_lens


class BatchDecodeMlaWithPagedKVCacheWrapper(BatchMLAPagedAttentionWrapper):
    """`BatchMLAPagedAttentionWrapper` for one query of each request. Page tables are given as for
    `BatchDecodeWithPagedKVCacheWrapper`.

    Args:
        float_workspace_buffer: memory on the device of the tensors, used if it is large enough.
        use_cuda_graph: whether plan() copies the page table into the buffers.
        use_tensor_cores: without effect.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: int32
            [batch_size + 1], [most pages] and [batch_size].
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        rows = lengths = None
        if use_cuda_graph:
            last = check_buffer("paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer)
            lengths = torch.empty_like(last)
            rows = torch.arange(len(last) + 1, dtype=torch.int32, device=last.device)
        super().__init__(
            float_workspace_buffer,
            use_cuda_graph,
            rows,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            lengths,
        )
        self._use_tensor_cores = use_tensor_cores

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        head_dim_compressed_kv: int,
        page_size: int,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        data_type: torch.dtype | str = "float16",
        q_data_type: torch.dtype | str | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> None:
        """Plans a step.

        Args:
            indptr, indices, last_page_len: [batch_size + 1], [pages] and [batch_size]: the page
                table as CSR, and the keys in the last page of each request.
            head_dim_compressed_kv: latent dims of a key, which has an eighth as many rotated dims.
            sm_scale: the scale of the model, which follows from its head dim before compression.
            data_type, q_data_type: dtypes of the caches and of q; q has data_type by default.
            rope_scale, rope_theta: without effect: q and the caches are rotated already.

        Raises:
            UnsupportedError: an argument asks for what flashplan can not do.
            ValueError: the batch does not fit its pages, the buffers or an earlier plan of graphs.
        """
        one_of("window_left", window_left, (-1,))
        one_of("logits_soft_cap", logits_soft_cap, (None, 0.0))
        kv_lens = get_seq_lens(indptr.cpu(), last_page_len.cpu(), page_size)
        super().plan(
            torch.arange(len(kv_lens) + 1, dtype=torch.int32),
            indptr,
            indices,
            kv_lens,
            num_qo_heads,
            head_dim_compressed_kv,
            head_dim_compressed_kv // 8,
            page_size,
            False,
            sm_scale,
            data_type if q_data_type is None else q_data_type,
            data_type,
        )

    begin_forward = plan

    def run(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        paged_ckv_cache: Tensor,
        paged_kpe_cache: Tensor,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Runs the planned step on the tensors of a layer.

        Args:
            q_nope, q_pe: [batch_size, num_qo_heads, dims] with head_dim_compressed_kv dims, and
                with an eighth of these.
            paged_ckv_cache, paged_kpe_cache: [pages, page_size, dim].
            q_scale, k_scale, v_scale: None or 1.
            out: [batch_size, num_qo_heads, head_dim_compressed_kv]: where o is written.
            lse: [batch_size, num_qo_heads] float32, written if it is given.
            return_lse: whether to return (o, lse), lse to base 2.
        """
        for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            one_of(name, scale, (None, 1.0))
        return super().run(q_nope, q_pe, paged_ckv_cache, paged_kpe_cache, out, lse, return_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)
