# SPDX-License-Identifier: Apache-2.0
"""Ragged keys whose last dims are in a tensor of their own (k_tail), on a GPU: every ragged case
against the reference, in graphs, and what is refused."""

import dataclasses

import numpy as np
import pytest

import flashplan as fp
from case import Case
from frameworks import TorchCuda, bits
from gpu_cases import DEVICE, GPU_CASES
from inputs import make_inputs
from solve import CudaRunner, assert_correct, solution

pytestmark = pytest.mark.gpu

# The prompts of DeepSeek's models: in one row tile and in several, cut and whole, and of requests
# whose last step lies at the end of the tensors.
PROMPTS = [
    Case(qo, kv, num_qo_heads=16, num_kv_heads=16, head_dim=dims, page_size=None, **options)
    for qo, kv in (
        ((300, 128, 1), (300, 128, 700)),
        ((64, 257, 16, 3), (64, 1200, 1000, 3)),
        ((2000,), (2100,)),
    )
    for dims in ((192, 128), (256, 256), (144, 160), (160, 96))
    for options in (
        {},
        {"q_dtype": "float16", "num_ctas": 7, "sinks": True},
        {"window_left": 100, "memory": "strided"},
        {"causal": False, "num_ctas": 40, "softcap": 20.0},
        {"custom_mask": "random"},
    )
]
PROMPTS += [
    Case(
        (300, 200, 40),
        kv,
        planned_lens=(1500, 700, 900),
        num_qo_heads=8,
        num_kv_heads=8,
        head_dim=(192, 128),
        page_size=None,
        num_ctas=num_ctas,
    )
    for kv in ((1400, 200, 41), (300, 0, 900), (1, 700, 0))
    for num_ctas in (3, 40, None)
]
RAGGED = [
    c for c in dict.fromkeys(GPU_CASES + PROMPTS) if c.page_size is None and c.head_dims[0] > 128
]
# Of these dims as many are in the tail: whole blocks of 64, and such that no box describes.
TAILS = {"block": lambda dims: 64, "odd": lambda dims: dims // 3}


def split(inputs, num_dims):
    """The inputs with the same last dims for all kv heads; and with these as k_tail."""
    tail = inputs.k[:, 0, -num_dims:].copy()
    whole = np.array(inputs.k)
    whole[:, :, -num_dims:] = tail[:, None]
    own = inputs.k[:, :, : inputs.k.shape[2] - num_dims]
    return dataclasses.replace(inputs, k=whole), dataclasses.replace(inputs, k=own, k_tail=tail)


def is_refused(case):
    """By Hopper's kernels."""
    return bool(case.variant or case.rope)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_k_tail(case, tail, torch, seed):
    num_dims = TAILS[tail](case.head_dims[0])
    whole, parts = split(make_inputs(case, [seed, num_dims]), num_dims)
    exact, twin = solution(case, whole)
    options = {"kernels": "general"} if is_refused(case) else {}
    o, lse = CudaRunner(case, torch, **options).run(parts, TorchCuda(torch))
    if not case.special:
        assert_correct(case, whole, exact, twin, o, lse)
    plain = CudaRunner(case, torch, **options).run(whole, TorchCuda(torch))
    assert np.array_equal(bits(o), bits(plain[0]))
    assert np.array_equal(bits(lse), bits(plain[1]))


def test_k_tail_in_a_graph(torch):
    """A captured run serves later plans, of prompts and of decodes."""
    case = Case((300, 40), (300, 700), 8, 8, head_dim=(192, 128), page_size=None)
    q, k, v = (
        torch.randn(rows, 8, dims, dtype=torch.bfloat16, device=DEVICE)
        for rows, dims in ((340, 192), (1000, 192), (1000, 128))
    )
    tail = k[:, 0, 128:].clone()
    k[:, :, 128:] = tail[:, None]
    attn = fp.Attention(**case.options() | {"device": DEVICE})
    attn.plan([0, 300, 340], [300, 700])
    out, wanted = torch.empty_like(v[:340]), torch.empty_like(v[:340])

    def run():
        attn.run(q, k[:, :, :128], v, k_tail=tail, out=out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for indptr, lens in (([0, 300, 340], [300, 700]), ([0, 1, 2], [90, 600]), ([0, 7], [999])):
        attn.plan(indptr, lens)
        out.fill_(torch.nan)
        graph.replay()
        attn.run(q, k, v, out=wanted)
        rows = indptr[-1]
        assert torch.equal(out[:rows].view(torch.int16), wanted[:rows].view(torch.int16))
        assert out[rows:].isnan().all()


@pytest.mark.parametrize(
    ("options", "kernels", "name"),
    [
        ({"head_dim": 128}, "hopper", "sm90_bf16_d128,"),
        ({"head_dim": 64}, "general", "sm80_bf16_d64,"),
        ({"head_dim": (192, 128), "rope": "plain"}, "hopper", " and a variant or rope,"),
    ],
    ids=str,
)
def test_what_is_refused(options, kernels, name, torch, seed):
    case = Case((200,), (200,), page_size=None, **options)
    options = case.options() | {"kernels": kernels, "device": DEVICE}
    if not fp.is_supported(**options)[0]:
        pytest.skip("no such kernel")
    _, parts = split(make_inputs(case, seed), 8)
    q, k, v, tail = map(TorchCuda(torch).tensor, (parts.q, parts.k, parts.v, parts.k_tail))
    attn = fp.Attention(**options)
    attn.plan(*parts.plan_args())
    with pytest.raises(fp.UnsupportedError, match=f"k_tail: expected none with .*{name}"):
        attn.run(q, k, v, k_tail=tail)
