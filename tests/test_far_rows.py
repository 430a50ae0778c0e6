# SPDX-License-Identifier: Apache-2.0
"""Tensors whose rows begin more than 2^31 elements apart. Their memory is a sparse file, of which
only the rows take any."""

import numpy as np
import pytest

import flashplan as fp
from inputs import normal
from row_cases import assert_same_bits

DISTANCE = 2**31 + 192  # elements from one row to the next; as bytes it is 384 modulo 2^32
TOKENS = 4
NORMS = {
    "rmsnorm": lambda x, out: fp.rmsnorm(x, x[0], out=out),
    "gemma": lambda x, out: fp.rmsnorm(x, x[0], gemma=True, out=out),
    "layernorm": lambda x, out: fp.layernorm(x, x[0], x[1], out=out),
    "top_k": lambda x, out: fp.top_k_mask(x, 9, out=out),
}


@pytest.fixture
def far(tmp_path):
    """Gives an array with far rows the values of an array."""

    def make(values):
        item = values.itemsize
        path = tmp_path / f"rows{len(list(tmp_path.iterdir()))}"
        size = (len(values) - 1) * DISTANCE * item + values[0].nbytes
        with path.open("wb") as file:
            file.truncate(size)
        memory = np.memmap(path, np.uint8, "r+", shape=size)
        strides = DISTANCE * item, *values[0].strides
        rows = np.ndarray(values.shape, values.dtype, buffer=memory, strides=strides)
        rows[...] = values
        return rows

    return make


@pytest.mark.parametrize("name", NORMS)
def test_norms_and_filters(rng, far, name):
    x = normal(rng, (TOKENS, 256), "float16")
    exact, out = np.zeros_like(x), far(np.zeros_like(x))
    NORMS[name](x, exact)
    NORMS[name](far(x), out)
    assert_same_bits(out, exact)


def test_add_rmsnorm(rng, far):
    tensors = [normal(rng, (TOKENS, 256), "float16") for _ in range(2)]
    distant = [far(x) for x in tensors]
    weight = normal(rng, (256,), "float16")
    for x, residual in (tensors, distant):
        fp.add_rmsnorm(x, residual, weight)
    for x, exact in zip(distant, tensors):
        assert_same_bits(x, exact)


@pytest.mark.parametrize("gated", [fp.silu_and_mul, fp.gelu_and_mul, fp.gelu_tanh_and_mul])
def test_gated_activations(rng, far, gated):
    x = normal(rng, (TOKENS, 256), "float16")
    out = far(np.zeros((TOKENS, 128), np.float16))
    gated(far(x), out=out)
    assert_same_bits(out, gated(x))


def test_rope(rng, far):
    q, k = (normal(rng, (TOKENS, heads, 64), "float16") for heads in (4, 2))
    positions = np.arange(TOKENS, dtype=np.int32)
    distant = far(q), far(k)
    fp.apply_rope(*distant, positions, fp.Rope(), out_q=distant[0], out_k=distant[1])
    for x, exact in zip(distant, fp.apply_rope(q, k, positions, fp.Rope())):
        assert_same_bits(x, exact)


def test_sample(rng, far):
    logits = normal(rng, (TOKENS, 256), "float16")
    options = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    assert np.array_equal(fp.sample(far(logits), **options), fp.sample(logits, **options))


def test_append_and_attention(rng, far):
    """Pages, queries and outputs."""
    q, k, v = (normal(rng, (TOKENS, heads, 64), "float16") for heads in (4, 2, 2))
    table, ends, kv_lens = (np.array(x, np.int32) for x in ([[3, 1]], [0, TOKENS], [TOKENS]))
    attn = fp.Attention(4, 2, 64, page_size=2, q_dtype="float16", device="cpu")
    attn.plan(ends, kv_lens)
    results = []
    for place in (lambda x: x, far):
        k_cache, v_cache = (place(np.zeros((4, 2, 2, 64), np.float16)) for _ in range(2))
        fp.append_paged_kv(place(k), place(v), k_cache, v_cache, ends, kv_lens, block_table=table)
        out = place(np.zeros_like(q))
        attn.run(place(q), k_cache, v_cache, block_table=table, out=out)
        assert_same_bits(k_cache[[3, 1]].reshape(k.shape), k)
        results.append(out)
    assert np.abs(results[0]).max() > 0
    assert_same_bits(results[1], results[0])
