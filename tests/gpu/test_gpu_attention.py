# SPDX-License-Identifier: Apache-2.0
"""Every case on the GPU against the reference, in every framework; what must not change bits."""

import dataclasses
import random
import re

import numpy as np
import pytest

import flashplan as fp
from batches import BATCH
from case import Case
from frameworks import TorchCuda, bits, gpu_framework
from gpu_cases import ALL_CASES, DEVICE, GPU_CASES, without_hidden_values
from gpu_schedule_cases import DIVIDED, PREFIXES
from inputs import make_inputs, rearranged
from solve import CudaRunner, assert_correct, problem, run_arguments

pytestmark = pytest.mark.gpu


def equal_bits(states, others):
    return all(np.array_equal(bits(x), bits(y)) for x, y in zip(states, others, strict=True))


def test_most_cases_have_a_kernel():
    """The rest are larger or stranger than what was compiled in, each for a reason."""
    for case in set(ALL_CASES) - set(GPU_CASES):
        _, reason = fp.is_supported(**case.options() | {"device": DEVICE})
        assert ": expected " in reason
    print(f"{len(GPU_CASES)} of {len(ALL_CASES)} cases have a kernel")
    assert 2 * len(GPU_CASES) > len(ALL_CASES)


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_attention(case, torch, cupy, jax, seed):
    """Right within the error budget, and the same bits whatever the framework, into poisoned
    outputs and into outputs that run() allocates."""
    inputs, exact, twin = problem(case, seed)
    runner = CudaRunner(case, torch)
    expected = None
    for name, module in (("torch", torch), ("cupy", cupy), ("jax", jax)):
        framework = gpu_framework(name, module)
        results = [runner.run(inputs, framework), runner.run_returning(inputs, framework)]
        if expected is None:
            expected = [x.copy() for x in results[0]]
            o, lse = expected
            if case.special:
                o = without_hidden_values(case, inputs, exact[0], o)
            assert_correct(case, inputs, exact, twin, o, lse)
        for result in results:
            assert [x.shape for x in result] == [x.shape for x in expected], name
            assert equal_bits(result, expected), name


# How soon the kernel learns of the missing pages depends on time.
MISSING_PAGES = Case(
    (150, 1),
    (700, 3000),
    num_qo_heads=8,
    head_dim=128,
    page_size=16,
    page_ids="missing",
    variant="biased",
)
REPEATED = [
    Case(**BATCH),
    Case((1,) * 3, (4000, 10, 900), num_ctas=13),
    Case((1,), (9000,), num_qo_heads=8, num_ctas=64, kv_dtype="float8_e4m3fn"),
    Case((200, 1, 1, 1), (200, 3000, 5000, 7), num_qo_heads=16, num_kv_heads=2, head_dim=128),
    *(case for case in DIVIDED if case.num_ctas == 132 and case in GPU_CASES),
    MISSING_PAGES,
]
WAITING = [case for case in (*REPEATED[4:8], *PREFIXES[:6]) if case in GPU_CASES]
WAITING.append(MISSING_PAGES)


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_same_inputs_give_the_same_bits(case, torch, seed):
    inputs, _, _ = problem(case, seed)
    runner, framework = CudaRunner(case, torch), TorchCuda(torch)
    first = [x.copy() for x in runner.run(inputs, framework)]
    for _ in range(20):
        assert equal_bits(runner.run(inputs, framework), first)


@pytest.mark.parametrize("case", WAITING, ids=str)
def test_other_kernels_do_not_change_bits(case, torch, seed):
    """Beside the kernels of another stream some CTAs start late, and others stop waiting for their
    states."""
    inputs = make_inputs(case, seed)
    attn = fp.Attention(**case.options() | {"device": DEVICE})
    attn.plan(*inputs.plan_args(), **inputs.plan_options())
    args, kwargs = run_arguments(case, inputs, TorchCuda(torch))
    first = attn.run(*args, **kwargs).clone()
    other = torch.cuda.Stream()
    matrix = torch.ones(2048, 2048, device=DEVICE)
    for _ in range(50):
        with torch.cuda.stream(other):
            matrix @ matrix
        out = torch.full_like(first, torch.nan)
        attn.run(*args, **kwargs, out=out)
        assert torch.equal(out.view(torch.int16), first.view(torch.int16))


