# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant plans with a kernel for each kind of requests: a request has the same bits alone
and in a crowd, in a replayed graph, on any number of CTAs, and over pages of any size from 8 on."""

import os

import numpy as np
import pytest

import flashplan as fp
from gpu_cases import DEVICE
from test_gpu_graphs import MAX_TOKENS, Server, capture_with_torch

pytestmark = pytest.mark.gpu

BATCHES = int(os.environ.get("FLASHPLAN_INVARIANT_BATCHES", 400))
OPTIONS = {
    "plain": {},
    "window": {"window_left": 700},
    "full": {"causal": False},
    "softcap": {"softcap": 20.0},
    "general": {"kernels": "general"},
    "rope": {"rope": fp.Rope()},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
}
# Of the same request: decodes, drafts, prompts of one row tile and of several, chunks of prompts.
REQUESTS = ((1, 2900), (1, 513), (1, 40), (9, 1500), (16, 16), (17, 2000), (40, 900), (250, 3000))


def bits(torch, out, lse):
    return out.view(torch.int16), lse.view(torch.int32)


def assert_same_bits(torch, ours, others):
    for x, y in zip(bits(torch, *ours), bits(torch, *others), strict=True):
        assert torch.equal(x, y)


class Lonely:
    """Plans for one request, with numbers of queues of their own."""

    def __init__(self, server):
        self.server = server
        options = server.options | {"max_batch_size": 1}
        self.attns = [fp.Attention(**options | {"num_ctas": n}) for n in (None, 1, 5, 40, 131, 264)]

    def run(self, attn, first_token, qo_len, request, kv_len):
        server, torch = self.server, self.server.torch
        attn.plan([0, qo_len], [kv_len])
        q = server.q[first_token : first_token + qo_len].clone()
        table = server.block_table[request : request + 1].clone()
        out = torch.full_like(q, float("nan"))
        lse = torch.full((qo_len, q.shape[1]), float("nan"), device=DEVICE)
        attn.run(q, server.k, server.v, block_table=table, out=out, lse=lse)
        return out, lse


@pytest.mark.parametrize("name", OPTIONS)
def test_alone_and_in_replayed_crowds(name, torch, seed):
    torch.manual_seed(seed)
    server = Server(torch, seed, batch_invariant=True, **OPTIONS[name])
    if name == "e4m3":
        server.k, server.v = (x.to(torch.float8_e4m3fn) for x in (server.k, server.v))
    lonely = Lonely(server)
    server.plan((np.array([0, 1, 60], np.int32), np.array([50, 60], np.int32)))
    replay = capture_with_torch(server)
    num_both = 0
    for _ in range(BATCHES):
        lens = server.random_lens()
        qo_lens = np.diff(lens[0])
        requests = np.flatnonzero(qo_lens)
        if len(requests) == 0:
            continue
        server.shuffle()
        server.poison()
        server.plan(lens)
        num_both += "\nrequests of up to 64 query rows" in server.attn.plan(*lens).describe()
        replay()
        for r in server.rng.sample(requests.tolist(), min(2, len(requests))):
            rows = slice(lens[0][r], lens[0][r + 1])
            alone = lonely.run(
                server.rng.choice(lonely.attns), rows.start, int(qo_lens[r]), r, int(lens[1][r])
            )
            assert_same_bits(torch, alone, (server.out[rows], server.lse[rows]))
    assert num_both > 0


@pytest.mark.parametrize("head_dim", [64, 128, 256, (192, 128)], ids=str)
def test_over_pages_of_any_size(head_dim, torch, seed):
    """Also with other tokens in the unused rows of a tile, and over ragged keys."""
    torch.manual_seed(seed)
    dims = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    longest = max(kv_len for _, kv_len in REQUESTS)
    tokens = MAX_TOKENS + 10
    q = torch.randn((tokens, 8, dims[0]), device=DEVICE).bfloat16()
    k, v = (torch.randn((longest + 200, 2, d), device=DEVICE).bfloat16() for d in dims)
    common = {"q_dtype": "bfloat16", "batch_invariant": True, "device": DEVICE}
    common |= {"max_batch_size": 4, "max_qo_tokens": tokens}
    ragged = fp.Attention(8, 2, head_dim, page_size=None, **common)
    paged = {n: fp.Attention(8, 2, head_dim, page_size=n, **common) for n in (8, 16, 64, 128)}

    def run(attn, keys, values, first_token, qo_len, **more):
        out = torch.full((tokens, 8, dims[1]), float("nan"), device=DEVICE).bfloat16()
        lse = torch.full((tokens, 8), float("nan"), device=DEVICE)
        attn.run(q, keys, values, out=out, lse=lse, **more)
        rows = slice(first_token, first_token + qo_len)
        return out[rows], lse[rows]

    for qo_len, kv_len in REQUESTS:
        ragged.plan([0, qo_len], [kv_len])
        expected = run(ragged, k, v, 0, qo_len)
        assert not expected[0].isnan().any()
        for page_size, attn in paged.items():
            pages = -(-kv_len // page_size)
            ids = torch.randperm(pages + 3, dtype=torch.int32, device=DEVICE)[:pages]
            caches = [
                torch.full((pages + 3, page_size, 2, d), float("nan"), device=DEVICE).bfloat16()
                for d in dims
            ]
            for cache, x in zip(caches, (k, v), strict=True):
                padded = torch.zeros((pages * page_size, *x.shape[1:]), device=DEVICE).bfloat16()
                padded[:kv_len] = x[:kv_len]
                cache[ids.long()] = padded.view(pages, page_size, *x.shape[1:])
            # The same queries behind those of another request, whose keys are a few of these.
            own = q.clone()
            q[3 : 3 + qo_len] = own[:qo_len]
            attn.plan([0, 3, 3 + qo_len], [20, kv_len])
            table = ids.expand(2, -1).contiguous()
            ours = run(attn, *caches, 3, qo_len, block_table=table)
            q.copy_(own)
            assert_same_bits(torch, ours, expected)
