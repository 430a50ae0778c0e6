# SPDX-License-Identifier: Apache-2.0
"""Ragged keys whose last dims all heads share (k_tail): the prompts of DeepSeek's models."""

import numpy as np
import pytest

import flashplan as fp
import reference
from frameworks import bits

OPTIONS = {"page_size": None, "device": "cpu", "softmax_scale": 192**-0.5}


def tensors(rng, tokens, keys, heads, dims, dtype):
    """q, k without its tail, k_tail and v; rows behind those of the plan are NaN."""

    def normal(*shape):
        x = rng.standard_normal(shape, np.float32).astype(dtype)
        x[-2:] = np.nan
        return x

    qk, vo, tail = dims
    q_heads, kv_heads = heads
    return (
        normal(tokens + 2, q_heads, qk),
        normal(keys + 2, kv_heads, qk - tail),
        normal(keys + 2, tail),
        normal(keys + 2, kv_heads, vo),
    )


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "options"),
    [
        ((8, 8), (192, 128, 64), "bfloat16", {}),
        ((8, 8), (192, 128, 64), "float16", {"num_ctas": 5, "causal": False}),
        ((4, 2), (256, 256, 64), "bfloat16", {"batch_invariant": True}),
        ((6, 3), (21, 9, 5), "float32", {"window_left": 20, "softcap": 3.0}),
        ((2, 2), (64, 32, 63), "float32", {"rope": fp.Rope(rotary_dim=8)}),
    ],
    ids=str,
)
def test_k_tail_is_the_end_of_every_key(heads, dims, dtype, options, seed):
    rng = np.random.default_rng(seed)
    qo_lens, kv_lens = (40, 1, 0, 65), (40, 300, 5, 130)
    q, k, tail, v = tensors(rng, sum(qo_lens), sum(kv_lens), heads, dims, dtype)
    indptr = np.concatenate([[0], np.cumsum(qo_lens)])
    attn = fp.Attention(*heads, dims[:2], q_dtype=dtype, **OPTIONS | options)
    attn.plan(indptr, kv_lens)
    o, lse = attn.run(q, k, v, k_tail=tail, return_lse=True)
    whole = np.concatenate([k, np.repeat(tail[:, None], heads[1], axis=1)], axis=2)
    wanted = attn.run(q, whole, v, return_lse=True)
    assert np.array_equal(bits(o), bits(wanted[0]))
    assert np.array_equal(bits(lse), bits(wanted[1]))
    assert np.array_equal(bits(attn.bind(q, k, v, k_tail=tail)()[: len(o)]), bits(o))
    if "rope" in options:
        return
    rows = np.concatenate([[0], np.cumsum(kv_lens)])
    requests = [(whole[a:b], v[a:b]) for a, b in zip(rows, rows[1:], strict=False)]
    names = ("causal", "window_left", "softcap")
    exact = reference.batch_attention(
        q,
        requests,
        indptr,
        softmax_scale=OPTIONS["softmax_scale"],
        **{name: options[name] for name in names if name in options},
    )
    step = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    assert np.allclose(o.astype(float), exact[0], rtol=step, atol=step)
    assert np.allclose(lse, exact[1], rtol=1e-4, atol=1e-3)
