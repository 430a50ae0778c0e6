# SPDX-License-Identifier: Apache-2.0
"""Finds the largest elements of rows, by PyTorch's operators."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from flashplan.flashinfer._arguments import one_of
from flashplan.flashinfer._missing import top_k_page_table_transform, top_k_ragged_transform

__all__ = [
    "TopKTieBreak",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "topk",
]


class TopKTieBreak(IntEnum):
    """Which elements are selected if several are equal to the smallest selected one."""

    NONE = 0  # any of them
    SMALL = 1  # those with the smallest indices
    LARGE = 2  # those with the largest indices


def top_k(
    input: Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[Tensor, Tensor]:
    """The k largest elements of each row.

    Args:
        input: [rows, columns] of any float dtype.
        k: 1 to columns.
        sorted: whether elements are in descending order; else in any order.
        tie_break: a `TopKTieBreak`. Other ones than NONE sort the rows, which takes longer.

    `deterministic` and `dsa_graph_safe` have no effect: results are always repeatable, and CUDA
    graphs can always capture the call.

    Returns:
        (values [rows, k] of the dtype of input, indices int64 [rows, k]).

    Raises:
        ValueError: k or the shape of input is not as said above.
        UnsupportedError: tie_break is none of those above.
    """
    if input.dim() != 2:
        raise ValueError(f"input: expected 2 dimensions, got shape {list(input.shape)}")
    if not 1 <= k <= input.shape[1]:
        raise ValueError(f"k: expected 1 to {input.shape[1]} (columns of input), got {k}")
    one_of("tie_break", tie_break, tuple(TopKTieBreak))
    if tie_break == TopKTieBreak.NONE:
        values, indices = torch.topk(input, k, sorted=sorted)
        return values, indices
    from_end = tie_break == TopKTieBreak.LARGE
    # A stable sort keeps the order of equal elements, so of these the first ones are selected.
    values, indices = torch.sort(input.flip(1) if from_end else input, stable=True, descending=True)
    values, indices = values[:, :k].contiguous(), indices[:, :k].contiguous()
    return values, input.shape[1] - 1 - indices if from_end else indices


topk = top_k
