# SPDX-License-Identifier: Apache-2.0
"""The check: the same model with plain softmax attention, one request at a time, no cache."""

from dataclasses import dataclass

from serving import Request
from smollm2 import Array, SmolLM2

# Two float32 computations that sum in different orders may disagree on the larger of two logits
# that are closer than this. Such a disagreement is reported, but it is not an error.
TIE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Difference:
    """A generated token that the dense model would not have chosen."""

    index: int  # into new_tokens
    served: int  # the token
    dense: int  # the dense model's choice
    gap: float  # how much larger its logit is

    @property
    def is_tie(self) -> bool:
        return self.gap < TIE_TOLERANCE


def compare_with_dense(model: SmolLM2, request: Request) -> list[Difference]:
    """Where greedy decoding with the dense model leaves the request's tokens.

    One forward pass over prompt and answer gives the dense model's choice after every prefix. If
    each is the token that was served then decoding token by token would have produced the same.
    """
    xp = model.xp
    num_tokens = len(request.tokens) - 1  # nothing follows the last one

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        group_size = q.shape[1] // k.shape[1]
        k = xp.repeat(k, group_size, axis=1)
        v = xp.repeat(v, group_size, axis=1)
        scores = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) / xp.float32(q.shape[2] ** 0.5)
        scores = xp.where(xp.tri(num_tokens, dtype=bool), scores, -xp.inf)
        weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ v.transpose(1, 0, 2)).transpose(1, 0, 2)

    tokens = xp.asarray(request.tokens[:num_tokens])
    answer = slice(request.num_prompt_tokens - 1, num_tokens)
    logits = model.forward(tokens, xp.arange(num_tokens), attend, answer)
    differences = []
    for i, (row, served) in enumerate(zip(logits, request.new_tokens, strict=True)):
        best = int(row.argmax())
        if best != served:
            differences.append(Difference(i, served, best, float(row[best] - row[served])))
    return differences
