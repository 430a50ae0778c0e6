# SPDX-License-Identifier: Apache-2.0
"""The bits of a request's result, alone and beside others."""

import numpy as np

import flashplan as fp

rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 9000, 2, 64), np.float32)
q = rng.standard_normal((3, 8, 64), np.float32)

# --8<-- [start:invariant]
attn = fp.Attention(8, 2, 64, page_size=None, q_dtype="float32", batch_invariant=True, device="cpu")
attn.plan([0, 1], [5000])
alone = attn.run(q[:1], k, v)

attn.plan([0, 1, 2, 3], [5000, 3000, 1000])
together = attn.run(q, k, v)
assert np.array_equal(alone[0], together[0])  # the same bits
# --8<-- [end:invariant]
