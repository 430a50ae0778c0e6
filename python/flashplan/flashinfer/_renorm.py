# SPDX-License-Identifier: Apache-2.0
"""Filters that return probabilities or logits instead of tokens.

Of elements that are equal to the smallest kept one, flashplan keeps only as many as the filter
needs, those with smaller ids. FlashInfer keeps all of them. So these functions keep every element
that is not below the smallest one that flashplan keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flashplan as fp
from flashplan.flashinfer._sampling import parameter

# The smallest top_p that flashplan takes, which replaces a top_p of 0.
_LEAST = torch.finfo(torch.float32).tiny


def _smallest(rows: Tensor, is_kept: Tensor) -> Tensor:
    """The smallest kept element of each row: [batch, 1]."""
    return rows.masked_fill(~is_kept, torch.inf).amin(-1, keepdim=True)


def _renormalised(probs: Tensor, is_kept: Tensor) -> Tensor:
    kept = probs.float().masked_fill(probs < _smallest(probs, is_kept), 0)
    return (kept / kept.sum(-1, keepdim=True)).to(probs.dtype)


def top_k_mask_logits(logits: Tensor, top_k: int | Tensor) -> Tensor:
    """The top_k largest of logits [batch, vocab]; others become -inf.

    Elements that are equal to the smallest one that is kept are kept too.
    """
    masked = fp.top_k_mask(logits, parameter("top_k", top_k, logits, torch.int32))
    return logits.masked_fill(logits < _smallest(logits, masked > -torch.inf), -torch.inf)


def top_k_renorm_probs(
    probs: Tensor, top_k: int | Tensor, is_deterministic: bool = False
) -> Tensor:
    """The top_k largest of probs [batch, vocab], divided by their sum; others become 0.

    Elements that are equal to the smallest one that is kept are kept too.
    """
    masked = fp.top_k_mask(probs, parameter("top_k", top_k, probs, torch.int32))
    return _renormalised(probs, masked > -torch.inf)


def top_p_renorm_probs(
    probs: Tensor, top_p: float | Tensor, is_deterministic: bool = False
) -> Tensor:
    """The fewest largest of probs [batch, vocab] with a sum >= top_p, divided by their sum; others
    become 0. Rows must sum to 1 within 1 %. With top_p = 0 the largest one is kept.

    Elements that are equal to the smallest one that is kept are kept too.
    """
    wanted = parameter("top_p", top_p, probs, torch.float32)
    if isinstance(wanted, Tensor):
        wanted = wanted.clamp(_LEAST, 1)
    else:
        wanted = min(max(wanted, _LEAST), 1.0)
    kept = fp.top_p_renorm(probs, wanted)
    return _renormalised(probs, kept > 0)
