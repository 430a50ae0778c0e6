# SPDX-License-Identifier: Apache-2.0
"""What the tests of latent attention on a GPU share. Cases are an MlaCase or a SparseCase."""

import dataclasses
import random

import numpy as np

import flashplan as fp
from frameworks import TorchCuda
from gpu_cases import DEVICE, SOAK
from mla_cases import MlaCase, assert_mla_correct, ds_mla_rows, expected, run_mla
from sparse_cases import run_sparse


def options_of(case):
    return case.options() | {"device": DEVICE}


def is_served(case):
    return fp.is_supported(**options_of(case))[0]


def on_gpu(cases):
    """Each once, with bfloat16 in place of float32 queries, which no GPU kernel takes."""
    return list(
        dict.fromkeys(
            dataclasses.replace(case, q_dtype="bfloat16") if case.q_dtype == "float32" else case
            for case in cases
        )
    )


def assert_most_are_served(cases, times):
    """`times` as many are as are not, for their head dims or their kv_dtype."""
    refused = [case for case in cases if not is_served(case)]
    for case in refused:
        _, reason = fp.is_supported(**options_of(case))
        assert reason.startswith(("head_dim", "kv_dtype")), (str(case), reason)
    assert len(cases) - len(refused) > times * len(refused)


def run_on_gpu(case, inputs, torch, attn=None, **changes):
    """(o, lse) of the tokens of the batch."""
    run = run_mla if isinstance(case, MlaCase) else run_sparse
    attn = attn or fp.Attention(**options_of(case))
    return [x[: sum(case.qo_lens)] for x in run(case, inputs, attn, TorchCuda(torch), **changes)]


def assert_right(case, inputs, o, lse):
    tokens = sum(case.qo_lens)
    assert_mla_correct(case, inputs, o, lse, [x[:tokens] for x in expected(case, inputs)])


def shifted(torch, x):
    """Rows that no box and no copy of 16 bytes fits."""
    memory = torch.empty((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype, device=DEVICE)
    memory[..., 3:] = x
    return memory[..., 3:]


def stored(torch, keys, kv_dtype):
    """Keys as a cache has them."""
    if kv_dtype != "fp8_ds_mla":
        return keys.to(getattr(torch, kv_dtype or "bfloat16"))
    rows = ds_mla_rows(keys.flatten(0, 1).cpu().numpy())
    return torch.from_numpy(rows).to(keys.device).view(*keys.shape[:2], -1)


def check_replays(torch, case, seed, arguments, change=lambda: None):
    """Captured once at the bounds of eight requests of up to two queries, and replayed for SOAK
    smaller batches, the graph computes what an eager run does. `change` writes to `arguments`."""
    rng = random.Random(seed)
    attn, eager = (fp.Attention(**options_of(case)) for _ in range(2))
    q = torch.randn((16, case.num_heads, 576), device=DEVICE).bfloat16()
    cache = stored(torch, torch.randn((100, 64, 576), device=DEVICE), case.kv_dtype)
    out = torch.empty((16, case.num_heads, 512), dtype=q.dtype, device=DEVICE)
    attn.plan(np.arange(0, 17, 2, dtype=np.int32), np.full(8, 2048, np.int32))
    attn.run(q, cache, **arguments, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(q, cache, **arguments, out=out)
    wanted = torch.empty_like(out)
    num_wrong = torch.zeros((), dtype=torch.int32, device=DEVICE)
    for step in range(SOAK):
        qo_lens = [rng.choice((0, 1, 1, 2)) for _ in range(rng.randint(0, 8))]
        indptr = np.cumsum([0, *qo_lens], dtype=np.int32)
        kv_lens = [rng.choice((0, 1, 64, rng.randint(0, 2048))) for _ in qo_lens]
        if step % 50 == 0:
            change()
        for plan in (attn, eager):
            plan.plan(indptr, np.array(kv_lens, np.int32))
        wanted.fill_(torch.nan)
        eager.run(q, cache, **arguments, out=wanted)
        out.fill_(torch.nan)
        graph.replay()
        differs = (out.view(torch.int16) != wanted.view(torch.int16)).any()
        tokens = indptr[-1]
        num_wrong += differs | out[:tokens].isnan().any() | ~out[tokens:].isnan().all()
    assert num_wrong == 0
