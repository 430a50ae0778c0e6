# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests share, on a GPU: plans that do share, and what must not change."""

import dataclasses

import numpy as np
import pytest

from frameworks import TorchCuda, bits
from gpu_cases import is_supported, on_gpu
from gpu_schedule_cases import PREFIXES
from solve import CudaRunner, problem
from test_gpu_graphs import MAX_BATCH, PAGE_SIZE, Server, capture_with_torch

pytestmark = pytest.mark.gpu

CASES = [case for case in map(on_gpu, PREFIXES) if is_supported(case)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_share(case, torch):
    """test_attention has the same cases: they would say little if nothing was shared."""
    inputs, _, _ = problem(case, 0)
    attn = CudaRunner(case, torch).attn
    plan = attn.plan(*inputs.plan_args(), **inputs.plan_options())
    text = plan.describe()
    # With 40 queues or more, sharing does not always pay. With 64 dims it does not pay for requests
    # of 20 tokens either, because each of them fills most of a row tile. A plan of one queue has
    # too little workspace for the partial results of such requests with eight kv heads, or with 512
    # dims, where a row tile has 64 rows.
    has_20_tokens = max(case.qo_lens) == 20
    is_small = case.num_ctas == 1 and (case.num_kv_heads == 8 or case.head_dim == 512)
    is_in_vain = case.head_dim == 64 or is_small
    if case.num_ctas < 40 and not (has_20_tokens and is_in_vain):
        assert "row tiles of them computed once" in text, text


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_do_not_change_results(case, torch):
    """But for rounding, and without them bits are the same in every run: it makes no difference
    which CTA is the last to arrive."""
    inputs, exact, _ = problem(case, 0)
    runner, framework = CudaRunner(case, torch), TorchCuda(torch)
    o, lse = (x.copy() for x in runner.run(inputs, framework))
    for _ in range(20):
        again, again_lse = runner.run(inputs, framework)
        assert np.array_equal(bits(again), bits(o))
        assert np.array_equal(bits(again_lse), bits(lse))
    plain = dataclasses.replace(inputs, shared_prefixes=None)
    other, other_lse = runner.run(plain, framework)
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2}[case.q_dtype] * np.abs(exact[0]).max()
    assert np.allclose(o.astype(float), other.astype(float), atol=tolerance)
    assert np.allclose(lse, other_lse, rtol=1e-4, atol=1e-4)


def test_one_graph_serves_any_sharing(torch, seed):
    server = Server(torch, seed, max_qo_tokens=MAX_BATCH)  # decodes, whose kernels share
    kv_lens = np.array([1500 + 13 * r for r in range(MAX_BATCH)], np.int32)
    qo_indptr = np.arange(MAX_BATCH + 1, dtype=np.int32)
    server.attn.plan(qo_indptr, kv_lens)
    replay = capture_with_torch(server)
    sharings = (
        [[0, 16, 1440]],
        [],
        [[0, 16, 640], [0, 8, 1440], [8, 8, 1280]],
        [[4, 12, 1440]],
    )
    for groups in sharings:
        server.shuffle()
        for first, count, tokens in groups:
            pages = tokens // PAGE_SIZE
            server.block_table[first : first + count, :pages] = server.block_table[first, :pages]
        server.poison()
        server.attn.plan(qo_indptr, kv_lens, shared_prefixes=groups)
        replay()
        server.eager.plan(qo_indptr, kv_lens, shared_prefixes=groups)
        out, lse = torch.full_like(server.out, torch.nan), torch.full_like(server.lse, torch.nan)
        server.run(server.eager, out, lse)
        assert torch.equal(server.out.view(torch.int16), out.view(torch.int16))
        assert torch.equal(server.lse.view(torch.int32), lse.view(torch.int32))
        server.eager.plan(qo_indptr, kv_lens)
        server.run(server.eager, out, lse)
        rows = slice(0, MAX_BATCH)
        assert torch.allclose(server.out[rows].float(), out[rows].float(), atol=0.02)
        assert torch.allclose(server.lse[rows], lse[rows], atol=1e-3)
