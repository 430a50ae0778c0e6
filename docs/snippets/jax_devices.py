# SPDX-License-Identifier: Apache-2.0
"""A compiled step of JAX on all devices, each of which has some of the heads."""

# --8<-- [start:devices]
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import flashplan as fp
import flashplan.jax

devices = jax.devices("cpu")
mesh = jax.make_mesh((len(devices),), ("heads",), devices=devices)

# The heads of one device.
one = fp.Attention(4, 2, 64, q_dtype="float32", device="cpu")
attn = flashplan.jax.on_devices(one, devices)


@jax.jit
def step(q, k_cache, v_cache, block_table):
    return flashplan.jax.run(attn, q, k_cache, v_cache, block_table=block_table)


def divided(shape, *spec):
    return jax.device_put(jnp.ones(shape), NamedSharding(mesh, jax.P(*spec)))


n = len(devices)
q = divided((2, 4 * n, 64), None, "heads")  # the heads of all devices
k_cache = v_cache = divided((8, 16, 2 * n, 64), None, None, "heads")
block_table = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
attn.plan([0, 1, 2], [30, 7])  # on all devices
o = step(q, k_cache, v_cache, block_table)
assert o.shape == (2, 4 * n, 64) and o.sharding.spec[1] == "heads"
# --8<-- [end:devices]

# --8<-- [start:shard_map]
run = jax.shard_map(
    lambda q, k, v: flashplan.jax.run(attn, q, k, v, block_table=block_table),
    mesh=mesh,
    in_specs=(jax.P(None, "heads"), jax.P(None, None, "heads"), jax.P(None, None, "heads")),
    out_specs=jax.P(None, "heads"),
)
assert (run(q, k_cache, v_cache) == o).all()
# --8<-- [end:shard_map]
