# SPDX-License-Identifier: Apache-2.0
"""One serving step: two requests that decode and one prompt, over a paged KV cache."""

# --8<-- [start:step]
import numpy as np

import flashplan as fp

rng = np.random.default_rng(0)
k_cache, v_cache = rng.standard_normal((2, 64, 16, 8, 128), np.float32)  # 64 pages of 16 tokens
qo_indptr = [0, 1, 2, 7]  # one new token, one, five
kv_lens = [37, 200, 5]  # tokens in the cache, the new ones included
block_table = np.array([[0, 1, 2] + 10 * [0], range(3, 16), [16] + 12 * [0]], np.int32)

attn = fp.Attention(32, 8, 128, page_size=16, q_dtype="float32", device="cpu")
attn.plan(qo_indptr, kv_lens)  # once per step
for _layer in range(2):  # once per layer
    q = rng.standard_normal((7, 32, 128), np.float32)
    o, lse = attn.run(q, k_cache, v_cache, block_table=block_table, return_lse=True)

print(o.shape, lse.shape)
# --8<-- [end:step]
