# SPDX-License-Identifier: Apache-2.0
"""A step that is planned for upper bounds, before the real lengths are known on the host."""

import numpy as np

import flashplan as fp

rng = np.random.default_rng(0)
k_cache, v_cache = rng.standard_normal((2, 32, 16, 2, 64), np.float32)
q = rng.standard_normal((4, 8, 64), np.float32)
block_table = np.arange(32, dtype=np.int32).reshape(2, 16)

# --8<-- [start:lens]
attn = fp.Attention(8, 2, 64, q_dtype="float32", device="cpu")
attn.plan([0, 2, 4], [104, 54])  # no request can be longer than this in the next step

# On a GPU this tensor is written by the kernel that counts the accepted drafts of the last step.
kv_lens = np.array([101, 53], np.int32)
o = attn.run(q, k_cache, v_cache, block_table=block_table, kv_lens=kv_lens)
# --8<-- [end:lens]

attn.plan([0, 2, 4], [101, 53])
assert np.allclose(o, attn.run(q, k_cache, v_cache, block_table=block_table), atol=1e-5)
