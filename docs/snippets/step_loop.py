# SPDX-License-Identifier: Apache-2.0
"""The attention part of an engine's step loop, with a stand-in for the model."""

import numpy as np

import flashplan as fp

LAYERS, HEADS, KV_HEADS, DIM, PAGE_SIZE, NUM_PAGES = 2, 8, 2, 64, 16, 64
MAX_BATCH, MAX_TOKENS = 8, 128
rng = np.random.default_rng(0)


def project(num_tokens):
    """Stands for a layer's projections: q, k and v of the step's tokens."""
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [rng.standard_normal((num_tokens, n, DIM), np.float32) for n in heads]


# --8<-- [start:once]
# Create it once, with the options and the size of the largest step. All buffers are allocated here.
attn = fp.Attention(
    HEADS,
    KV_HEADS,
    DIM,
    page_size=PAGE_SIZE,
    q_dtype="float32",
    max_batch_size=MAX_BATCH,
    max_qo_tokens=MAX_TOKENS,
    device="cpu",
)
cache = np.zeros((LAYERS, 2, NUM_PAGES, PAGE_SIZE, KV_HEADS, DIM), np.float32)
out = np.empty((MAX_TOKENS, HEADS, DIM), np.float32)
# --8<-- [end:once]


# --8<-- [start:step]
def step(new_tokens, kv_lens, block_table):
    """One step of requests that have `new_tokens` each, whose caches then hold `kv_lens` tokens."""
    qo_indptr = np.cumsum([0, *new_tokens], dtype=np.int32)
    kv_lens = np.asarray(kv_lens, np.int32)
    attn.plan(qo_indptr, kv_lens)  # once per step: lengths, on the host
    num_tokens = int(qo_indptr[-1])
    for layer in range(LAYERS):  # once per layer: tensors
        k_cache, v_cache = cache[layer]
        q, k, v = project(num_tokens)
        fp.append_paged_kv(k, v, k_cache, v_cache, qo_indptr, kv_lens, block_table=block_table)
        attn.run(q, k_cache, v_cache, block_table=block_table, out=out[:num_tokens])
    return out[:num_tokens]


# --8<-- [end:step]

# --8<-- [start:serve]
# A prompt of 40 tokens; then it decodes while a prompt of 20 begins; then both decode.
block_table = np.arange(16, dtype=np.int32).reshape(2, 8)
step([40], [40], block_table[:1])
step([1, 20], [41, 20], block_table)
o = step([1, 1], [42, 21], block_table)
# --8<-- [end:serve]
assert o.shape == (2, HEADS, DIM) and np.isfinite(o).all()
