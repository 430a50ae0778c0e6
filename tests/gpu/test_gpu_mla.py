# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention on a GPU against a float64 reference: the cases of the CPU that a
kernel serves, and batches whose tiles are cut. Memory that must not be read holds NaN."""

import dataclasses
import random

import numpy as np
import pytest

import flashplan as fp
from frameworks import TorchCuda, bits
from gpu_cases import DEVICE
from mla_cases import MlaCase, assert_mla_correct, expected, make_mla_inputs, run_mla
from test_mla import CASES as CPU_CASES

pytestmark = pytest.mark.gpu


def options_of(case):
    return case.options() | {"device": DEVICE}


def is_served(case):
    return fp.is_supported(**options_of(case))[0]


def on_gpu(case):
    """float32 queries, which no GPU kernel takes, become bfloat16."""
    is_wide = case.q_dtype == "float32"
    return dataclasses.replace(case, q_dtype="bfloat16") if is_wide else case


# Numbers of blocks of 64 keys in a tile: 1, 2, 3 and more, whole and not.
BLOCKS = [
    MlaCase((1,) * len(lens), lens, num_heads, page_size=page_size)
    for lens in ((64, 128, 192, 256), (1, 65, 130, 300), (640, 63, 5, 1000))
    for num_heads in (128, 16, 96)
    for page_size in (64, 16, 128, 24, 1, None)
]
# Cut tiles: pieces of a block or two, many states, tiles without keys, queues with several tiles.
CUT = [
    MlaCase(qo, kv, num_heads, num_ctas=ctas, page_size=page_size, **options)
    for qo, kv, num_heads in (
        ((1,), (4097,), 128),
        ((1, 3, 1), (4000, 200, 900), 16),
        ((2, 1), (9000, 70), 64),
        ((1,) * 5, (300, 0, 1, 2000, 640), 128),
    )
    for ctas in (1, 3, 40, 132)
    for page_size, options in (
        (64, {}),
        (8, {"pairs": "qk", "sinks": True}),
        (1, {"o_dtype": "float32"}),
    )
]
SHORTER = [
    MlaCase(qo, kv, num_heads, planned_lens=planned, num_ctas=ctas)
    for qo, kv, planned in (
        ((1, 1), (3, 9000), (20000, 9100)),
        ((2, 1), (700, 0), (9000, 40)),
        ((5, 5, 5), (64, 1, 65), (4096, 4096, 4096)),
    )
    for num_heads in (128, 12)
    for ctas in (7, 132)
]
# A row's largest logit comes late, or the logits grow: shifts are raised by either warpgroup.
LOUD = [
    MlaCase((1, 2), (1000, 700), heads, gain=gain) for heads in (16, 128) for gain in (8.0, 40.0)
]
CASES = [on_gpu(c) for c in (*CPU_CASES, *BLOCKS, *CUT, *SHORTER, *LOUD)]
SERVED = [c for c in dict.fromkeys(CASES) if is_served(c)]
REFUSED = [c for c in dict.fromkeys(CASES) if not is_served(c)]


def run_on_gpu(case, inputs, torch, attn=None, **changes):
    attn = attn or fp.Attention(**options_of(case))
    return run_mla(case, inputs, attn, TorchCuda(torch), **changes)


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_mla(case, torch, seed):
    inputs = make_mla_inputs(case, seed)
    o, lse = run_on_gpu(case, inputs, torch)
    rows = slice(0, inputs.qo_indptr[-1])
    assert_mla_correct(case, inputs, o[rows], lse[rows], sliced(expected(case, inputs), rows))


def sliced(wanted, rows):
    return [x[rows] for x in wanted]


def test_most_cases_are_served():
    if not fp.is_supported(**options_of(MlaCase((1,), (1,))))[0]:
        pytest.skip("the GPU has no kernels for shared_kv")
    for case in REFUSED:
        _, reason = fp.is_supported(**options_of(case))
        assert reason.startswith(("head_dim", "kv_dtype")), (str(case), reason)
    assert len(SERVED) > 4 * len(REFUSED)


@pytest.mark.parametrize("growth", [1.0, 5.0, 9.0])
@pytest.mark.parametrize("place", [0, 63, 64, 127, 128, 300, 639])
def test_a_key_that_outweighs_all_others(growth, place, torch, seed):
    """The shifts of rows are raised where the key stands, in blocks of either warpgroup; and logits
    that grow from block to block raise them in each."""
    case = MlaCase((1, 1), (640, 640), 128)
    inputs = make_mla_inputs(case, seed)
    factors = growth ** (np.arange(640) // 64 / 2)
    factors[place] *= 30
    scaled = (inputs.keys[0].astype(np.float32) / 4 * factors[:, None]).clip(-3e4, 3e4)
    inputs = make_mla_inputs(case, seed, [scaled.astype(inputs.keys[0].dtype), inputs.keys[1]])
    o, lse = run_on_gpu(case, inputs, torch)
    rows = slice(0, 2)
    assert_mla_correct(case, inputs, o[rows], lse[rows], sliced(expected(case, inputs), rows))


def test_same_inputs_give_the_same_bits(torch, seed):
    case = MlaCase((1, 2, 1), (4097, 700, 90), 128, num_ctas=40)
    inputs = make_mla_inputs(case, seed)
    attn = fp.Attention(**options_of(case))
    first = run_on_gpu(case, inputs, torch, attn)
    for _ in range(20):
        for x, y in zip(run_on_gpu(case, inputs, torch, attn), first, strict=True):
            assert np.array_equal(bits(x)[:4], bits(y)[:4])


@pytest.mark.parametrize("page_size", [64, 16, 1])
def test_one_tensor_or_two_give_the_same_bits(page_size, torch, seed):
    case = MlaCase((2, 1), (700, 33), 16, num_ctas=3, page_size=page_size)
    inputs = make_mla_inputs(case, seed)
    wanted = run_on_gpu(case, inputs, torch)
    for pairs, heads in (("q", "NHD"), ("k", ""), ("qk", "HND")):
        other = dataclasses.replace(case, pairs=pairs, heads=heads)
        for x, y in zip(run_on_gpu(other, inputs, torch), wanted, strict=True):
            assert np.array_equal(bits(x)[:3], bits(y)[:3]), (pairs, heads)


@pytest.mark.parametrize("page_size", [64, 1])
def test_lse_base2(page_size, torch, seed):
    case = MlaCase((1, 2), (300, 90), page_size=page_size)
    inputs = make_mla_inputs(case, seed)
    natural = run_on_gpu(case, inputs, torch)[1][:3]
    attn = fp.Attention(**options_of(case) | {"lse_base2": True})
    assert np.allclose(run_on_gpu(case, inputs, torch, attn)[1][:3], natural / np.log(2), rtol=1e-6)


def test_tensors_of_any_alignment(torch, seed):
    """Rows that no box and no copy of 16 bytes fits: the same results, by another way."""
    case = MlaCase((1, 2), (300, 90), 16)
    inputs = make_mla_inputs(case, seed)
    wanted = expected(case, inputs)
    framework = TorchCuda(torch)
    attn = fp.Attention(**options_of(case))
    attn.plan(inputs.qo_indptr, np.array(case.kv_lens, np.int32))
    q, cache = framework.tensor(inputs.q), framework.tensor(inputs.cache)
    table = framework.tensor(inputs.tables["block_table"])

    def shifted(x):
        memory = torch.empty((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype, device=DEVICE)
        memory[..., 3:] = x
        return memory[..., 3:]

    for q_given, cache_given in ((shifted(q), cache), (q, shifted(cache))):
        o, lse = attn.run(q_given, cache_given, block_table=table, return_lse=True)
        rows = slice(0, 3)
        o, lse = framework.array(o)[rows], framework.array(lse)[rows]
        assert_mla_correct(case, inputs, o, lse, sliced(wanted, rows))


def test_pages_that_are_none_of_the_cache(torch, seed):
    """Keys on such pages count as if they were hidden."""
    case = MlaCase((1,), (640,), 16)
    inputs = make_mla_inputs(case, seed)
    inputs.tables["block_table"][0, 3] = 1 << 20
    kept = np.r_[0 : 3 * 64, 4 * 64 : 640]
    short = dataclasses.replace(case, kv_lens=(576,))
    wanted = expected(short, dataclasses.replace(inputs, keys=[inputs.keys[0][kept]]))
    o, lse = run_on_gpu(case, inputs, torch)
    assert_mla_correct(case, inputs, o[:1], lse[:1], sliced(wanted, slice(0, 1)))


@pytest.mark.parametrize("num_heads", [16, 128])
def test_replays_of_a_graph(num_heads, torch, seed):
    """Captured once at the bounds, replayed for any smaller batch, as an eager run computes it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    case = MlaCase((2,) * 8, (2048,) * 8, num_heads)
    options = options_of(case)
    attn, eager = fp.Attention(**options), fp.Attention(**options)
    q = torch.randn((16, num_heads, 576), device=DEVICE).bfloat16()
    cache = torch.randn((100, 64, 576), device=DEVICE).bfloat16()
    table = torch.randint(100, (8, 32), dtype=torch.int32, device=DEVICE)
    out = torch.empty((16, num_heads, 512), dtype=q.dtype, device=DEVICE)
    attn.plan(np.arange(0, 17, 2, dtype=np.int32), np.full(8, 2048, np.int32))
    attn.run(q, cache, block_table=table, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(q, cache, block_table=table, out=out)
    for _ in range(30):
        batch = rng.randint(0, 8)
        qo_lens = [rng.choice((0, 1, 1, 2)) for _ in range(batch)]
        indptr = np.cumsum([0, *qo_lens], dtype=np.int32)
        kv_lens = np.array(
            [rng.choice((0, 1, 64, rng.randint(0, 2048))) for _ in qo_lens], np.int32
        )
        for plan in (attn, eager):
            plan.plan(indptr, kv_lens)
        wanted = torch.full_like(out, torch.nan)
        eager.run(q, cache, block_table=table, out=wanted)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out.view(torch.int16), wanted.view(torch.int16))
        assert not out[: indptr[-1]].isnan().any()
        assert out[indptr[-1] :].isnan().all()
