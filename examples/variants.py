# SPDX-License-Identifier: Apache-2.0
"""Attention of your own: ALiBi, FlashSigmoid, and a mask of documents packed in a sequence.

Each is compared with the same in NumPy. docs/howto/variants.md explains the bodies.
"""

import numpy as np

import flashplan as fp

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 64, 150
OPTIONS = {"page_size": None, "q_dtype": "float32", "device": "cpu"}
rng = np.random.default_rng(0)
q = rng.standard_normal((TOKENS, HEADS, DIM), np.float32)
k, v = rng.standard_normal((2, TOKENS, KV_HEADS, DIM), np.float32)

query, key = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None]
causal = key <= query


def logits(head):
    return q[:, head] @ k[:, head * KV_HEADS // HEADS].T / np.sqrt(DIM)


def softmax(x, seen):
    weights = np.where(seen, np.exp(x - x.max(axis=1, keepdims=True)), 0)
    return weights / weights.sum(axis=1, keepdims=True)


def compare(name, o, weights_of):
    """Prints how far o is from the values of each head, weighted in NumPy."""
    heads = [weights_of(h) @ v[:, h * KV_HEADS // HEADS] for h in range(HEADS)]
    error = np.abs(o - np.stack(heads, axis=1)).max()
    print(f"{name:10} largest difference to NumPy: {error:.1e}")
    assert error < 1e-4


# --8<-- [start:alibi]
# Linear biases: a logit falls with the distance of its key.
alibi = fp.Variant(
    "alibi",
    logits="return x + slopes[qo_head] * (key - query);",
    tensors={"slopes": "float32"},
)
slopes = (2.0 ** (-8 * np.arange(1, HEADS + 1) / HEADS)).astype(np.float32)

attn = fp.Attention(HEADS, KV_HEADS, DIM, variant=alibi, **OPTIONS)
attn.plan([0, TOKENS], [TOKENS])
o = attn.run(q, k, v, slopes=slopes)
# --8<-- [end:alibi]
compare("ALiBi", o, lambda h: softmax(logits(h) + slopes[h] * (key - query), causal))

# A sigmoid of each logit instead of a softmax over all.
sigmoid = fp.Variant(
    "sigmoid",
    logits="return 1 / (1 + exp(-(x + bias)));",
    softmax=False,
    scalars={"bias": 0.0},
)
attn = fp.Attention(HEADS, KV_HEADS, DIM, variant=sigmoid, **OPTIONS)
attn.plan([0, TOKENS], [TOKENS])
bias = -np.log(TOKENS)
o = attn.run(q, k, v, bias=bias)
compare("sigmoid", o, lambda h: np.where(causal, 1 / (1 + np.exp(-(logits(h) + bias))), 0))

# --8<-- [start:documents]
# Several documents in one sequence, which do not see each other.
document = np.repeat(np.arange(3, dtype=np.int32), TOKENS // 3)
first_key = np.searchsorted(document, document)  # of each token's document


def own_document(request, query, kv_len):
    return first_key[query], query + 1


documents = fp.Variant(
    "documents",
    mask="return document[query] == document[key];",
    tensors={"document": "int32"},
    key_range=own_document,  # the keys before the document are not even read
)
attn = fp.Attention(HEADS, KV_HEADS, DIM, variant=documents, **OPTIONS)
attn.plan([0, TOKENS], [TOKENS])
o = attn.run(q, k, v, document=document)
# --8<-- [end:documents]
same = causal & (document[:, None] == document[None])
compare("documents", o, lambda h: softmax(logits(h), same))
