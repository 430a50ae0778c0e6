# SPDX-License-Identifier: Apache-2.0
"""Decodes over a paged cache: every request has one query, or the same number of queries."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.flashinfer._arguments import Cache
from flashplan.flashinfer._paged import PagedWrapper
from flashplan.flashinfer._plans import Batch

if TYPE_CHECKING:
    import numpy.typing as npt


@functools.lru_cache(maxsize=64)
def _equal_indptr(batch_size: int, qo_len: int) -> npt.NDArray[np.int32]:
    indptr = np.arange(batch_size + 1, dtype=np.int32) * np.int32(qo_len)
    indptr.flags.writeable = False
    return indptr


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """FlashInfer's wrapper for decodes, over `flashplan.Attention`.

    Args:
        float_workspace_buffer: memory on the device of the tensors, used if it is large enough.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: whether runs are captured. Then the batch size is that of the buffers, and
            plan() copies its tensors into them.
        use_tensor_cores: needed for q_len_per_req > 1, as in FlashInfer; otherwise without effect.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: int32
            [batch_size + 1], [most pages] and [batch_size], for CUDA graphs.
        backend: "auto", "fa2" or "fa3", without effect.
        jit_args: None, or those of the variant AttentionSink.

    Raises:
        UnsupportedError: an argument asks for what flashplan can not do.
        ValueError: a buffer is missing or has a wrong size.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._use_tensor_cores = use_tensor_cores
        self._q_len_per_req: int | None = None
        self._set_buffers(
            paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        )

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> None:
        """Plans a step, on the current stream of PyTorch.

        Lengths on a GPU are copied to the host, which waits for them. block_tables and seq_lens are
        not needed.

        Args:
            indptr, indices: [batch_size + 1] and [pages]: the page table as CSR.
            last_page_len: [batch_size]: keys in the last page of each request.
            head_dim: head dim of q, k, v and o.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
            data_type: dtype of k and v if kv_data_type is None, and of q if q_data_type is None.
            fixed_split_size, disable_split_kv: a positive size or True makes the bits of a
                request's results independent of its batch (batch_invariant).
            q_len_per_req: rows of q of each request, which are its last tokens.

        Raises:
            UnsupportedError: an argument asks for what flashplan can not do.
            ValueError: the batch does not fit the buffers or an earlier plan of CUDA graphs.
        """
        if window_right > 0:
            raise UnsupportedError(f"window_right: expected <= 0, got {window_right}")
        self._plan_decodes(
            indptr,
            None,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads),
            head_dim,
            page_size,
            (data_type if q_data_type is None else q_data_type) or "float16",
            data_type if kv_data_type is None else kv_data_type,
            o_data_type,
            (window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            pos_encoding_mode,
            q_len_per_req,
            fixed_split_size,
            disable_split_kv,
            is_causal,
            non_blocking,
        )

    begin_forward = plan

    def _plan_decodes(
        self,
        indptr: Tensor,
        indptr_host: Tensor | None,
        indices: Tensor,
        last_page_len: Tensor,
        heads: tuple[int, int],
        head_dim: int,
        page_size: int,
        q_data_type: Any,
        kv_data_type: Any,
        o_data_type: Any,
        options: tuple[int, float | None, float | None, float | None, float | None],
        pos_encoding_mode: str,
        q_len_per_req: int,
        fixed_split_size: int | None,
        disable_split_kv: bool,
        is_causal: bool | None,
        non_blocking: bool,
        copies: bool = True,
    ) -> None:
        batch_size = len(last_page_len)
        self._check_q_len(q_len_per_req)
        self._check_fits_buffers(batch_size, indices)
        host = indptr if indptr_host is None else indptr_host[: batch_size + 1]
        _, kv_lens = self._lengths([], host, last_page_len, page_size)
        causal = q_len_per_req > 1 if is_causal is None else is_causal
        if q_len_per_req > 1 and causal and kv_lens.min(initial=q_len_per_req) < q_len_per_req:
            raise ValueError(
                f"q_len_per_req: expected requests of at least {q_len_per_req} keys, since earlier "
                f"rows would have an empty KV range, got {kv_lens.min()}"
            )
        self._set_shape(
            heads,
            head_dim,
            None,
            page_size,
            q_data_type,
            kv_data_type,
            o_data_type,
            has_mask=False,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
        )
        self._set_options(causal, pos_encoding_mode, *options)
        if self._use_cuda_graph:
            self._bounds = (batch_size, batch_size * q_len_per_req)
        if copies or not self._use_cuda_graph:
            self._set_pages(indptr, indices, last_page_len, non_blocking)
        self._q_len_per_req = q_len_per_req
        self._plan_batch(Batch(_equal_indptr(batch_size, q_len_per_req), kv_lens, None))

    def _check_q_len(self, q_len_per_req: int) -> None:
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req: expected >= 1, got {q_len_per_req}")
        if q_len_per_req > 1 and not self._use_tensor_cores:
            raise ValueError(
                f"q_len_per_req: expected 1 without use_tensor_cores=True, got {q_len_per_req}"
            )
        if self._use_cuda_graph and self._q_len_per_req not in (None, q_len_per_req):
            raise ValueError(
                f"q_len_per_req: expected {self._q_len_per_req}, which is part of the frozen "
                f"cudagraph shape, got {q_len_per_req}"
            )

    def _check_num_rows(self, num_rows: int) -> None:
        """Raises ValueError if q has enough rows for more than the planned q_len_per_req in every
        request. Fewer surplus rows are allowed."""
        planned = self._q_len_per_req or 1
        batch_size = self._num_rows // planned
        if batch_size > 0 and num_rows // batch_size > planned:
            raise ValueError(
                f"q: expected {self._num_rows} rows, q_len_per_req = {planned} of plan() for each "
                f"request, got {num_rows}; more than one needs use_tensor_cores=True"
            )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Runs the planned step on the tensors of a layer.

        Args:
            q: [batch_size * q_len_per_req, num_qo_heads, head_dim].
            paged_kv_cache: (k, v), each [pages, page_size, num_kv_heads, head_dim] (NHD) or
                [pages, num_kv_heads, page_size, head_dim] (HND), or one tensor [pages, 2, ...].
                Pages of one token may lack the dimension of tokens.
            args: with the variant AttentionSink: its sinks [num_qo_heads] and sm_scale; or, with q
                of 8 bits, scale_q, scale_k and scale_v, float32 [1] or one for each head.
            q_scale, k_scale: factors of the logits, for caches of any dtype.
            v_scale: factor of the output.
            out: [tokens, num_qo_heads, head_dim]: where o is written.
            lse: [tokens, num_qo_heads] float32, written if it is given.
            return_lse: whether to return (o, lse), lse to base 2.
            window_left: replaces that of plan().
            sinks: [num_qo_heads] float32 or bfloat16; see `flashplan.Attention.run`.

        The other arguments must have their defaults, or are ignored.

        Raises:
            ValueError, TypeError: a tensor does not fit the plan. Nothing was written.
            RuntimeError: there was no plan(), or none for these options before a capture.
        """
        if q_len_per_req not in (None, self._q_len_per_req):
            raise ValueError(
                f"q_len_per_req: expected that of plan(), {self._q_len_per_req}, "
                f"got {q_len_per_req}"
            )
        if q.shape[0] != self._num_rows:
            self._check_num_rows(q.shape[0])
        return self._run_pages(
            q,
            paged_kv_cache,
            args,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
            window_left=window_left,
            sinks=sinks,
            kv_cache_sf=kv_cache_sf,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Calls run() with options that replace those of plan()."""
        self._set_options(
            self._causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            rope_scale,
            rope_theta,
        )
        self._forward_key = self._key(self._shape)
        return self.run(
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
        )

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
