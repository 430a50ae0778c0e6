# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention: a row of blocks becomes a request, a block of columns a page."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashplan.flashinfer._arguments import is_8_bit, product, refuse, to_torch_dtype
from flashplan.flashinfer._block_wrapper import BlockWrapper, refuse_positions
from flashplan.flashinfer._variable_blocks import VariableBlockSparseAttentionWrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]


class BlockSparseAttentionWrapper(BlockWrapper):
    """Attention of M queries over N keys within selected blocks of R queries and C keys.

    Args:
        float_workspace_buffer: memory on the device of the tensors, used if it is large enough.
        backend: "auto", "fa2" or "fa3", without effect.
    """

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, backend)
        self._block_keys = 1

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str = "float16",
        non_blocking: bool = True,
        **options: Any,
    ) -> None:
        """Plans attention within the blocks that the arguments select.

        Args:
            indptr, indices: [M / R + 1] and [blocks]: the blocks of keys of each block of queries.
            M, N, R, C: numbers of queries and keys, and those of a block, which divide them.
            mask: bool [blocks, R, C]: what queries see inside of the blocks; default: everything.
            pos_encoding_mode: "NONE": keys of selected blocks have other positions than in k.
            o_data_type: dtype of o; "float16", the default, stands for that of q.
            options: FlashInfer's other options, which are refused unless they are None or False.

        Raises:
            UnsupportedError: an argument asks for what flashplan can not do.
            ValueError: blocks do not divide the queries and keys.
        """
        refuse(packed_mask=packed_mask, causal=causal, **options)
        refuse_positions(pos_encoding_mode)
        for name, size, block in (("M", M, R), ("N", N, C)):
            if size % block:
                raise ValueError(f"{name}: expected a multiple of {block}, got {size}")
        num_rows = len(indptr) - 1
        of_16_bits = not is_8_bit(to_torch_dtype("q_data_type", q_data_type))
        is_default = of_16_bits and o_data_type in ("float16", torch.float16)
        if num_rows * R != M:
            raise ValueError(f"indptr: expected {M // R + 1} elements, got {len(indptr)}")
        self._block_keys = C
        if mask is not None:  # puts the bits of a query for all of its blocks side by side
            ends = indptr.tolist()
            rows = [mask[a:b].transpose(0, 1).flatten() for a, b in zip(ends, ends[1:])]
            mask = torch.cat(rows)
        self._wrapper.plan(
            torch.arange(num_rows + 1, dtype=torch.int32) * R,
            indptr,
            indices,
            torch.full((num_rows,), C, dtype=torch.int32),
            num_qo_heads,
            num_kv_heads,
            head_dim,
            C,
            custom_mask=mask,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=None if is_default else o_data_type,
            non_blocking=non_blocking,
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Runs the planned blocks: o [M, num_qo_heads, head_dim], or (o, lse).

        Args:
            q: [M, num_qo_heads, head_dim].
            k, v: [N, num_kv_heads, head_dim].
            scale_q, scale_k, scale_v: float32, [1] or one for each head.
            return_lse: whether to return (o, lse), lse [M, num_qo_heads] to base 2.
        """
        k, v = (x.view(-1, self._block_keys, *x.shape[1:]) for x in (k, v))
        scales = (scale_q, scale_k, scale_v) if is_8_bit(q.dtype) else ()
        return self._wrapper.run(
            q,
            (k, v),
            *scales,
            k_scale=None if scales else product(product(scale_q, scale_k), None),
            v_scale=None if scales else product(scale_v, None),
            out=out,
            lse=lse,
            return_lse=return_lse,
        )
