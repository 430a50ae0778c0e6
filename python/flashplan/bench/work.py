# SPDX-License-Identifier: Apache-2.0
"""Counts the operations and bytes of an attention problem."""

from collections.abc import Iterator, Sequence


def _visible_lens(
    qo_lens: Sequence[int], kv_lens: Sequence[int], window_left: int
) -> Iterator[tuple[int, int]]:
    """Yields for each request (qo_len, the number of keys that one or more queries see)."""
    for qo_len, kv_len in zip(qo_lens, kv_lens, strict=True):
        yield qo_len, kv_len if window_left < 0 else min(kv_len, window_left + qo_len)


def flops(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_qo_heads: int,
    head_dims: tuple[int, int],
    *,
    causal: bool = True,
    window_left: int = -1,
) -> float:
    """The floating-point operations of attention's two matrix products. With a causal mask, the new
    tokens of a request see half of each other."""
    own = sum(qo_len**2 for qo_len in qo_lens if qo_len > 1) / 2 if causal else 0.0
    lens = _visible_lens(qo_lens, kv_lens, window_left)
    pairs = sum(qo_len * num_keys for qo_len, num_keys in lens) - own
    return 2.0 * sum(head_dims) * num_qo_heads * pairs


def kv_bytes(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_kv_heads: int,
    head_dims: tuple[int, int],
    item_size: int,
    *,
    window_left: int = -1,
) -> int:
    """The bytes of the keys and values that one or more queries see, each read once."""
    tokens = sum(num_keys for _, num_keys in _visible_lens(qo_lens, kv_lens, window_left))
    return tokens * num_kv_heads * sum(head_dims) * item_size
