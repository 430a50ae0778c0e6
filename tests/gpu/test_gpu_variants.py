# SPDX-License-Identifier: Apache-2.0
"""Variants of users on a GPU, besides the cases of test_gpu_attention: names, graphs, errors."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

import flashplan as fp
from gpu_cases import DEVICE

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 8, 2, 128


def attention(variant, **options):
    defaults = {"page_size": None, "max_batch_size": 4, "max_qo_tokens": 512, "device": DEVICE}
    return fp.Attention(HEADS, KV_HEADS, DIM, variant=variant, **defaults | options)


def tensors(torch, num_queries, num_keys):
    shapes = (num_queries, HEADS, DIM), (num_keys, KV_HEADS, DIM), (num_keys, KV_HEADS, DIM)
    return [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]


def expected(torch, q, k, v, slopes, peaks=0):
    """ALiBi of one request in float32. `peaks` is added to the logits of each 200th key."""
    k, v = (x.float().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    query = torch.arange(len(q), device=DEVICE)[:, None] + len(k) - len(q)
    key = torch.arange(len(k), device=DEVICE)[None]
    x = torch.einsum("qhd,khd->hqk", q.float(), k) / DIM**0.5
    x += slopes[:, None, None] * (key - query) + peaks * (key % 200 == 77)
    weights = torch.where(key <= query, x, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


# Plans with these bounds have only the kernel for few rows, and cut prompts into row tiles of 16.
DECODES = {"max_batch_size": 512}


@pytest.mark.parametrize("options", [{}, DECODES, DECODES | {"batch_invariant": True}])
def test_one_graph_serves_any_batch(torch, options):
    """And reads the slopes of the time when it is replayed."""
    attn = attention(fp.variants.alibi, **options)
    q, k, v = tensors(torch, 512, 3000)
    slopes = torch.rand(HEADS, device=DEVICE)
    out = torch.empty_like(q)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attn.plan([0, 1], [3000])
        attn.run(q, k, v, slopes=slopes, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            attn.run(q, k, v, slopes=slopes, out=out)
        for qo_len, kv_len in ((1, 2999), (70, 70), (400, 2000), (17, 333)):
            attn.plan([0, qo_len], [kv_len])
            slopes.uniform_(0, 0.1)
            graph.replay()
            wanted = expected(torch, q[:qo_len], k[:kv_len], v[:kv_len], slopes)
            torch.testing.assert_close(out[:qo_len].float(), wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_queries", [1, 40, 1000])
def test_logits_may_grow_with_the_key(torch, dtype, num_queries):
    """Little in a step of keys, beyond what weights can hold in one step, and by single peaks."""
    growing = fp.Variant(
        "growing",
        logits="return x + slopes[qo_head] * (key - query) + (key % 200 == 77 ? peaks : 0);",
        tensors={"slopes": "float32"},
        scalars={"peaks": 0.0},
    )
    attn = attention(growing, q_dtype=dtype, max_qo_tokens=1000)
    attn.plan([0, num_queries], [3000])
    q, k, v = (x.to(getattr(torch, dtype)) for x in tensors(torch, num_queries, 3000))
    slopes = torch.tensor([-0.1, 0, 0.003, 0.03, 0.1, 0.3, 0.9, 3], device=DEVICE)
    for peaks in (0.0, 20.0, 200.0):
        o = attn.run(q, k, v, slopes=slopes, peaks=peaks)
        wanted = expected(torch, q, k, v, slopes, peaks)
        torch.testing.assert_close(o.float(), wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_queries", [1, 40, 1000])
def test_capped_logits_may_grow_with_the_key(torch, dtype, num_queries):
    """With a mask of the user. Logits grow from 0 nearly to the softcap."""
    softcap, num_keys = 30.0, 3000
    masked = fp.Variant("masked_and_capped", mask="return key % 3 != 1;")
    attn = attention(masked, q_dtype=dtype, max_qo_tokens=1000, softcap=softcap)
    attn.plan([0, num_queries], [num_keys])
    q, k, v = (x.to(getattr(torch, dtype)) for x in tensors(torch, num_queries, num_keys))
    growing = torch.linspace(0, 60 / DIM**0.5, num_keys, device=DEVICE)
    q[..., 0] = 1.0
    q[..., 1:] /= 8
    k[..., 0] = growing[:, None] * DIM
    o, lse = attn.run(q, k, v, return_lse=True)
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    x = softcap * torch.tanh(torch.einsum("qhd,khd->hqk", q.double(), k) / DIM**0.5 / softcap)
    query = torch.arange(num_queries, device=DEVICE)[:, None] + num_keys - num_queries
    key = torch.arange(num_keys, device=DEVICE)[None]
    x = torch.where((key <= query) & (key % 3 != 1), x, -torch.inf)
    wanted = torch.einsum("hqk,khd->qhd", x.softmax(-1), v)
    torch.testing.assert_close(o.double(), wanted, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(lse.double(), x.logsumexp(-1).T, atol=1e-2, rtol=1e-3)


def test_positions_stay_inside_the_tensors(torch):
    """Bodies are called for rows and keys of padding too, with positions that there are."""
    num_keys = 333
    inside = fp.Variant(
        "inside",
        logits="return query >= 0 && query < kv_len && key >= 0 && key < kv_len && qo_head < 8 && "
        "kv_head < 2 ? x : infinity();",
        value="return token < 333 && dim < 96 && head < 2 ? x : infinity();",
    )
    attn = fp.Attention(
        HEADS, KV_HEADS, 96, page_size=None, device=DEVICE, variant=inside, max_qo_tokens=64
    )
    q, k, v = (x[..., :96] for x in tensors(torch, 33, num_keys))
    attn.plan([0, 33], [num_keys])
    o, lse = attn.run(q, k, v, return_lse=True)
    assert o.isfinite().all()
    assert lse.isfinite().all()


def test_scalars_change_from_run_to_run(torch):
    attn = attention(fp.variants.sigmoid)
    attn.plan([0, 5], [100])
    q, k, v = tensors(torch, 5, 100)
    small, large = (attn.run(q, k, v, bias=bias).float().abs().mean() for bias in (-9.0, 0.0))
    assert small < large / 10


def test_the_kernel_has_the_name_of_the_variant():
    name = attention(fp.variants.alibi).plan([0, 20], [20]).kernel_name
    assert name.endswith("_alibi")
    plain = attention(None).plan([0, 20], [20]).kernel_name
    assert name.removesuffix("_alibi") == plain
    changed = fp.Variant("changed", key="return -x;")  # which no other family serves
    assert attention(changed).plan([0, 1], [9]).kernel_name.startswith("sm80_")


def test_a_cached_cubin_that_the_driver_refuses_is_compiled_anew(tmp_path):
    program = f"""
