# SPDX-License-Identifier: Apache-2.0
"""A compiled step of JAX that appends to a cache and attends over it."""

# --8<-- [start:jit]
from functools import partial

import jax
import jax.numpy as jnp

import flashplan as fp
import flashplan.jax

attn = fp.Attention(4, 2, 64, q_dtype="float32", device="cpu")


@partial(jax.jit, donate_argnums=(0, 1))
def step(k_cache, v_cache, q, k, v, indptr, kv_lens, block_table):
    k_cache, v_cache = flashplan.jax.append_paged_kv(
        k, v, k_cache, v_cache, indptr, kv_lens, block_table=block_table
    )
    o = flashplan.jax.run(attn, q, k_cache, v_cache, block_table=block_table)
    return o, k_cache, v_cache


k_cache = v_cache = jnp.zeros((8, 16, 2, 64))
v_cache = v_cache.copy()  # two donated arguments may not be one array
block_table = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
for lens in ([30, 7], [31, 8]):
    attn.plan([0, 1, 2], lens)  # after the results of the last step
    q, k, v = (jnp.ones((2, heads, 64)) for heads in (4, 2, 2))
    indptr, kv_lens = jnp.arange(3, dtype=jnp.int32), jnp.array(lens, jnp.int32)
    o, k_cache, v_cache = step(k_cache, v_cache, q, k, v, indptr, kv_lens, block_table)
    jax.block_until_ready(o)
# --8<-- [end:jit]
assert k_cache[1, 14].all() and k_cache[4, 7].all() and not k_cache[4, 8].any()
