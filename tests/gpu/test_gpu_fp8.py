# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit numbers on Hopper: every body of the kernel, and errors in long contexts."""

import dataclasses

import pytest

import flashplan as fp
from feature_cases import PREFIXES
from frameworks import TorchCuda
from gpu_cases import WIDENED, without_hidden_values
from inputs import make_inputs
from solve import CudaRunner, assert_correct, solution

pytestmark = pytest.mark.gpu

E4M3 = "float8_e4m3fn"
HEADS, KV_HEADS, DIM = 8, 2, 128
QUERIES = 128


@pytest.fixture
def on_hopper(torch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("there are kernels for compute capability 9.0 alone")


@pytest.fixture
def make(on_hopper):
    def attention(kv_len):
        options = {"q_dtype": E4M3, "causal": False, "kernels": "hopper", "device": "cuda:0"}
        attn = fp.Attention(HEADS, KV_HEADS, DIM, page_size=None, **options)
        attn.plan([0, QUERIES], [kv_len])
        assert attn._plan.kernel_name.startswith("sm90_fp8")
        return attn

    return attention


def reference(torch, q, k, v):
    """In float64, of what is stored."""
    q, k, v = (x.double() for x in (q, k, v))
    group = HEADS // KV_HEADS
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)


def draw(torch, rows, heads, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, heads, DIM, generator=generator, device="cuda")
    return x.to(torch.float8_e4m3fn)


def test_errors_do_not_grow_with_the_context(torch, make):
    """Accumulators of 8-bit products keep too few bits for long sums: they are added in float32."""
    errors = {}
    for kv_len in (1024, 8192, 32768, 131072):
        q = draw(torch, QUERIES, HEADS, 0)
        k, v = (draw(torch, kv_len, KV_HEADS, seed) for seed in (1, 2))
        exact = reference(torch, q, k, v)
        o = make(kv_len).run(q, k, v).double()
        errors[kv_len] = ((o - exact).norm() / exact.norm()).item()
    print({kv_len: round(error, 4) for kv_len, error in errors.items()})
    assert errors[1024] < 0.06
    assert max(errors.values()) <= 1.5 * errors[1024]


@pytest.mark.parametrize("kv_len", [1024, 8192, 32768, 131072])
def test_needles_are_found(torch, make, kv_len):
    """One key of its own, anywhere, decides the result of each query in each kv head. Four lengths
    have 1,024 such keys in all."""
    k, v = (draw(torch, kv_len, KV_HEADS, seed) for seed in (4, 5))
    rows = (2 * draw(torch, QUERIES, KV_HEADS, 3).float()).to(k.dtype)
    generator = torch.Generator("cuda").manual_seed(kv_len)
    places = torch.stack(
        [
            torch.randperm(kv_len, generator=generator, device="cuda")[:QUERIES]
            for _ in range(KV_HEADS)
        ],
        dim=1,
    )
    heads = torch.arange(KV_HEADS, device="cuda")
    wanted = torch.linspace(1, 8, QUERIES * KV_HEADS, device="cuda").to(v.dtype)
    wanted = wanted.view(QUERIES, KV_HEADS, 1).expand(-1, -1, DIM).contiguous()
    k.view(torch.uint8)[places, heads] = rows.view(torch.uint8)
    v.view(torch.uint8)[places, heads] = wanted.view(torch.uint8)
    o = make(kv_len).run(rows.repeat_interleave(HEADS // KV_HEADS, dim=1), k, v).float()
    wanted = wanted.float().repeat_interleave(HEADS // KV_HEADS, dim=1)
    assert ((o - wanted).abs() < 0.1 * wanted).all()


CASES = [
    dataclasses.replace(case, q_dtype=E4M3, kv_dtype=E4M3, head_dim=128, q_scale=0.7)
    for case in [
        case
        for case in WIDENED
        if (case.kv_dtype, case.head_dim) == (E4M3, 128)
        and not case.variant
        and not case.shared_prefixes
    ]
    + [case for case in PREFIXES if case.num_ctas == 7]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case, torch, on_hopper, seed):
    """Prompts, drafts and decodes, whole and cut, by boxes and row by row, with all masks."""
    inputs = make_inputs(case, seed)
    runner = CudaRunner(case, torch, kernels="hopper")
    o, lse = runner.run(inputs, TorchCuda(torch))
    assert runner.attn._plan.kernel_name.startswith("sm90_fp8")
    exact, twin = solution(case, inputs, E4M3)  # weights are rounded to 8 bits
    if case.special:
        o = without_hidden_values(case, inputs, exact[0], o)
    assert_correct(case, inputs, exact, twin, o, lse)


def test_special_numbers(torch, make):
    """A NaN that a row sees makes its results NaN, and no others."""
    attn = make(300)
    q = draw(torch, QUERIES, HEADS, 6)
    k, v = (draw(torch, 300, KV_HEADS, seed) for seed in (7, 8))
    nan = torch.full((DIM,), float("nan"), device="cuda").to(q.dtype)
    plain, plain_lse = attn.run(q, k, v, return_lse=True)
    assert not plain.isnan().any()
    own_q = q.clone()
    own_q[5, 3] = nan
    o, lse = attn.run(own_q, k, v, return_lse=True)
    assert o[5, 3].isnan().all()
    assert lse[5, 3].isnan()
    assert o.isnan().sum() == DIM
    assert lse.isnan().sum() == 1
    o[5, 3], lse[5, 3] = plain[5, 3], plain_lse[5, 3]
    torch.testing.assert_close(o, plain, rtol=0, atol=0.05)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-4, atol=1e-4)
    own_v = v.clone()
    own_v[299, 1, 7] = nan[0]
    o = attn.run(q, k, own_v)
    assert o[:, 4:, 7].isnan().all()
    assert o.isnan().sum() == QUERIES * 4
    own_k = k.clone()
    own_k[17, 0] = nan
    o = attn.run(q, own_k, v)
    assert o[:, :4].isnan().all()
    assert not o[:, 4:].isnan().any()
