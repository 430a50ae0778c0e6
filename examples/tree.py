# SPDX-License-Identifier: Apache-2.0
"""Verification of a draft tree: one forward pass over all nodes, then the longest accepted path.

A draft model proposes several continuations of a request at once, as a tree. Each node sees the
tokens before the tree and the nodes above it. The target model computes all nodes in one step; a
node is accepted if it is what the target chose after its parent.
"""

import numpy as np

import flashplan as fp

NUM_CONTEXT, VOCABULARY, PAGE = 45, 50, 16
HEADS, KV_HEADS, DIM = 4, 2, 64

# The draft: the parent and the token of each node; node 0 is the last token that is known already.
PARENTS = [-1, 0, 0, 1, 1, 2, 3]
rng = np.random.default_rng(0)


def tree_mask(parents):
    """[nodes, nodes] of bool: node i sees itself and the nodes above it."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def accepted_path(parents, tokens, choices):
    """Nodes from the root down, as long as one is the target's choice after its parent."""
    path = [0]
    while True:
        children = [node for node, parent in enumerate(parents) if parent == path[-1]]
        accepted = [node for node in children if tokens[node] == choices[path[-1]]]
        if not accepted:
            return path
        path.append(accepted[0])


# A toy target model of one layer, whose tokens are embedded in queries, keys and values.
embed_q, embed_k, embed_v = rng.standard_normal((3, VOCABULARY, HEADS, DIM), np.float32)
unembed = rng.standard_normal((HEADS * DIM, VOCABULARY), np.float32)
context = rng.integers(VOCABULARY, size=NUM_CONTEXT)


def choices_after(o):
    return (o.reshape(len(o), -1) @ unembed).argmax(axis=1)


def alone(tokens):
    """The target's choice after these tokens, without a tree: plain causal attention."""
    attn = fp.Attention(HEADS, KV_HEADS, DIM, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 1], [len(tokens)])
    o = attn.run(embed_q[tokens[-1:]], embed_k[tokens, :KV_HEADS], embed_v[tokens, :KV_HEADS])
    return choices_after(o)[0]


# A draft in which nodes 1 and 3 are what the target will choose, and node 6 is not.
tokens = rng.integers(VOCABULARY, size=len(PARENTS))
before = np.append(context, tokens[0])
tokens[1] = alone(before)
tokens[3] = alone(np.append(before, tokens[1]))
tokens[6] = (alone(np.append(before, tokens[[1, 3]])) + 1) % VOCABULARY
tokens[2], tokens[4] = (tokens[1] + 1) % VOCABULARY, (tokens[3] + 1) % VOCABULARY

# The cache holds the context; the nodes of the tree are appended behind it.
kv_len = NUM_CONTEXT + len(PARENTS)
block_table = rng.permutation(8).astype(np.int32)[None, : -(-kv_len // PAGE)]
k_cache, v_cache = np.zeros((2, 8, PAGE, KV_HEADS, DIM), np.float32)
everything = np.append(context, tokens)
fp.append_paged_kv(
    embed_k[everything, :KV_HEADS],
    embed_v[everything, :KV_HEADS],
    k_cache,
    v_cache,
    np.array([0, kv_len], np.int32),
    np.array([kv_len], np.int32),
    block_table=block_table,
)

attn = fp.Attention(
    HEADS, KV_HEADS, DIM, page_size=PAGE, q_dtype="float32", device="cpu", custom_mask=True
)
attn.plan([0, len(PARENTS)], [kv_len])  # the mask begins with the first query's key: the root's
mask = fp.pack_mask(tree_mask(PARENTS))
o = attn.run(embed_q[tokens], k_cache, v_cache, block_table=block_table, mask=mask)

choices = choices_after(o)
path = accepted_path(PARENTS, tokens, choices)
print(f"accepted {path}, then token {choices[path[-1]]}")
assert path == [0, 1, 3]
assert choices[3] == alone(np.append(before, tokens[[1, 3]]))  # one more token for free
