# SPDX-License-Identifier: Apache-2.0
"""Rows of multi-head latent attention, MLA_BENCH and MLA_PROMPTS of tests/bench_cases.py."""

import torch

import flashplan as fp
from flashplan.bench import work
from gpu_inputs import assert_right, make_gpu_inputs
from gpu_timer import host_microseconds
from mla_cases import SCALE


def make_mla_tensors(case, device):
    """q, the cache, and its page table in random order."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    pages_of = [-(-n // case.page_size) for n in case.kv_lens]
    ids = torch.randperm(sum(pages_of), generator=generator, device=device).int()
    table = torch.zeros((len(pages_of), max(pages_of)), dtype=torch.int32, device=device)
    for row, own in zip(table, ids.split(pages_of), strict=True):
        row[: len(own)] = own
    q = normal(sum(case.qo_lens), case.num_heads, case.dims[0])
    return q, normal(sum(pages_of), case.page_size, case.dims[0]), table


def assert_mla_right(case, q, cache, table, o):
    """The last token of the first and of the last request against float32; the budget is that of
    gpu_inputs.assert_right()."""
    first = 0
    for r, (qo_len, kv_len) in enumerate(zip(case.qo_lens, case.kv_lens, strict=True)):
        first += qo_len
        if r not in (0, len(case.kv_lens) - 1):
            continue
        pages = cache[table[r, : -(-kv_len // case.page_size)].long()]
        keys = pages.flatten(0, 1)[:kv_len].float()
        weights = (q[first - 1].float() @ keys.T * SCALE).softmax(-1)
        exact = weights @ keys[:, : case.dims[1]]
        budget = 0.02 * exact.abs().amax(-1, keepdim=True) + 1e-5
        wrong = ~((o[first - 1].float() - exact).abs() <= budget)
        assert not wrong.any(), f"request {r}: {int(wrong.sum())} of {wrong.numel()} are wrong"


def mla_row(case, timer, args):
    q, cache, table = make_mla_tensors(case, args.device)
    attn = fp.Attention(**case.options() | {"device": args.device})
    indptr = torch.tensor([0, *case.qo_lens]).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    plan = attn.plan(indptr, lens)
    out = torch.full((*q.shape[:2], case.dims[1]), torch.nan, dtype=q.dtype, device=args.device)

    def call():
        attn.run(q, cache, block_table=table, out=out)

    call()
    assert_mla_right(case, q, cache, table, out)
    us = timer.microseconds(call, args.repeats)
    flops = work.flops(case.qo_lens, case.kv_lens, case.num_heads, case.dims)
    kv_bytes = 2 * case.dims[0] * sum(case.kv_lens)
    return {
        "case": str(case),
        "kernel": plan.kernel_name,
        "us": us,
        "tflop_s": flops / us / 1e6,
        "tb_s": kv_bytes / us / 1e6,
        "run_host_us": host_microseconds(call, int(min(200, max(10, 3e4 / us)))),
        "plan_host_us": host_microseconds(lambda: attn.plan(indptr, lens)),
    }


def prompt_row(case, timer, args):
    """Keys whose last 64 dims are in a tensor of their own, beside the same keys in one tensor."""
    inputs = make_gpu_inputs(case, args.device)
    tail = inputs.k[:, 0, -64:].contiguous()
    inputs.k[:, :, -64:] = tail[:, None]
    own = inputs.k[:, :, :-64].contiguous()
    attn = fp.Attention(**case.options() | {"device": args.device})
    plan = attn.plan(*inputs.plan_args())
    shape = (len(inputs.q), case.num_qo_heads, case.head_dims[1])
    out = torch.full(shape, torch.nan, dtype=inputs.q.dtype, device=args.device)

    def with_tail():
        attn.run(inputs.q, own, inputs.v, k_tail=tail, out=out)

    def of_one_tensor():
        attn.run(inputs.q, inputs.k, inputs.v, out=out)

    with_tail()
    assert_right(case, inputs, out, "flashplan")
    us, us_of_one = timer.in_turn([with_tail, of_one_tensor], args.repeats)
    num_flops = work.flops(case.qo_lens, case.kv_lens, case.num_qo_heads, case.head_dims)
    return {
        "case": str(case),
        "kernel": plan.kernel_name,
        "us": us,
        "tflop_s": num_flops / us / 1e6,
        "tb_s": 2 * (own.numel() + tail.numel() + inputs.v.numel()) / us / 1e6,
        "peers_us": {"k in one tensor": us_of_one},
    }
