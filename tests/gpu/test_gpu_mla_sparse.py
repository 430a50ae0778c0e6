# SPDX-License-Identifier: Apache-2.0
"""Attention over lists of keys (topk) on a GPU against a float64 reference: the cases of the CPU
that a kernel serves, and lists that are cut. Memory that must not be read holds NaN."""

import dataclasses

import numpy as np
import pytest

import flashplan as fp
from frameworks import TorchCuda, bits
from gpu_cases import DEVICE
from gpu_mla_cases import (
    assert_most_are_served,
    check_replays,
    is_served,
    on_gpu,
    options_of,
    run_on_gpu,
    shifted,
    stored,
)
from sparse_cases import INT_MAX, INT_MIN, SparseCase, assert_sparse_correct, make_sparse_inputs
from test_mla_sparse import CASES as CPU_CASES

pytestmark = pytest.mark.gpu


HEADS = [
    SparseCase(
        kv_lens=(300, 190, 7, 65),
        topk=topk,
        num_heads=num_heads,
        page_size=page_size,
        lens=lens,
    )
    for num_heads in (16, 64, 128, 96, 8)
    for page_size, topk in ((1, 64), (16, 130), (64, 100), (128, 256), (24, 1))
    for lens in (False, True)
]
# Cut lists: pieces of a block or two, many states, pieces without keys, queues with several tiles.
CUT = [
    SparseCase(qo, kv, num_heads=num_heads, topk=2048, num_ctas=ctas, lens=lens, page_size=64)
    for qo, kv, num_heads in (
        ((1,), (4097,), 128),
        ((1, 3, 1), (4000, 200, 900), 16),
        ((2, 1), (2000, 70), 64),
        ((1,) * 5, (300, 0, 1, 2000, 640), 128),
    )
    for ctas in (1, 3, 40, 132)
    for lens in (False, True)
]
PROMPTS = [
    SparseCase((70, 90), (300, 90), num_heads=128, topk=200, sinks=True),
    SparseCase((300,), (500,), num_heads=16, topk=129, pair=True),
    SparseCase((130,), (2100,), num_heads=64, topk=2048, columns=2000, strided=True),
]
EIGHT_BITS = [
    dataclasses.replace(case, kv_dtype=kv_dtype, pair=False)
    for kv_dtype in ("float8_e4m3fn", "fp8_ds_mla")
    for case in (*HEADS[::3], *CUT[::3], *PROMPTS)
]
CASES = on_gpu((*CPU_CASES, *HEADS, *CUT, *PROMPTS, *EIGHT_BITS))


@pytest.mark.parametrize("case", [c for c in CASES if is_served(c)], ids=str)
def test_sparse(case, torch, seed):
    inputs = make_sparse_inputs(case, seed)
    assert_sparse_correct(case, inputs, *run_on_gpu(case, inputs, torch))


def test_most_cases_are_served():
    if not is_served(SparseCase()):
        pytest.skip("the GPU has no kernels for shared_kv")
    assert_most_are_served(CASES, 8)


@pytest.mark.parametrize("columns", [64, 100])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("ctas", [1, 4])
def test_lists_of_no_keys(columns, sinks, ctas, torch, seed):
    case = SparseCase((2, 1), (100, 90), topk=100, columns=columns, sinks=sinks, num_ctas=ctas)
    inputs = make_sparse_inputs(case, seed)
    inputs.lists[:] = np.random.default_rng(seed).choice([-1, INT_MIN, INT_MAX], inputs.lists.shape)
    inputs.seen = [np.zeros(0, int)] * 3
    o, lse = run_on_gpu(case, inputs, torch)
    assert np.all(o == 0)
    if sinks:
        assert np.allclose(lse, inputs.sinks)
    else:
        assert np.all(np.isneginf(lse))


@pytest.mark.parametrize("place", [0, 63, 64, 200, 639])
def test_a_single_key_and_a_repeated_one(place, torch, seed):
    """All entries but one name no key; and one key named 640 times weighs as much as once."""
    case = SparseCase((1, 1), (640, 640), topk=640, num_heads=128)
    inputs = make_sparse_inputs(case, seed)
    key = int(inputs.seen[0][0])
    inputs.lists[0] = -1
    inputs.lists[0, place] = key
    inputs.lists[1] = key
    inputs.seen = [np.array([key]), np.full(640, key)]
    o, lse = run_on_gpu(case, inputs, torch)
    assert_sparse_correct(case, inputs, o, lse)
    row = inputs.cache.reshape(-1, 576)[key, :512].astype(np.float32)
    assert np.allclose(o.astype(np.float32), row, rtol=0.01)


