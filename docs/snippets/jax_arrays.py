# SPDX-License-Identifier: Apache-2.0
"""JAX arrays in, JAX arrays out."""

# --8<-- [start:jax]
import jax
import jax.numpy as jnp

import flashplan as fp

keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (
    jax.random.normal(key, (tokens, heads, 64), jnp.bfloat16)
    for key, tokens, heads in zip(keys, (3, 90, 90), (8, 2, 2))
)
attn = fp.Attention(8, 2, 64, page_size=None, q_dtype=jnp.bfloat16, device="cpu")
attn.plan([0, 1, 3], [50, 40])
o, lse = attn.run(q, k, v, return_lse=True)
assert isinstance(o, jax.Array) and o.dtype == jnp.bfloat16
# --8<-- [end:jax]
