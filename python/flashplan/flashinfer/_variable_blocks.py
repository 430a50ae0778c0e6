# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention with blocks of any sizes, which may differ between kv heads."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashplan.flashinfer._arguments import refuse
from flashplan.flashinfer._block_wrapper import BlockWrapper, refuse_positions


class VariableBlockSparseAttentionWrapper(BlockWrapper):
    """Attention within blocks of queries and keys, which a map for each kv head selects. Each row
    of blocks of a kv head becomes a request, and each key a page of one key.

    Args:
        float_workspace_buffer: memory on the device of the tensors, used if it is large enough.
        backend: "auto", "fa2" or "fa3", without effect.
    """

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, backend)
        self._num_kv_heads = 0

    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        """Plans the blocks. The host waits for the map and the sizes of blocks.

        Args:
            block_mask_map: bool [num_kv_heads, block rows, block columns]: which blocks are seen.
            block_row_sz, block_col_sz: [num_kv_heads, block rows] and [num_kv_heads, block
                columns]: queries and keys of each block; their sums are equal for all heads.
            pos_encoding_mode: "NONE".

        Raises:
            UnsupportedError: an argument asks for what flashplan can not do.
            ValueError: sizes do not fit the map, or heads have different numbers of keys.
        """
        refuse(causal=causal)
        refuse_positions(pos_encoding_mode)
        device = self._wrapper.device
        seen = block_mask_map.to(device).bool()
        rows, columns = (x.to(device, torch.int64) for x in (block_row_sz, block_col_sz))
        for name, sizes, wanted in (
            ("block_mask_map", seen, (num_kv_heads, rows.shape[-1], columns.shape[-1])),
            ("block_row_sz", rows, (num_kv_heads, seen.shape[1])),
            ("block_col_sz", columns, (num_kv_heads, seen.shape[-1])),
        ):
            if sizes.shape != wanted:
                raise ValueError(f"{name}: expected shape {list(wanted)}, got {list(sizes.shape)}")
        num_keys = columns.sum(1).tolist()
        if len(set(num_keys)) > 1:
            raise ValueError(f"block_col_sz: expected equal sums for all heads, got {num_keys}")
        column = torch.arange(columns.shape[1], device=device).repeat(num_kv_heads)
        column_of_key = column.repeat_interleave(columns.flatten()).view(num_kv_heads, 1, -1)
        keys = seen.gather(2, column_of_key.expand(-1, seen.shape[1], -1))
        head, _, key = keys.nonzero().unbind(1)
        self._num_kv_heads = num_kv_heads
        self._wrapper.plan(
            _ends(rows.flatten()),
            _ends(keys.sum(2).flatten()),
            (head * num_keys[0] + key).int(),
            torch.ones(rows.numel(), dtype=torch.int32, device=device),
            num_qo_heads // num_kv_heads,
            1,
            head_dim,
            1,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            non_blocking=non_blocking,
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Runs the planned blocks: o [num_qo_heads, queries, head_dim], or (o, lse).

        Args:
            q: [num_qo_heads, queries, head_dim].
            k, v: [num_kv_heads, keys, head_dim].
            return_lse: whether to return (o, lse), lse [num_qo_heads, queries] to base 2.
        """
        num_heads = self._num_kv_heads
        grouped = q.reshape(num_heads, -1, *q.shape[1:])  # [kv heads, group, queries, dim]
        rows = grouped.transpose(1, 2).flatten(0, 1)
        k, v = (x.reshape(-1, 1, 1, x.shape[-1]) for x in (k, v))
        results = self._wrapper.run(rows, (k, v), return_lse=True)
        o, of_rows = (
            x.view(num_heads, -1, *x.shape[1:]).transpose(1, 2).flatten(0, 1) for x in results
        )
        o = o.contiguous() if out is None else out.copy_(o)
        if lse is not None:
            of_rows = lse.copy_(of_rows)
        return (o, of_rows.contiguous()) if return_lse else o

    run_return_lse = functools.partialmethod(run, return_lse=True)


def _ends(lens: Tensor) -> Tensor:
    """The indptr of requests with these lengths [n]: int32 [n + 1]."""
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