import flashplan as fp
fp.Attention({HEADS}, {KV_HEADS}, {DIM}, page_size=None, max_batch_size=512, device={DEVICE!r},
             variant=fp.Variant("refused", mask="return key != 3;"))
"""
    environment = os.environ | {"FLASHPLAN_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    good = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path, content in good.items():
        rubbish = content.partition(b"\n")[0] + b"\nno cubin"
        checksum = hashlib.sha256(rubbish).digest()
        path.write_bytes(rubbish + b"flashplan cache 1" + checksum)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert {path: path.stat().st_size for path in good} == {p: len(c) for p, c in good.items()}


@pytest.mark.parametrize("options", [{}, DECODES])
@pytest.mark.parametrize("num_queries", [1, 40])
def test_rotations_at_far_positions(torch, num_queries, options):
    """In float64; the window leaves few keys of the million."""
    num_keys, window, half = 1_000_000, 300, DIM // 2
    q, k, v = tensors(torch, num_queries, num_keys)
    attn = attention(None, rope=fp.Rope(), window_left=window, **options)
    attn.plan([0, num_queries], [num_keys])
    o = attn.run(q, k, v)
    first = num_keys - num_queries - window
    k, v = k[first:], v[first:]

    def rotated(x):
        positions = torch.arange(num_keys - len(x), num_keys, dtype=torch.float64, device=DEVICE)
        turns = 10000.0 ** -(torch.arange(half, dtype=torch.float64, device=DEVICE) / half)
        angle = (positions[:, None] * turns)[:, None]
        a, b = x.double().split(half, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (rotated(k), v.double()))
    query = torch.arange(num_queries, device=DEVICE)[:, None] + num_keys - num_queries
    key = torch.arange(first, num_keys, device=DEVICE)[None]
    x = torch.einsum("qhd,khd->hqk", rotated(q), k) / DIM**0.5
    weights = torch.where((key <= query) & (key >= query - window), x, -torch.inf).softmax(-1)
    wanted = torch.einsum("hqk,khd->qhd", weights, v)
    torch.testing.assert_close(o.double(), wanted, atol=2e-2, rtol=2e-2)


def test_rotated_kernels_have_a_name_and_take_keys_of_16_bits():
    attn = attention(None, rope=fp.Rope())
    assert attn.plan([0, 1], [9]).kernel_name.endswith("_rope")
    with pytest.raises(fp.UnsupportedError, match=r"^(rope: expected none|kv_dtype: expected)"):
        attention(None, rope=fp.Rope(), kv_dtype="float8_e4m3fn")


def test_errors(torch):
    with pytest.raises(ValueError, match=r'"broken".*broken\.logits\(1\): error'):
        attention(fp.Variant("broken", logits="return nonsense;"))
    attn = attention(fp.variants.alibi)
    attn.plan([0, 1], [9])
    q, k, v = tensors(torch, 1, 9)
    with pytest.raises(TypeError, match=r"slopes: expected .*cuda"):
        attn.run(q, k, v, slopes=np.zeros(HEADS, np.float32))
