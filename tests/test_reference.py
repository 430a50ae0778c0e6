# SPDX-License-Identifier: Apache-2.0
"""The reference itself: against one scalar loop, and against another library's attention."""

import math

import numpy as np
import pytest

import reference
from case import Case
from inputs import make_inputs


def brute_force(q, k, v, causal, window_left, scale, softcap):
    """Attention as in the textbook: no matrix, no maximum."""
    qo_len, num_heads, _ = q.shape
    kv_len, num_kv_heads, _ = k.shape
    o = np.zeros((qo_len, num_heads, v.shape[2]))
    lse = np.full((qo_len, num_heads), -np.inf)
    for i in range(qo_len):
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            position = i + kv_len - qo_len
            total = 0.0
            for j in range(kv_len):
                if (causal and j > position) or 0 <= window_left < position - j:
                    continue
                logit = scale * sum(x * y for x, y in zip(q[i, head], k[j, kv_head], strict=True))
                if softcap:
                    logit = softcap * math.tanh(logit / softcap)
                total += math.exp(logit)
                o[i, head] += math.exp(logit) * v[j, kv_head]
            if total:
                o[i, head] /= total
                lse[i, head] = math.log(total)
    return o, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 0, 3])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(("qo_len", "kv_len"), [(5, 5), (1, 9), (3, 7), (6, 4), (2, 0)])
def test_equals_brute_force(causal, window_left, softcap, qo_len, kv_len):
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(shape) for shape in ((qo_len, 6, 4), (kv_len, 2, 4), (kv_len, 2, 3))
    )
    expected = brute_force(q, k, v, causal, window_left, 0.5, softcap)
    actual = reference.attention(q, k, v, causal=causal, window_left=window_left, softcap=softcap)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


def test_equals_torch(torch):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((9, 4, 16), (9, 2, 16), (9, 2, 8)))
    q_, k_, v_ = (torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q_, k_, v_, is_causal=True, enable_gqa=True
    )
    o, _ = reference.attention(q, k, v)
    np.testing.assert_allclose(o, expected[0].transpose(0, 1).numpy(), atol=1e-12)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_append_then_gather_is_the_identity(kv_layout, page_size):
    rng = np.random.default_rng(2)
    tokens = rng.standard_normal((20, 2, 4)).astype(np.float32)
    inner = (page_size, 2) if kv_layout == "NHD" else (2, page_size)
    cache = np.full((25, *inner, 4), np.nan, np.float32)
    pages = rng.permutation(25)
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        reference.append_pages(cache, tokens[begin:end], pages, end, kv_layout)
    assert np.array_equal(reference.gather_pages(cache, pages, 20, kv_layout), tokens)


def test_merging_parts_equals_one_pass():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(shape) for shape in ((3, 2, 8), (10, 1, 8), (10, 1, 8)))
    parts = [
        reference.attention(q, k[a:b], v[a:b], causal=False) for a, b in ((0, 4), (4, 4), (4, 10))
    ]
    merged = reference.merge_states(*(np.stack(x) for x in zip(*parts, strict=True)))
    for x, y in zip(merged, reference.attention(q, k, v, causal=False), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_twin_errs_by_a_few_roundings(dtype):
    """A budget made of nothing, or of everything, would test nothing."""
    case = Case((8,), (64,), q_dtype=dtype, page_size=None)
    inputs = make_inputs(case, seed=4)
    [(k, v)] = inputs.requests("NHD")
    q = inputs.q[:8]
    exact, _ = reference.attention(q, k, v)
    twin, _ = reference.attention(q, k, v, dtype=dtype)
    error = np.abs(twin - exact).max() / reference.EPS[dtype]
    assert 0.1 < error < 10
