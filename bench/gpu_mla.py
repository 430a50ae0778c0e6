# SPDX-License-Identifier: Apache-2.0
"""Rows of multi-head latent attention: MLA_BENCH, SPARSE_BENCH and MLA_PROMPTS of
tests/bench_cases.py."""

import torch

import flashplan as fp
from flashplan.bench import work
from gpu_inputs import assert_right, make_gpu_inputs
from gpu_timer import host_microseconds
from mla_cases import SCALE
from sparse_cases import SparseCase


def normal(generator, *shape):
    device = generator.device
    return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)


def make_table(case, generator):
    """The page table of a batch, in random order."""
    device = generator.device
    pages_of = [-(-n // case.page_size) for n in case.kv_lens]
    ids = torch.randperm(sum(pages_of), generator=generator, device=device).int()
    table = torch.zeros((len(pages_of), max(pages_of)), dtype=torch.int32, device=device)
    for row, own in zip(table, ids.split(pages_of), strict=True):
        row[: len(own)] = own
    return table


def make_cache(case, num_pages, generator):
    """Random keys, and the cache as run() takes it."""
    keys = normal(generator, num_pages, case.page_size, case.dims[0])
    if case.kv_dtype is None:
        return keys, keys
    if case.kv_dtype != "fp8_ds_mla":
        return keys, keys.to(getattr(torch, case.kv_dtype))
    shape = (num_pages, case.page_size, 656)
    cache = torch.zeros(shape, dtype=torch.uint8, device=generator.device)
    rows = keys.flatten(0, 1)
    slots = torch.arange(len(rows), device=generator.device)
    fp.append_mla(rows[:, : case.dims[1]], rows[:, case.dims[1] :], cache, slot_mapping=slots)
    return keys, cache


def make_lists(case, table, generator):
    """Different keys of its request for each token, in random order."""
    lists = []
    for pages, qo_len, kv_len in zip(table, case.qo_lens, case.kv_lens, strict=True):
        shape = (qo_len, kv_len)
        keys = torch.rand(shape, generator=generator, device=table.device).topk(case.topk).indices
        lists.append(pages[keys // case.page_size] * case.page_size + keys % case.page_size)
    return torch.cat(lists).int()


def assert_tokens_right(case, q, keys, o, slots_of, budget):
    """The last token of the first and of the last request against float32: slots_of(request) are
    the slots that it sees. The budget of 0.02 is that of gpu_inputs.assert_right()."""
    first = 0
    for r, qo_len in enumerate(case.qo_lens):
        first += qo_len
        if r not in (0, len(case.kv_lens) - 1):
            continue
        seen = keys.flatten(0, 1)[slots_of(r, first - 1).long()].float()
        weights = (q[first - 1].float() @ seen.T * SCALE).softmax(-1)
        exact = weights @ seen[:, : case.dims[1]]
        most = budget * exact.abs().amax(-1, keepdim=True) + 1e-5
        wrong = ~((o[first - 1].float() - exact).abs() <= most)
        assert not wrong.any(), f"request {r}: {int(wrong.sum())} of {wrong.numel()} are wrong"


def seen_by(case):
    """(qo_lens, kv_lens) of the work: with lists of keys each token is a request of its own."""
    if not isinstance(case, SparseCase):
        return case.qo_lens, case.kv_lens
    pairs = zip(case.qo_lens, case.kv_lens, strict=True)
    lens = [min(kv_len, case.topk) for qo_len, kv_len in pairs for _ in range(qo_len)]
    return (1,) * len(lens), lens


def mla_row(case, timer, args):
    generator = torch.Generator(args.device).manual_seed(0)
    is_sparse = isinstance(case, SparseCase)
    table = make_table(case, generator)
    q = normal(generator, sum(case.qo_lens), case.num_heads, case.dims[0])
    num_pages = sum(-(-n // case.page_size) for n in case.kv_lens)
    keys, cache = make_cache(case, num_pages, generator)
    tables = {"block_table": table}
    if is_sparse:
        tables = {"topk_indices": make_lists(case, table, generator)}
    attn = fp.Attention(**case.options() | {"device": args.device})
    indptr = torch.tensor([0, *case.qo_lens]).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    plan = attn.plan(indptr, lens)
    out = torch.full((*q.shape[:2], case.dims[1]), torch.nan, dtype=q.dtype, device=args.device)

    def slots_of(request, token):
        if is_sparse:
            return tables["topk_indices"][token]
        key = torch.arange(case.kv_lens[request], device=args.device)
        return table[request, key // case.page_size] * case.page_size + key % case.page_size

    def call():
        attn.run(q, cache, **tables, out=out)

    call()
    # Keys of 8 bits differ from those that are compared by up to a sixteenth.
    assert_tokens_right(case, q, keys, out, slots_of, 0.02 if cache is keys else 0.1)
    us = timer.microseconds(call, args.repeats)
    qo_lens, kv_lens = seen_by(case)
    return {
        "case": str(case),
        "kernel": plan.kernel_name,
        "us": us,
        "tflop_s": work.flops(qo_lens, kv_lens, case.num_heads, case.dims) / us / 1e6,
        "tb_s": cache[0, 0].nbytes * sum(kv_lens) / us / 1e6,
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
