# SPDX-License-Identifier: Apache-2.0
"""Ready-made variants, for `Attention(..., variant=)`.

- alibi: linear biases (Press et al., 2022). Its tensor is `slopes`, [num_qo_heads] float32: a logit
  of head h becomes logit - slopes[h] * (query - key), with the positions of query and key.
- sigmoid: weights sigmoid(logit + bias) instead of a softmax (FlashSigmoid, Ramapuram et al.,
  2024). Its scalar `bias` is 0 by default; a usual value is minus the logarithm of the number of
  keys.
- sink_tokens: StreamingLLM's mask.
- scored_items: prompts that are a prefix and items after it, which are scored without seeing each
  other; it needs causal=True. Its tensors are `prefix_lens`, [batch_size] int32, and `seen`, int32:
  for each token after the prefix, how many tokens of its item it sees, itself included: 1, 2, 3 and
  so on. Tokens between items see the prefix alone and have 0. The entries of request r begin at
  index r * stride, where stride is a scalar.

Examples:
    >>> fp.variants.sink_tokens(4, window=1019)
    Variant('sink_tokens', mask='return key < first || key >= query - window;', ...)
"""

from __future__ import annotations

from flashplan.values import to_int
from flashplan.variant import Variant

alibi = Variant(
    "alibi",
    logits="return x + slopes[qo_head] * (key - query);",
    tensors={"slopes": "float32"},
)

sigmoid = Variant(
    "sigmoid",
    logits="return 1 / (1 + exp(-(x + bias)));",
    softmax=False,
    scalars={"bias": 0.0},
)


scored_items = Variant(
    "scored_items",
    mask="""
int place = query - prefix_lens[request];
if (key < prefix_lens[request]) return true;
return place >= 0 && query - key < seen[request * int(stride) + place];
""",
    tensors={"prefix_lens": "int32", "seen": "int32"},
    scalars={"stride": 0},
)


def sink_tokens(n: int, window: int = 1023) -> Variant:
    """StreamingLLM's mask (Xiao et al., 2024): the first n keys, and a window before each query.

    The keys between are read and hidden, not skipped, since a key_range is one interval.

    Args:
        n: number of keys at the start of a request that every query sees.
        window: number of keys before its own that a query also sees. run() may be given other
            values of both, as `first` and `window`, without compiling again.
    """
    first, window = to_int("n", n), to_int("window", window)
    for argument, number in (("n", first), ("window", window)):
        if not 0 <= number <= 1 << 24:
            raise ValueError(f"{argument}: expected 0 to {1 << 24}, got {number}")
    return Variant(
        "sink_tokens",
        mask="return key < first || key >= query - window;",
        scalars={"first": first, "window": window},
    )
