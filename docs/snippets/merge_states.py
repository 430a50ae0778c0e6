# SPDX-License-Identifier: Apache-2.0
"""Attention over two parts of the keys, merged into attention over all of them."""

import numpy as np

import flashplan as fp

rng = np.random.default_rng(0)
q = rng.standard_normal((3, 8, 64), np.float32)
k, v = rng.standard_normal((2, 100, 2, 64), np.float32)

# --8<-- [start:merge]
attn = fp.Attention(8, 2, 64, page_size=None, causal=False, q_dtype="float32", device="cpu")


def attend(k, v):
    attn.plan([0, len(q)], [len(k)])
    return attn.run(q, k, v, return_lse=True)


o_a, lse_a = attend(k[:70], v[:70])
o_b, lse_b = attend(k[70:], v[70:])
o, lse = fp.merge_states(o_a, lse_a, o_b, lse_b)
# --8<-- [end:merge]

exact_o, exact_lse = attend(k, v)
assert np.allclose(o, exact_o, atol=1e-5)
assert np.allclose(lse, exact_lse, atol=1e-5)
