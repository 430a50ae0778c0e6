# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity are results: what merging makes of them, and every bit pattern of NaN. That
attention keeps them is among the cases of test_attention.py."""

import numpy as np
import pytest

import flashplan as fp
import reference
from test_merge import DTYPES, states

NAN_BITS = (0x7F800001, 0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("bits", NAN_BITS)
@pytest.mark.parametrize("name", ["q", "k"])
def test_every_nan(name, bits, softcap):
    rng = np.random.default_rng(0)
    tensors = {"q": rng.standard_normal((2, 1, 8), np.float32)}
    tensors["k"] = rng.standard_normal((64, 1, 8), np.float32)
    tensors[name].view(np.uint32)[1, 0, 3] = bits
    attn = fp.Attention(
        1, 1, 8, page_size=None, q_dtype="float32", causal=False, softcap=softcap, device="cpu"
    )
    attn.plan([0, 2], [64])
    o, lse = attn.run(tensors["q"], tensors["k"], np.ones_like(tensors["k"]), return_lse=True)
    sees_it = [name == "k", True]
    assert np.isnan(lse[:, 0]).tolist() == sees_it
    assert np.isnan(o).all(axis=(1, 2)).tolist() == sees_it
    assert np.isfinite(o[~np.isnan(lse)]).all()


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_causal_rows_before_a_nan_do_not_see_it(special):
    """NaN in a query or a key, infinity in a key: from the first row on that sees it."""
    rng = np.random.default_rng(0)
    for at in (0, 1, 30, 31, 32, 100, 255):
        q, k, v = (rng.standard_normal((256, 1, 16), np.float32) for _ in range(3))
        k[at] = special
        attn = fp.Attention(1, 1, 16, page_size=None, q_dtype="float32", device="cpu")
        attn.plan([0, 256], [256])
        o, lse = attn.run(q, k, v, return_lse=True)
        exact_o, exact_lse = reference.attention(q, k, v)
        assert np.isfinite(o[:at]).all()
        assert np.array_equal(np.isfinite(lse), np.isfinite(exact_lse))
        assert np.array_equal(np.isnan(o), np.isnan(exact_o))


# What the lse of a state is, alone and beside others, and what the merged lse must then be.
MERGES = [
    ([np.nan], np.nan),
    ([np.inf], np.nan),
    ([np.nan, np.nan], np.nan),
    ([1.0, np.nan], np.nan),
    ([np.nan, 1.0, 2.0], np.nan),
    ([-np.inf, np.nan], np.nan),
    ([np.nan, -np.inf, -np.inf], np.nan),
    ([np.inf, 3.0], np.nan),
    ([3.0, np.inf, -np.inf], np.nan),
    ([np.inf, np.inf], np.nan),
    ([np.inf, np.nan], np.nan),
    ([-np.inf, -np.inf], -np.inf),
    ([-np.inf, 3.0], 3.0),
]


def merges(dtype, dim):
    """(o, lse, merged lse): stacks of states whose rows are all that MERGES says."""
    rng = np.random.default_rng(0)
    for lse, merged in MERGES:
        o = rng.standard_normal((len(lse), 3, 2, dim), np.float32).astype(dtype)
        yield o, np.broadcast_to(np.float32(lse)[:, None, None], o.shape[:3]).copy(), merged


def assert_merges(o, lse, expected):
    if np.isnan(expected):
        assert np.isnan(lse).all()
        assert np.isnan(o.astype(np.float32)).all()
    else:
        assert (lse == expected).all()
        assert np.isfinite(o.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 64, 130])
def test_merge_states(dtype, dim):
    """-inf in lse alone says that there are no keys; NaN and +inf stay."""
    for o, lse, expected in merges(dtype, dim):
        assert_merges(*fp.merge_states(o, lse), expected)
        assert_merges(*reference.merge_states(o, lse), expected)
        if len(o) == 2:
            assert_merges(*fp.merge_states(o[0], lse[0], o[1], lse[1]), expected)


def special_values(dtype):
    """A stack of states of which some dims of some are NaN or infinite."""
    o, lse = states(3, dtype, (7, 3, 33))
    o[0, 1, :, 4], o[1, 2, 0, 5], o[2, 3, 1, 6] = np.nan, np.inf, -np.inf
    lse[:, 1:4] = np.random.default_rng(0).standard_normal((3, 3, 3), np.float32)
    return o, lse


def assert_special_values(o, lse, merged_o, merged_lse):
    exact_o, exact_lse = reference.merge_states(o, lse)
    merged_o = merged_o.astype(np.float64)
    assert np.array_equal(np.isfinite(merged_o), np.isfinite(exact_o))
    assert np.array_equal(np.isnan(merged_o), np.isnan(exact_o))
    assert np.array_equal(np.isfinite(merged_lse), np.isfinite(exact_lse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_keeps_special_values(dtype):
    """In their dims of o, and nowhere else."""
    o, lse = special_values(dtype)
    assert_special_values(o, lse, *fp.merge_states(o, lse))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_nan(kv_dtype):
    """Every NaN of the format, in a key."""
    every = np.arange(256, dtype=np.uint8).view(kv_dtype)
    rng = np.random.default_rng(0)
    for nan in every[np.isnan(every.astype(np.float32))]:
        q = rng.standard_normal((1, 2, 8), np.float32)
        k, v = (rng.standard_normal((40, 2, 8), np.float32).astype(kv_dtype) for _ in range(2))
        k[7, 1, 2] = nan
        attn = fp.Attention(
            2, 2, 8, page_size=None, q_dtype="float32", kv_dtype=kv_dtype, device="cpu"
        )
        attn.plan([0, 1], [40])
        o, lse = attn.run(q, k, v, return_lse=True)
        assert np.isnan(lse).tolist() == [[False, True]]
        assert np.isnan(o).any(axis=2).tolist() == [[False, True]]


def lse_of(logits, softcap, softmax_scale=1.0):
    """lse of one key whose logit is given: the logit itself, as the softcap leaves it."""
    q = np.asarray(logits, np.float32).reshape(-1, 1, 1)
    one = np.ones((1, 1, 1), np.float32)
    attn = fp.Attention(
        *(1, 1, 1),
        page_size=None,
        q_dtype="float32",
        causal=False,
        softcap=softcap,
        softmax_scale=softmax_scale,
        max_qo_tokens=len(q),
        device="cpu",
    )
    attn.plan([0, len(q)], [1])
    return attn.run(q, one, one, return_lse=True)[1][:, 0]


@pytest.mark.parametrize("softcap", [2.0**-126, 1e-6, 1e-3, 0.7, 30.0, 1e5, 1e8, 3e38])
def test_softcap(softcap, seed):
    """Within 2 units in the last place of the result, whatever the cap."""
    softcap = float(np.float32(softcap))
    rng = np.random.default_rng(seed)
    relative = np.concatenate(
        [2.0 ** rng.uniform(-24, 6, 20000), rng.uniform(0.4, 1.5, 20000), [0.0, 0.9]]
    )
    with np.errstate(under="ignore", over="ignore"):
        logits = np.float32(relative * rng.choice((-1, 1), relative.size) * softcap)
    logits = logits[np.isfinite(logits)]
    exact = softcap * np.tanh(logits.astype(np.float64) / softcap)
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    error = np.abs(lse_of(logits, softcap) - exact) / ulp
    assert error.max() <= 2, f"{error.max():.2f} ulp at {logits[error.argmax()]:.9g}"


def test_softcap_of_infinity():
    """tanh has limits."""
    assert lse_of([np.inf, -np.inf], 20.0).tolist() == [20.0, -20.0]
