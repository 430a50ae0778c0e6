# SPDX-License-Identifier: Apache-2.0
"""A mask of bits: two draft continuations of one request in one step."""

import numpy as np

import flashplan as fp

rng = np.random.default_rng(0)
q, k, v = (
    rng.standard_normal((n, heads, 64), np.float32) for n, heads in ((3, 8), (43, 2), (43, 2))
)

# --8<-- [start:mask]
# 40 keys are in the cache. Token 0 is the last one known; tokens 1 and 2 are two guesses of what
# follows it. Tokens 1 and 2 both see the cache and token 0, but not each other.
seen = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=bool)

attn = fp.Attention(8, 2, 64, page_size=None, q_dtype="float32", custom_mask=True, device="cpu")
attn.plan([0, 3], [43])  # bit 0 of a row is the key of the request's first new token
o = attn.run(q, k, v, mask=fp.pack_mask(seen))
# --8<-- [end:mask]

plain = fp.Attention(8, 2, 64, page_size=None, q_dtype="float32", device="cpu")
plain.plan([0, 2], [42])
rows = [*range(41), 42]  # without the other guess
assert np.allclose(o[[0, 2]], plain.run(q[[0, 2]], k[rows], v[rows]), atol=1e-5)
