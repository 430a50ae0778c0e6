# SPDX-License-Identifier: Apache-2.0
"""Functions with FlashInfer's names for a single request, against the reference on the CPU."""

import math

import pytest

from flashinfer_cases import Batch, Case

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402

CASES = [
    Case(),
    Case(causal=True),
    Case(causal=True, layout="HND"),
    Case(causal=True, window_left=5),
    Case(logits_soft_cap=2.0, sm_scale=0.7),
    Case(heads=(6, 1), dims=(64, 32), causal=True),
    Case(pos_encoding_mode="ROPE_LLAMA", causal=True),
    Case(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=500.0),
    Case(pos_encoding_mode="ALIBI", causal=True),
    Case(dtype="bfloat16", causal=True),
    Case(dtype="float16", kv_dtype="float8_e5m2", scales=(None, 0.5, 2.0), causal=True),
    Case(mask="bool", causal=True),
    Case(mask="packed"),
]


def of_one(batch):
    q, k, v = (batch.tensor(x[0]) for x in (batch.q, batch.k, batch.v))
    if batch.case.layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return q, k, v


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill(rng, case):
    for lens in ((7, 30), (5, 41), (7, 30)):
        batch = Batch(torch, rng, case, *([n] for n in lens))
        arguments = case.options() | batch.mask_arguments() | batch.scales()
        if case.mask == "bool":
            arguments["custom_mask"] = arguments["custom_mask"].view(lens)
        arguments |= {"causal": case.causal, "kv_layout": case.layout}
        tensors = of_one(batch)
        batch.check(*flashinfer.single_prefill_with_kv_cache_return_lse(*tensors, **arguments))
        batch.check(flashinfer.single_prefill_with_kv_cache(*tensors, **arguments))


@pytest.mark.parametrize("case", [case for case in CASES if not case.mask], ids=str)
def test_decode(rng, case):
    """One query sees all keys, or those of the window."""
    for kv_len in (30, 31, 1):
        batch = Batch(torch, rng, case, [1], [kv_len])
        q, k, v = of_one(batch)
        arguments = case.options() | batch.scales() | {"kv_layout": case.layout}
        o, lse = flashinfer.single_decode_with_kv_cache(q[0], k, v, return_lse=True, **arguments)
        assert lse.shape == case.heads[:1]
        batch.check(o[None], lse[None])
        batch.check(flashinfer.single_decode_with_kv_cache(q[0], k, v, **arguments)[None])


def test_scale_of_queries(rng):
    batch = Batch(torch, rng, Case(scales=(3.0, 0.5, None)), [1], [30])
    q, k, v = of_one(batch)
    batch.check(flashinfer.single_decode_with_kv_cache(q[0], k, v, q_scale=3.0, k_scale=0.5)[None])


def test_scales_of_heads(rng):
    """Beside the scales of all heads."""
    batch = Batch(torch, rng, Case(dtype="float16", kv_dtype="float8_e4m3fn"), [3], [30])
    k_scales, v_scales = torch.rand(2, 2) + 0.5
    o, lse = flashinfer.single_prefill_with_kv_cache(
        *of_one(batch),
        scale_k=k_scales,
        scale_v=v_scales,
        k_scale=2.0,
        v_scale=0.5,
        return_lse=True,
    )
    batch.check(o, lse, k_scale=k_scales.numpy() * 2, v_scale=v_scales.numpy() / 2)


def test_dtype_of_the_output(rng):
    batch = Batch(torch, rng, Case(dtype="float16"), [3], [30])
    o = flashinfer.single_prefill_with_kv_cache(*of_one(batch), o_dtype=torch.float32)
    assert o.dtype == torch.float32
    batch.check(o)


def test_lse_is_to_base_2():
    """Of two keys with equal logits, whose log-sum-exp is logit + log 2."""
    q, k = torch.ones(1, 1, 64), torch.ones(2, 1, 64)
    _, lse = flashinfer.single_prefill_with_kv_cache(q, k, k, sm_scale=1 / 64, return_lse=True)
    assert lse.item() == pytest.approx(1 / math.log(2) + 1, rel=1e-6)


def tensors():
    return torch.ones(3, 4, 64), torch.ones(9, 2, 64), torch.ones(9, 2, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_cache_sf": (1, 2)}, r"kv_cache_sf: expected none, got \(1, 2\)"),
        ({"kv_layout": "DNH"}, "kv_layout: expected one of 'NHD', 'HND', got 'DNH'"),
        ({"pos_encoding_mode": "YARN"}, "pos_encoding_mode: expected one of .* got 'YARN'"),
        ({"backend": "cudnn"}, "backend: expected one of 'auto', 'fa2', 'fa3', got 'cudnn'"),
    ],
)
def test_what_is_not_supported(arguments, message):
    with pytest.raises(fp.UnsupportedError, match=message):
        flashinfer.single_prefill_with_kv_cache(*tensors(), **arguments)


def test_wrong_tensors():
    q, k, v = tensors()
    with pytest.raises(
        fp.UnsupportedError, match="o_dtype: expected 16 bits .* got .*float8_e4m3fn"
    ):
        flashinfer.single_prefill_with_kv_cache(q.to(torch.float8_e4m3fn), k, v)
    for place, name in enumerate("qkv"):
        wrong = [q, k, v]
        wrong[place] = wrong[place][None]
        with pytest.raises(ValueError, match=f"{name}: expected 3 dimensions, got shape"):
            flashinfer.single_prefill_with_kv_cache(*wrong)
    with pytest.raises(ValueError, match="q: expected 2 dimensions, got shape"):
        flashinfer.single_decode_with_kv_cache(q, k, v)
    for name in ("custom_mask", "packed_custom_mask"):
        with pytest.raises(ValueError, match=f"{name}: expected .* elements .* got 2"):
            mask = torch.ones(2, dtype=torch.uint8 if "packed" in name else torch.bool)
            flashinfer.single_prefill_with_kv_cache(q, k, v, **{name: mask})
