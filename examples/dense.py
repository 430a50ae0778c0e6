# SPDX-License-Identifier: Apache-2.0
"""The check: the same model with plain softmax attention, one request at a time, no cache."""

from dataclasses import dataclass

import numpy as np

from llama import Array, Llama
from serving import Request

# Two computations that round in different places may disagree on the larger of two logits that are
# closer than this, by the dtype of q, k and v. Such a disagreement is reported, but it is no error.
TIE_TOLERANCE = {"float32": 1e-3, "float16": 5e-2}


@dataclass(frozen=True)
class Difference:
    """A generated token that the dense model would not have chosen."""

    index: int  # into new_tokens
    served: int  # the token
    dense: int  # the dense model's choice
    gap: float  # how much larger its logit is
    is_tie: bool


def compare_with_dense(model: Llama, request: Request) -> list[Difference]:
    """Where greedy decoding with the dense model leaves the request's tokens.

    One forward pass over prompt and answer gives the dense model's choice after every prefix. If
    each is the token that was served then decoding token by token would have produced the same.
    """
    xp = model.xp
    num_tokens = len(request.tokens) - 1  # nothing follows the last one

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        kv_head = xp.arange(q.shape[1]) // (q.shape[1] // k.shape[1])  # of each query head
        q, k, v = (xp.asarray(x, dtype=xp.float32).swapaxes(0, 1) for x in (q, k, v))
        scores = q @ k[kv_head].swapaxes(1, 2) / q.shape[2] ** 0.5
        scores = xp.where(is_visible, scores, -xp.inf)
        weights = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ v[kv_head]).swapaxes(0, 1)

    is_visible = xp.asarray(np.tri(num_tokens, dtype=bool))
    answer = slice(request.num_prompt_tokens - 1, num_tokens)
    logits = model.forward(request.tokens[:num_tokens], range(num_tokens), attend, answer)
    differences = []
    for i, (row, served) in enumerate(zip(logits, request.new_tokens, strict=True)):
        best = int(row.argmax())
        if best != served:
            gap = float(row[best] - row[served])
            is_tie = gap < TIE_TOLERANCE[model.kv_dtype]
            differences.append(Difference(i, served, best, gap, is_tie))
    return differences
