# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's rotation of queries and new keys by their positions in a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from flashplan.flash_arguments import check_dims
from flashplan.rope import apply_rope


def rotated(
    q: Tensor,
    k: Tensor,
    rotary_cos: Tensor,
    rotary_sin: Tensor,
    kv_lens: Tensor,
    is_interleaved: bool,
    is_masked: bool,
) -> tuple[Tensor, Tensor]:
    """(q, k), rotated. Token i of k has the position kv_lens + i in its sequence.

    Args:
        q, k: [batch_size, tokens, heads, head_dim]; numbers of tokens and heads may differ.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2].
        kv_lens: [batch_size] int32: keys before those of k.
        is_interleaved: whether dims 2 i and 2 i + 1 are a pair, or i and i + rotary_dim / 2.
        is_masked: whether there is a causal mask or a window. Then token i of q has the position
            kv_lens + i, else all tokens of q have the position kv_lens.
    """
    for name, table in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        check_dims(name, table, 2)
    table = torch.cat((rotary_cos, rotary_sin), 1).float()
    results = []
    for x, step in ((q, 1 if is_masked else 0), (k, 1)):
        places = kv_lens[:, None] + step * torch.arange(x.shape[1], device=x.device)
        rows = x.flatten(0, 1)
        turned, _ = apply_rope(
            rows, rows[:, :0], places.flatten(), cos_sin_cache=table, interleaved=is_interleaved
        )
        results.append(turned.view(x.shape))
    return results[0], results[1]
