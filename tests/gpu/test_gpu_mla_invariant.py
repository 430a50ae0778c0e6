# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant latent attention on a GPU: a request has the same bits in every batch, whatever
was planned for it and however it is cut. Memory that must not be read holds NaN."""

import dataclasses

import numpy as np
import pytest

import flashplan as fp
from frameworks import bits
from gpu_cases import DEVICE
from gpu_mla_cases import assert_right, is_served, options_of, run_on_gpu
from mla_cases import MlaCase, make_mla_inputs

pytestmark = pytest.mark.gpu

# Chunks have 2048 keys.
QO_LENS, KV_LENS = (1, 3, 2, 1, 1), (5000, 9000, 2049, 2048, 100)
OTHERS = [(0,), (1, 2), (3, 1, 4), (0, 1, 2, 3, 4), (4, 2, 0)]
NUM_CTAS = (None, 1, 7, 90)


@pytest.fixture(autouse=True)
def served():
    if not is_served(MlaCase((1,), (1,))):
        pytest.skip("the GPU has no kernels for shared_kv")


class Requests:
    """Random requests, of which any may be computed together."""

    def __init__(self, torch, seed, num_heads, page_size, topk=None):
        torch.manual_seed(seed)
        self.torch, self.topk, self.page_size, self.num_heads = torch, topk, page_size, num_heads
        columns = -(-max(KV_LENS) // page_size)
        num_pages = columns * len(KV_LENS)
        self.cache = torch.randn((num_pages, page_size, 576), device=DEVICE).bfloat16()
        self.table = torch.randperm(num_pages, device=DEVICE).int().view(len(KV_LENS), columns)
        self.q = torch.randn((sum(QO_LENS), num_heads, 576), device=DEVICE).bfloat16()
        self.sinks = torch.randn(num_heads, device=DEVICE)
        # More entries than some requests have keys, and some that name no key.
        slots = num_pages * page_size
        shape = (sum(QO_LENS), topk or 1)
        self.lists = torch.randint(-slots // 4, slots, shape, device=DEVICE).int()

    def run(self, chosen, num_ctas=None, longer=0, **options):
        """(o, lse) of each of the chosen requests. `longer`: how much longer they are planned."""
        torch = self.torch
        qo_lens, kv_lens = ([lens[r] for r in chosen] for lens in (QO_LENS, KV_LENS))
        case = MlaCase(qo_lens, kv_lens, self.num_heads, page_size=self.page_size)
        own = {"num_ctas": num_ctas, "topk": self.topk, "batch_invariant": True}
        attn = fp.Attention(**options_of(case) | own | options)
        attn.plan(np.cumsum([0, *qo_lens]), [n + longer for n in kv_lens])
        begins = np.cumsum([0, *QO_LENS])
        rows = torch.cat([torch.arange(begins[r], begins[r + 1]) for r in chosen]).to(DEVICE)
        lens = torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
        if self.topk:
            count = torch.tensor(qo_lens, device=DEVICE)
            real = lens.clamp_max(self.topk).repeat_interleave(count)
            arguments = {"topk_indices": self.lists[rows], "topk_lens": real}
        else:
            spare = -(-longer // self.page_size)
            table = torch.nn.functional.pad(self.table[list(chosen)], (0, spare))
            arguments = {"block_table": table} | ({"kv_lens": lens} if longer else {})
        o, lse = attn.run(self.q[rows], self.cache, **arguments, sinks=self.sinks, return_lse=True)
        split = [x.view(torch.uint8).split(qo_lens) for x in (o, lse)]
        return dict(zip(chosen, zip(*split, strict=True), strict=True))

    def check(self, **options):
        wanted = self.run(range(len(KV_LENS)), **options)
        for chosen in OTHERS:
            for num_ctas in NUM_CTAS:
                for longer in (0, 3000):
                    got = self.run(chosen, num_ctas, longer, **options)
                    for r, results in got.items():
                        for actual, expect in zip(results, wanted[r], strict=True):
                            assert self.torch.equal(actual, expect), (chosen, num_ctas, longer, r)


@pytest.mark.parametrize("num_heads", [16, 128, 96])
@pytest.mark.parametrize("page_size", [64, 1])
def test_requests_do_not_depend_on_their_neighbours(num_heads, page_size, torch, seed):
    Requests(torch, seed, num_heads, page_size).check()


@pytest.mark.parametrize("num_heads", [16, 128])
def test_tokens_with_lists_do_not_either(num_heads, torch, seed):
    Requests(torch, seed, num_heads, 64, topk=5000).check()


def test_nor_with_a_window(torch, seed):
    Requests(torch, seed, 16, 64).check(window_left=4500)


def test_nor_with_results_of_float32(torch, seed):
    Requests(torch, seed, 16, 16).check(o_dtype="float32")


CASES = [
    MlaCase(qo, kv, num_heads, num_ctas=ctas, batch_invariant=True, planned_lens=planned)
    for qo, kv, planned in (
        ((1, 1), (2048, 2049), None),
        ((1, 3, 1), (9000, 200, 4096), None),
        ((2, 1), (3000, 0), (9000, 5000)),
    )
    for num_heads in (16, 128)
    for ctas in (1, 3, 132)
] + [MlaCase((1,), (5000,), 128, batch_invariant=True, gain=gain) for gain in (8.0, 40.0)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case, torch, seed):
    inputs = make_mla_inputs(case, seed)
    assert_right(case, inputs, *run_on_gpu(case, inputs, torch))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "fp8_ds_mla"])
def test_caches_of_8_bits(kv_dtype, torch, seed):
    case = MlaCase((1, 2), (5000, 9000), 128, kv_dtype=kv_dtype, batch_invariant=True)
    inputs = make_mla_inputs(case, seed)
    results = []
    for ctas in (1, 40, 132):
        case = dataclasses.replace(case, num_ctas=ctas)
        results.append(run_on_gpu(case, inputs, torch))
        for actual, expect in zip(results[-1], results[0], strict=True):
            assert np.array_equal(bits(actual), bits(expect))
    assert_right(case, inputs, *results[0])


def test_whole_rows_as_values(torch, seed):
    case = MlaCase((1, 2), (5000, 90), 16, dims=(512, 512), batch_invariant=True, sinks=True)
    inputs = make_mla_inputs(case, seed)
    assert_right(case, inputs, *run_on_gpu(case, inputs, torch))


def test_a_captured_graph_serves_other_batches(torch, seed):
    requests = Requests(torch, seed, 128, 64)
    wanted = requests.run([0])[0]
    case = MlaCase((1,) * 4, (9000,) * 4, 128)
    attn = fp.Attention(**options_of(case) | {"batch_invariant": True})
    q = requests.q[:1].repeat(4, 1, 1)
    out = torch.empty((4, 128, 512), dtype=q.dtype, device=DEVICE)
    table = requests.table[:1].repeat(4, 1)
    arguments = {"block_table": table, "sinks": requests.sinks, "out": out}
    attn.plan(range(5), [5000] * 4)
    attn.run(q, requests.cache, **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(q, requests.cache, **arguments)
    for batch in (1, 4, 2):
        attn.plan(range(batch + 1), [5000] * batch)
        out.fill_(torch.nan)
        graph.replay()
        for row in out[:batch]:
            assert torch.equal(row.view(torch.uint8), wanted[0][0])
        assert out[batch:].isnan().all()
