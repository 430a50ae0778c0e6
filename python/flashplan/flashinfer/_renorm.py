# SPDX-License-Identifier: Apache-2.0
"""Filters that give probabilities or logits instead of tokens, in operations of PyTorch.

Elements that are equal to the smallest one that is kept are kept too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashplan.flashinfer._sampling import parameter


def _column(name: str, value: int | float | Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, 1]."""
    column = parameter(name, value, rows, dtype)
    return torch.as_tensor(column, dtype=dtype, device=rows.device).expand(len(rows))[:, None]


def _kth_largest(rows: Tensor, top_k: int | Tensor) -> Tensor:
    """Of each row [batch, 1]; the smallest one if there are fewer."""
    k = _column("top_k", top_k, rows, torch.int64).clamp(1, rows.shape[1])
    return rows.sort(-1, descending=True).values.gather(1, k - 1)


def top_k_mask_logits(logits: Tensor, top_k: int | Tensor) -> Tensor:
    """logits [batch, vocab] with -inf for those that are not among the top_k largest."""
    return logits.masked_fill(logits < _kth_largest(logits, top_k), -torch.inf)


def top_k_renorm_probs(
    probs: Tensor, top_k: int | Tensor, is_deterministic: bool = False
) -> Tensor:
    """The top_k largest of probs [batch, vocab], divided by their sum; others become 0."""
    kept = probs.float().masked_fill(probs < _kth_largest(probs, top_k), 0)
    return (kept / kept.sum(-1, keepdim=True)).to(probs.dtype)


def top_p_renorm_probs(
    probs: Tensor, top_p: float | Tensor, is_deterministic: bool = False
) -> Tensor:
    """The fewest largest of probs [batch, vocab] with a sum >= top_p, divided by their sum; others
    become 0."""
    wanted = _column("top_p", top_p, probs, torch.float32)
    ranked = probs.float().sort(-1, descending=True).values
    num_kept = ((ranked.cumsum(-1) - ranked) < wanted).sum(-1, keepdim=True).clamp(min=1)
    kept = probs.float().masked_fill(probs < ranked.gather(1, num_kept - 1).to(probs.dtype), 0)
    return (kept / kept.sum(-1, keepdim=True)).to(probs.dtype)