def test_alignment_does_not_change_bits(torch, seed):
    """Results whose rows are no multiple of 16 bytes apart are written in another way."""
    case = Case((1500,), (1500,), num_qo_heads=8, head_dim=128, v_scale=1.9, num_ctas=4)
    inputs = make_inputs(case, seed)
    attn = fp.Attention(**case.options() | {"device": DEVICE})
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(case, inputs, TorchCuda(torch))
    memory = torch.empty(1500 * 8 * 128 + 1, dtype=torch.bfloat16, device=DEVICE)
    results = []
    for out in (memory[:-1], memory[1:]):
        out = out.view(1500, 8, 128)
        attn.run(*args, **kwargs, out=out)
        results.append(out.clone().view(torch.int16))
    assert torch.equal(*results)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_of_the_next_request_do_not_change_bits(head_dim, torch, seed):
    """A request's last row tile is filled up with queries of the next request."""
    attn = fp.Attention(8, 4, head_dim, page_size=None, q_dtype="bfloat16", device=DEVICE)
    attn.plan([0, 37, 101], [1500, 1500])
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).to(torch.bfloat16)

    q, k, v = normal(101, 8, head_dim), normal(3000, 4, head_dim), normal(3000, 4, head_dim)
    results = []
    for factor in (1, 100):
        q[37:] *= factor
        o, lse = attn.run(q, k, v, return_lse=True)
        results.append((o[:37].view(torch.int16), lse[:37].view(torch.int32)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


INVARIANT = [
    Case((1,), (9000,), num_qo_heads=8, head_dim=128, batch_invariant=True),
    Case((1,), (4096,), batch_invariant=True),
    Case((1,), (4097,), batch_invariant=True, q_dtype="float16"),
    Case((3,), (8200,), batch_invariant=True, window_left=6000),
    Case((150,), (1500,), batch_invariant=True, page_size=None),
    Case((40,), (40,), batch_invariant=True, softcap=20.0),
    # More than 64 packed rows: on Hopper kernels of their own.
    Case((65,), (3000,), num_qo_heads=8, num_kv_heads=2, head_dim=64, batch_invariant=True),
    Case((17,), (5000,), num_qo_heads=8, num_kv_heads=2, head_dim=128, batch_invariant=True),
    Case((200,), (900,), num_qo_heads=4, num_kv_heads=1, head_dim=256, batch_invariant=True),
    Case((90,), (2100,), head_dim=128, batch_invariant=True, window_left=500, page_size=3),
]


@pytest.mark.parametrize("case", INVARIANT, ids=str)
def test_batch_invariance(case, torch, seed):
    """Alone, among neighbours, and on any number of CTAs: the same bits."""
    rng, framework = random.Random(seed), TorchCuda(torch)
    inputs, exact, twin = problem(case, seed)
    alone = CudaRunner(case, torch).run(inputs, framework)
    assert_correct(case, inputs, exact, twin, *alone)
    for num_ctas in (1, 2, 5, 16, 132, 264):
        lens = [
            (rng.choice((0, 1, 1, 30)), rng.choice((0, 5, 600, 9000)))
            for _ in range(rng.randint(1, 8))
        ]
        place = rng.randint(0, len(lens))
        lens.insert(place, (case.qo_lens[0], case.kv_lens[0]))
        batch, crowd = rearranged(case, inputs, lens, [place], [seed, num_ctas])
        runner = CudaRunner(dataclasses.replace(batch, num_ctas=num_ctas), torch)
        together = runner.run(crowd, framework)
        rows = slice(*crowd.qo_indptr[place : place + 2])
        assert equal_bits([x[rows] for x in together], alone)


def test_one_attention_serves_batches_of_any_size(torch, seed):
    """Mixed steps of a serving loop; what a larger batch left behind must not be seen."""
    rng, framework = random.Random(seed), TorchCuda(torch)
    runner = CudaRunner(Case(**BATCH), torch, max_batch_size=12, max_qo_tokens=1000)
    for step in range(25):
        batch_size = rng.randint(0 if step else 1, 12)
        runner.case = case = Case(
            qo_lens=tuple(rng.choice((0, 1, 1, 30, 70)) for _ in range(batch_size)),
            kv_lens=tuple(rng.choice((0, 1, 40, 3000)) for _ in range(batch_size)),
        )
        if batch_size == 0:
            assert runner.attn.plan([0], []).work_tiles == []
            continue
        inputs, exact, twin = problem(case, seed)
        assert_correct(case, inputs, exact, twin, *runner.run(inputs, framework))


def test_small_workspace_means_fewer_splits(torch, seed):
    case = Case((1, 4), (6000, 3000), num_qo_heads=8, num_ctas=32)
    inputs, exact, twin = problem(case, seed)
    options = case.options() | {"device": DEVICE}
    full = fp.Attention(**options).workspace_bytes
    try:
        least = 256
        fp.Attention(**options, workspace=torch.empty(least, dtype=torch.uint8, device=DEVICE))
    except ValueError as error:
        least = int(re.search(r"^workspace: expected >= (\d+) bytes", str(error)).group(1))
    splits = []
    for share in range(5):
        size = least + (full - least) * share // 4 + 256
        runner = CudaRunner(case, torch)
        memory = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
        runner.attn = fp.Attention(**options, workspace=memory)
        assert_correct(case, inputs, exact, twin, *runner.run(inputs, TorchCuda(torch)))
        tiles = runner.attn.plan(*inputs.plan_args()).work_tiles
        splits.append(sum(tile[-1] >= 0 for tile in tiles))
    assert splits == sorted(splits)
    assert splits[0] < splits[-1]


@pytest.mark.parametrize("csr", [False, True])
def test_large_page_tables(csr, torch, seed):
    """Thousands of pages of one token for each of many requests."""
    kv_lens = tuple(1000 + 37 * i for i in range(48))
    case = Case((1,) * 48, kv_lens, page_size=1, num_qo_heads=8, num_kv_heads=1, csr=csr)
    inputs, exact, twin = problem(case, seed)
    assert_correct(
        case, inputs, exact, twin, *CudaRunner(case, torch).run(inputs, TorchCuda(torch))
    )


def test_addresses_beyond_32_bits(torch):
    """The last pages of a cache of more than 4 Gi elements, of which only they are ever touched."""
    num_pages, page_shape = (1 << 32) // (16 * 64) + 64, (16, 1, 64)
    cache = torch.empty((num_pages, *page_shape), dtype=torch.bfloat16, device=DEVICE)
    assert cache.numel() > 1 << 32
    small = torch.randn((2, *page_shape), device=DEVICE).bfloat16()
    cache[-2:] = small
    q = torch.randn((1, 4, 64), device=DEVICE).bfloat16()
    attn = fp.Attention(4, 1, 64, page_size=16, device=DEVICE)
    attn.plan([0, 1], [32])
    far = torch.tensor([[num_pages - 2, num_pages - 1]], dtype=torch.int32, device=DEVICE)
    near = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    expected = attn.run(q, small, small, block_table=near)
    assert torch.equal(attn.run(q, cache, cache, block_table=far), expected)
    new = torch.randn((1, 1, 64), device=DEVICE).bfloat16()
    lengths = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1], [31])]
    values = torch.empty_like(cache)
    fp.append_paged_kv(new, new, cache, values, *lengths, block_table=far)
    assert torch.equal(cache[-1, 14], new[0])
    assert torch.equal(values[-1, 14], new[0])
