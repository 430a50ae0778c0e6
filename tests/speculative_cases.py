# SPDX-License-Identifier: Apache-2.0
"""Drafts of chains and trees, and what is known of the tokens that come of them."""

import numpy as np

TREES = {
    "chain": None,
    "siblings": [-1, -1, -1],
    "tree": [-1, -1, 0, 0, 1, 2, 2],
    "one": [-1],
}


def distributions(rng, *shape, sharp=2.0, zeros=0.0):
    """Random rows of probabilities, of which a part is 0."""
    logits = sharp * rng.standard_normal(shape)
    logits[rng.random(shape) < zeros] = -np.inf
    logits[..., 0] = np.maximum(logits[..., 0], -5)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)).astype(np.float32)


class Model:
    """Conditional distributions of tokens after every sequence of up to `depth` tokens."""

    def __init__(self, rng, vocab, depth, **options):
        self.after = [distributions(rng, *(vocab,) * (d + 1), **options) for d in range(depth + 1)]

    def of(self, tokens):
        """Rows of probabilities after each row of tokens."""
        return self.after[tokens.shape[1]][tuple(tokens.T)]


def draw(rng, rows):
    """One token of each row of probabilities."""
    mass = np.cumsum(rows.astype(np.float64), -1)
    return (rng.random((len(rows), 1)) * mass[:, -1:] >= mass).sum(-1).astype(np.int32)


def drafts(rng, draft, target, parents, count):
    """`count` requests: tokens that the small model draws, and the rows of both models."""
    n = len(parents)
    context = {-1: np.zeros((count, 0), np.int32)}
    tokens = np.zeros((count, n), np.int32)
    draft_probs = np.zeros((count, n, draft.after[0].shape[-1]), np.float32)
    target_probs = np.zeros((count, n + 1, draft_probs.shape[-1]), np.float32)
    target_probs[:, 0] = target.of(context[-1])
    for i, parent in enumerate(parents):
        draft_probs[:, i] = draft.of(context[parent])
        tokens[:, i] = draw(rng, draft_probs[:, i])
        context[i] = np.concatenate([context[parent], tokens[:, i : i + 1]], 1)
        target_probs[:, i + 1] = target.of(context[i])
    return tokens, draft_probs, target_probs


def assert_follows(parents, tokens, out, num_accepted, nodes, vocab):
    """The accepted drafts are a path from the root, then one token and -1."""
    for row, path, count, given in zip(out, nodes, num_accepted, tokens, strict=True):
        assert (path[count:] == -1).all()
        assert [parents[node] for node in path[:count]] == [-1, *path[:count]][:count]
        assert np.array_equal(row[:count], given[path[:count]])
        assert 0 <= row[count] < vocab
        assert (row[count + 1 :] == -1).all()
