# SPDX-License-Identifier: Apache-2.0
"""Rows of multi-head latent attention, MLA_BENCH of tests/bench_cases.py."""

import torch

import flashplan as fp
from flashplan.bench import work
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
    keys = normal(sum(pages_of), case.page_size, case.dims[0])
    return q, stored(keys, case.kv_dtype), table


def stored(keys, kv_dtype):
    """Keys as a cache of that dtype has them."""
    if kv_dtype == "fp8_ds_mla":
        groups = keys[..., :512].float().unflatten(-1, (4, 128))
        scales = groups.abs().amax(-1) / 448
        content = (groups / scales[..., None]).flatten(-2).to(torch.float8_e4m3fn)
        parts = (content, scales, keys[..., 512:].contiguous())
        return torch.cat([part.view(torch.uint8) for part in parts], -1)
    return keys if kv_dtype is None else keys.to(getattr(torch, kv_dtype))


def real_keys(cache, kv_dtype):
    """float32 from what a cache has."""
    if kv_dtype != "fp8_ds_mla":
        return cache.float()
    content = cache[..., :512].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = cache[..., 512:528].contiguous().view(torch.float32)
    tail = cache[..., 528:].contiguous().view(torch.bfloat16)
    return torch.cat([(content * scales[..., None]).flatten(-2), tail.float()], -1)


def assert_mla_right(case, q, cache, table, o):
    """The last token of the first and of the last request against float32; the budget is that of
    gpu_inputs.assert_right()."""
    first = 0
    for r, (qo_len, kv_len) in enumerate(zip(case.qo_lens, case.kv_lens, strict=True)):
        first += qo_len
        if r not in (0, len(case.kv_lens) - 1):
            continue
        pages = cache[table[r, : -(-kv_len // case.page_size)].long()]
        keys = real_keys(pages.flatten(0, 1)[:kv_len], case.kv_dtype)
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
    kv_bytes = cache[0, 0].nbytes * sum(case.kv_lens)
    return {
        "case": str(case),
        "kernel": plan.kernel_name,
        "us": us,
        "tflop_s": flops / us / 1e6,
        "tb_s": kv_bytes / us / 1e6,
        "run_host_us": host_microseconds(call, int(min(200, max(10, 3e4 / us)))),
        "plan_host_us": host_microseconds(lambda: attn.plan(indptr, lens)),
    }