def test_entries_behind_the_planned_ones_are_ignored(torch, seed):
    """The CPU refuses them, if they name keys."""
    case = SparseCase((1, 2), (70, 3), topk=256)
    inputs = make_sparse_inputs(case, seed)
    nan_slots = np.flatnonzero(np.isnan(inputs.cache.reshape(-1, 576)[:, 0].astype(np.float32)))
    for token, planned in enumerate((70, 3, 3)):
        inputs.lists[token, planned:] = np.random.default_rng(seed).choice(nan_slots)
    for lens in (None, np.array([256, 300, INT_MAX], np.int32)):
        given = dataclasses.replace(inputs, lens=lens)
        assert_sparse_correct(case, given, *run_on_gpu(case, given, torch))


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn", "fp8_ds_mla"])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("page_size", [64, 16, 1])
def test_a_list_of_all_keys_is_dense_attention(num_heads, page_size, kv_dtype, torch, seed):
    """In the order of the keys: the same bits, whatever brings the keys."""
    torch.manual_seed(seed)
    lens = [700, 33]
    num_pages = 1000 // page_size
    keys = torch.randn((num_pages, page_size, 576), device=DEVICE)
    cache = stored(torch, keys, kv_dtype)
    q = torch.randn((2, num_heads, 576), device=DEVICE).bfloat16()
    pages = torch.randperm(num_pages, device=DEVICE).int()
    columns = -(-700 // page_size)
    table = torch.stack([pages[:columns], pages[-columns:]])
    key = torch.arange(1024, device=DEVICE)
    slots = table[:, (key // page_size).clamp_max(columns - 1)] * page_size + key % page_size
    lists = torch.where(key < torch.tensor(lens, device=DEVICE)[:, None], slots, -1).int()
    sizes = {"num_heads": num_heads, "page_size": page_size, "kv_dtype": kv_dtype}
    case = SparseCase((1, 1), tuple(lens), topk=1024, **sizes)
    sparse = fp.Attention(**options_of(case))
    dense = fp.Attention(**options_of(case) | {"topk": None})
    for attn in (sparse, dense):
        attn.plan([0, 1, 2], lens)
    wanted = dense.run(q, cache, block_table=table, return_lse=True)
    for x, y in zip(sparse.run(q, cache, topk_indices=lists, return_lse=True), wanted, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_same_inputs_give_the_same_bits(torch, seed):
    case = SparseCase((1, 2, 1), (4097, 700, 90), topk=2048, num_heads=128, num_ctas=40)
    inputs = make_sparse_inputs(case, seed)
    attn = fp.Attention(**options_of(case))
    first = run_on_gpu(case, inputs, torch, attn)
    for _ in range(20):
        for x, y in zip(run_on_gpu(case, inputs, torch, attn), first, strict=True):
            assert np.array_equal(bits(x), bits(y))


@pytest.mark.parametrize("has_tail", [False, True])
def test_tensors_of_any_alignment(has_tail, torch, seed):
    case = SparseCase((1, 2), (300, 90), topk=200)
    inputs = make_sparse_inputs(case, seed)
    attn = fp.Attention(**options_of(case))
    attn.plan([0, 1, 3], case.kv_lens)
    framework = TorchCuda(torch)

    q, cache = framework.tensor(inputs.q), framework.tensor(inputs.cache)
    given = shifted(torch, cache)
    if has_tail:
        given = (given[..., :512], shifted(torch, cache[..., 512:]))
    arguments = {name: framework.tensor(x) for name, x in inputs.arguments().items()}
    for x in (shifted(torch, q), q):
        o, lse = attn.run(x, given, **arguments, return_lse=True)
        assert_sparse_correct(case, inputs, framework.array(o)[:3], framework.array(lse)[:3])


def test_a_cache_of_more_than_two_to_the_31_elements(torch, seed):
    """Slots near its end, by addresses of 64 bits."""
    torch.manual_seed(seed)
    num_pages = 60_000
    if torch.cuda.mem_get_info()[0] < num_pages * 64 * 576 * 2 * 1.5:
        pytest.skip("the GPU has too little free memory")
    cache = torch.full((num_pages, 64, 576), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    keys = torch.randn((300, 576), device=DEVICE).bfloat16()
    slots = num_pages * 64 - 1 - torch.arange(300, device=DEVICE) * 3
    cache.view(-1, 576)[slots] = keys
    q = torch.randn((1, 16, 576), device=DEVICE).bfloat16()
    case = SparseCase((1,), (300,), topk=300, page_size=64)
    attn = fp.Attention(**options_of(case))
    attn.plan([0, 1], [300])
    o = attn.run(q, cache, topk_indices=slots.int()[None])
    weights = (q[0].float() @ keys.float().T * 192**-0.5).softmax(-1)
    assert (o[0].float() - weights @ keys[:, :512].float()).abs().max() < 0.02


@pytest.mark.parametrize("num_heads", [16, 128])
def test_replays_of_a_graph(num_heads, torch, seed):
    """With other lists and lengths of lists in each replay."""
    torch.manual_seed(seed)
    case = SparseCase((2,) * 8, (2048,) * 8, topk=512, num_heads=num_heads, page_size=64)
    lists = torch.zeros((16, 512), dtype=torch.int32, device=DEVICE)
    lens = torch.full((16,), 512, dtype=torch.int32, device=DEVICE)

    def change():
        lists.copy_(torch.randint(-1000, 6500, lists.shape))
        lens.copy_(torch.randint(-1, 700, lens.shape))

    check_replays(torch, case, seed, {"topk_indices": lists, "topk_lens": lens}, change)
