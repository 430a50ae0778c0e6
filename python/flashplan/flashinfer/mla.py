# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention with FlashInfer's names."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.flashinfer._arguments import check_buffer, refuse
from flashplan.flashinfer._paged import PagedWrapper
from flashplan.flashinfer._plans import Batch
from flashplan.flashinfer._wrapper import Shape


class BatchMLAPagedAttentionWrapper(PagedWrapper):
    """FlashInfer's wrapper for absorbed multi-head latent attention, over `flashplan.Attention`
    with shared_kv. On GPUs other than Hopper, and on Hopper over float8_e5m2 caches, plan() raises
    UnsupportedError. Tests run this wrapper on the CPU alone.

    Args:
        float_workspace_buffer: memory on the device of the tensors, used if it is large enough.
        use_cuda_graph: whether plan() copies its tensors into the buffers.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: the buffers: int32 [batch_size + 1],
            [batch_size + 1], [most pages] and [batch_size].
        backend: "auto", "fa2" or "fa3", without effect.
    """

    _counts_all_keys = True

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, backend, None)
        self._set_buffers(kv_indptr, kv_indices, kv_len_arr)
        self._qo_indptr_buf = qo_indptr
        if use_cuda_graph:
            check_buffer("qo_indptr", qo_indptr, self._fixed_batch_size + 1)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype | str,
        kv_data_type: torch.dtype | str,
        use_profiler: bool = False,
        **options: Any,
    ) -> None:
        """Plans a step.

        Args:
            qo_indptr: [batch_size + 1]: the rows of q at which requests begin.
            kv_indptr, kv_indices: [batch_size + 1] or more, and [pages]: the page table as CSR.
            kv_len_arr: [batch_size]: keys of each request, no more than its pages have.
            head_dim_ckv, head_dim_kpe: latent and rotated dims of a key; the latter may be 0.
            sm_scale: the scale of the model, which follows from its head dim before compression.
            options: FlashInfer's other options. lse_mode, enable_pdl and use_sinks are ignored, and
                layouts must be "split"; others are refused unless they are None or False.

        Raises:
            UnsupportedError: an argument asks for what flashplan can not do.
            ValueError: the batch does not fit its pages, the buffers or an earlier plan of graphs.
        """
        for name in ("query_layout", "kv_cache_layout"):
            layout = options.pop(name, "split")
            if layout not in (None, "split"):
                raise UnsupportedError(f"{name}: expected 'split', got {layout!r}")
        for name in ("lse_mode", "enable_pdl", "use_sinks"):
            options.pop(name, None)
        refuse(use_profiler=use_profiler, **options)
        kv_indptr = kv_indptr[: len(kv_len_arr) + 1]
        self._check_fits_buffers(len(kv_len_arr), kv_indices)
        (rows,), kv_lens = self._lengths([qo_indptr], kv_indptr, kv_len_arr, page_size)
        batch = Batch(rows, kv_lens, None)
        self._set_shape(
            (num_heads, 1),
            head_dim_ckv + head_dim_kpe,
            head_dim_ckv,
            page_size,
            q_data_type,
            kv_data_type,
            None,
            has_mask=False,
            fixed_split_size=None,
            disable_split_kv=False,
        )
        self._set_options(causal, "NONE", -1, None, sm_scale, None, None)
        if self._use_cuda_graph:
            self._fix_bounds(batch)
            assert self._qo_indptr_buf is not None
            self._qo_indptr_buf.copy_(qo_indptr)
        else:
            self._qo_indptr_buf = self._there(qo_indptr, True)
        self._set_pages(kv_indptr, kv_indices, kv_len_arr, True)
        self._plan_batch(batch)

    def _options(self, shape: Shape | None) -> dict[str, Any]:
        return super()._options(shape) | {"shared_kv": True}

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor | None,
        ckv_cache: Tensor,
        kpe_cache: Tensor | None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Runs the planned step on the tensors of a layer.

        Args:
            q_nope, q_pe: [tokens, num_heads, head_dim_ckv] and [tokens, num_heads, head_dim_kpe].
            ckv_cache, kpe_cache: [pages, page_size, head_dim_ckv] and
                [pages, page_size, head_dim_kpe]. Rows without a key may hold anything.
            out: [tokens, num_heads, head_dim_ckv]: where o is written.
            lse: [tokens, num_heads] float32, written if it is given.
            return_lse: whether to return (o, lse), lse to base 2.
            return_lse_base_on_e: whether lse is the natural logarithm.
            ckv_scale, kpe_scale: real key = scale * stored key, for the latent and the rotated
                dims. If one is None, it has the value of the other. If they differ, q_pe is
                multiplied by their quotient, and rounded.
            sinks: [num_heads] float32.

        The other arguments must have their defaults.
        """
        refuse(
            profiler_buffer=profiler_buffer,
            kv_len=kv_len,
            page_table=page_table,
            o_scale=o_scale,
            ckv_scale_arr=ckv_scale_arr,
            **options,
        )
        attn = self._attention(self._shape)
        self._check_dtypes(q_nope, q_pe, ckv_cache, kpe_cache)
        if q_pe is not None and q_pe.shape[-1] == 0:
            q_pe = kpe_cache = None
        scale = kpe_scale if ckv_scale is None else ckv_scale
        if q_pe is not None and kpe_scale is not None and scale is not None and kpe_scale != scale:
            q_pe = q_pe * (kpe_scale / scale)
        has_lse = return_lse or lse is not None
        result = attn.run(
            q_nope if q_pe is None else (q_nope, q_pe),
            ckv_cache if kpe_cache is None else (ckv_cache, kpe_cache),
            page_indptr=self._paged_kv_indptr_buf,
            page_indices=self._paged_kv_indices_buf,
            out=out,
            lse=lse,
            return_lse=has_lse,
            k_scale=1.0 if scale is None else scale,
            sinks=sinks,
        )
        if has_lse and return_lse_base_on_e:
            result[1].mul_(math.log(2))
        return result if return_lse or not has_lse else result[0]

    def _check_dtypes(self, q_nope: Tensor, q_pe: Any, ckv_cache: Tensor, kpe_cache: Any) -> None:
        assert self._shape is not None
        of_q, of_kv = ("q_data_type", self._shape.q_dtype), ("kv_data_type", self._shape.kv_dtype)
        for name, tensor, (option, dtype) in (
            ("q_nope", q_nope, of_q),
            ("q_pe", q_pe, of_q),
            ("ckv_cache", ckv_cache, of_kv),
            ("kpe_cache", kpe_cache, of_kv),
        ):
            if tensor is not None and tensor.dtype not in (dtype, torch.uint8):
                raise ValueError(
                    f"{name}.dtype: expected the {option} of plan(), {dtype}, got {tensor.dtype}"
                )
