# SPDX-License-Identifier: Apache-2.0
"""What a layer of a model calls besides attention."""

import numpy as np

import flashplan as fp

rng = np.random.default_rng(0)
x, residual = rng.standard_normal((2, 5, 256), np.float32)
q, k = rng.standard_normal((5, 8, 64), np.float32), rng.standard_normal((5, 2, 64), np.float32)
gate_and_up = rng.standard_normal((5, 2 * 512), np.float32)
weight = np.ones(256, np.float32)

# --8<-- [start:operators]
fp.add_rmsnorm(x, residual, weight, eps=1e-5)  # in place: residual += x; x = rmsnorm(residual)

rope = fp.Rope(theta=500000.0, scaling="llama3", scale=8.0)
positions = np.array([36, 199, 0, 1, 2], np.int32)  # of each token in its request
fp.apply_rope(q, k, positions, rope, out_q=q, out_k=k)  # in place

hidden = fp.silu_and_mul(gate_and_up)  # [tokens, 512]
# --8<-- [end:operators]
assert hidden.shape == (5, 512) and np.isfinite(q).all()
