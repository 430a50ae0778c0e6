# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention on a GPU against a float64 reference: the cases of the CPU that a
kernel serves, and batches whose tiles are cut. Memory that must not be read holds NaN."""

import dataclasses

import numpy as np
import pytest

import flashplan as fp
from frameworks import TorchCuda, bits
from gpu_cases import DEVICE
from gpu_mla_cases import (
    assert_most_are_served,
    assert_right,
    check_replays,
    is_served,
    on_gpu,
    options_of,
    run_on_gpu,
    shifted,
)
from mla_cases import MlaCase, make_mla_inputs
from test_mla import CASES as CPU_CASES

pytestmark = pytest.mark.gpu


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
CASES = on_gpu((*CPU_CASES, *BLOCKS, *CUT, *SHORTER, *LOUD))


@pytest.mark.parametrize("case", [c for c in CASES if is_served(c)], ids=str)
def test_mla(case, torch, seed):
    inputs = make_mla_inputs(case, seed)
    assert_right(case, inputs, *run_on_gpu(case, inputs, torch))


def test_most_cases_are_served():
    if not is_served(MlaCase((1,), (1,))):
        pytest.skip("the GPU has no kernels for shared_kv")
    assert_most_are_served(CASES, 4)


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
    assert_right(case, inputs, *run_on_gpu(case, inputs, torch))


def test_same_inputs_give_the_same_bits(torch, seed):
    case = MlaCase((1, 2, 1), (4097, 700, 90), 128, num_ctas=40)
    inputs = make_mla_inputs(case, seed)
    attn = fp.Attention(**options_of(case))
    first = run_on_gpu(case, inputs, torch, attn)
    for _ in range(20):
        for x, y in zip(run_on_gpu(case, inputs, torch, attn), first, strict=True):
            assert np.array_equal(bits(x), bits(y))


@pytest.mark.parametrize("page_size", [64, 16, 1])
def test_one_tensor_or_two_give_the_same_bits(page_size, torch, seed):
    case = MlaCase((2, 1), (700, 33), 16, num_ctas=3, page_size=page_size)
    inputs = make_mla_inputs(case, seed)
    wanted = run_on_gpu(case, inputs, torch)
    for pairs, heads in (("q", "NHD"), ("k", ""), ("qk", "HND")):
        other = dataclasses.replace(case, pairs=pairs, heads=heads)
        for x, y in zip(run_on_gpu(other, inputs, torch), wanted, strict=True):
            assert np.array_equal(bits(x), bits(y)), (pairs, heads)


@pytest.mark.parametrize("page_size", [64, 1])
def test_lse_base2(page_size, torch, seed):
    case = MlaCase((1, 2), (300, 90), page_size=page_size)
    inputs = make_mla_inputs(case, seed)
    natural = run_on_gpu(case, inputs, torch)[1]
    attn = fp.Attention(**options_of(case) | {"lse_base2": True})
    assert np.allclose(run_on_gpu(case, inputs, torch, attn)[1], natural / np.log(2), rtol=1e-6)


def test_tensors_of_any_alignment(torch, seed):
    """The results are right when rows come another way."""
    case = MlaCase((1, 2), (300, 90), 16)
    inputs = make_mla_inputs(case, seed)
    framework = TorchCuda(torch)
    attn = fp.Attention(**options_of(case))
    attn.plan(inputs.qo_indptr, np.array(case.kv_lens, np.int32))
    q, cache = framework.tensor(inputs.q), framework.tensor(inputs.cache)
    table = framework.tensor(inputs.tables["block_table"])
    for q_given, cache_given in ((shifted(torch, q), cache), (q, shifted(torch, cache))):
        results = attn.run(q_given, cache_given, block_table=table, return_lse=True)
        assert_right(case, inputs, *(framework.array(x)[:3] for x in results))


def test_pages_that_are_none_of_the_cache(torch, seed):
    """Keys on such pages count as if they were hidden."""
    case = MlaCase((1,), (640,), 16)
    inputs = make_mla_inputs(case, seed)
    inputs.tables["block_table"][0, 3] = 1 << 20
    kept = np.r_[0 : 3 * 64, 4 * 64 : 640]
    short = dataclasses.replace(case, kv_lens=(576,))
    wanted = dataclasses.replace(inputs, keys=[inputs.keys[0][kept]])
    assert_right(short, wanted, *run_on_gpu(case, inputs, torch))


@pytest.mark.parametrize("num_heads", [16, 128])
def test_replays_of_a_graph(num_heads, torch, seed):
    torch.manual_seed(seed)
    table = torch.randint(100, (8, 32), dtype=torch.int32, device=DEVICE)
    case = MlaCase((2,) * 8, (2048,) * 8, num_heads)
    check_replays(torch, case, seed, {"block_table": table})
