# SPDX-License-Identifier: Apache-2.0
"""Masks and biases of FlashAttention's functions, as options of `Attention` or as a `Variant`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashplan.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

# A window of more keys to the right than this is left out: no sequence is so long that the window
# would hide a key, and scalars of a variant are float32, in which larger integers are not exact.
_FARTHEST = 1 << 24


@functools.lru_cache(maxsize=64)
def _variant(right: int, has_slopes: bool, has_ranges: bool) -> Variant:
    """A variant with a window of `right` keys after the query (-1: no end), and ALiBi's bias.

    Args:
        has_ranges: whether keys after the window are skipped, which needs lengths on the host.
    """
    bodies: dict[str, Any] = {"scalars": {}}
    if right >= 0:
        bodies["mask"] = "return key <= query + right;"
        bodies["scalars"]["right"] = right
    if has_slopes:
        bodies["logits"] = "return x - slopes[request * int(stride) + qo_head] * abs(key - query);"
        bodies["scalars"]["stride"] = 0
        bodies["tensors"] = {"slopes": "float32"}
    if right >= 0 and has_ranges:
        bodies["key_range"] = lambda request, query, kv_len: (0, query + right + 1)
    return Variant("flash_attn", **bodies)


def mask_options(
    causal: bool,
    window_size: Sequence[int] | None,
    alibi_slopes: Tensor | None,
    batch_size: int,
    num_heads: int,
    has_host_lengths: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Masks and biases as (options of `Attention`, arguments of its run()).

    Args:
        alibi_slopes: [num_heads] or [batch_size, num_heads].
        has_host_lengths: whether plan() gets the lengths of keys, not only upper bounds.
    """
    left, right = (-1, -1) if window_size is None else window_size
    options: dict[str, Any] = {
        "causal": bool(causal) or right == 0,
        "window_left": left if left >= 0 else -1,
    }
    if options["causal"] or right > _FARTHEST:
        right = -1
    arguments: dict[str, Any] = {}
    if alibi_slopes is not None:
        shape = list(alibi_slopes.shape)
        if shape not in ([num_heads], [batch_size, num_heads]):
            raise ValueError(
                f"alibi_slopes: expected shape [{num_heads}] or [{batch_size}, {num_heads}], got "
                f"{shape}"
            )
        stride = num_heads if alibi_slopes.dim() == 2 else 0
        arguments |= {"slopes": alibi_slopes.to(torch.float32).flatten(), "stride": stride}
    if right >= 0 or alibi_slopes is not None:
        options["variant"] = _variant(right, alibi_slopes is not None, has_host_lengths)
    return options, arguments
