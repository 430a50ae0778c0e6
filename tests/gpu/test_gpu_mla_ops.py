# SPDX-License-Identifier: Apache-2.0
"""append_mla and gather_mla on the GPU: the cases of the CPU."""

import numpy as np
import pytest

import flashplan as fp
from frameworks import bits
from inputs import INT_MAX
from mla_op_cases import (
    CASES,
    DS_MLA,
    OpCase,
    append_options,
    assert_rows,
    expected_rows,
    make_op_inputs,
    new_keys,
    stored_rows,
)
from test_mla_ops import GATHERS, filled

pytestmark = pytest.mark.gpu


def on_gpu(cuda, cache):
    tensors = [cuda.tensor(part) for part in cache]
    return tensors, tensors[0] if len(tensors) == 1 else tuple(tensors)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_append(cuda, case, seed):
    inputs = make_op_inputs(case, seed)
    before = stored_rows(case, inputs.cache).copy()
    tensors, cache = on_gpu(cuda, inputs.cache)
    k_pe = None if inputs.k_pe is None else cuda.tensor(inputs.k_pe)
    q_pe = None if inputs.q_pe is None else cuda.tensor(inputs.q_pe)
    outside = inputs.num_pages * case.page_size
    slots = np.where(inputs.slots < 0, [-1, outside, 1 << 40, -5][seed % 4], inputs.slots)
    options = append_options(case, inputs, cuda.tensor) | {"slot_mapping": cuda.tensor(slots)}
    fp.append_mla(cuda.tensor(inputs.kv_c), k_pe, cache, **options, q_pe=q_pe)
    latent, tail, wanted_q = new_keys(case, inputs)
    wanted = expected_rows(case, latent, tail)
    rows = stored_rows(case, [cuda.array(part) for part in tensors])
    used = inputs.slots >= 0
    assert_rows(case, rows[inputs.slots[used]], wanted[used])
    others = np.setdiff1d(np.arange(len(rows)), inputs.slots)
    assert np.array_equal(bits(rows[others]), bits(before[others])), "rows beside the slots"
    if q_pe is not None:
        rotated = cuda.array(q_pe)
        error = np.abs(rotated[: case.tokens].astype(float) - wanted_q.astype(float))
        step = {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}[case.dtype]
        assert np.all(error <= step * np.abs(wanted_q.astype(float)) + 1e-5)
        assert np.array_equal(bits(rotated[case.tokens :]), bits(inputs.q_pe[case.tokens :]))


@pytest.mark.parametrize(("case", "out_dtype", "apart"), GATHERS, ids=str)
def test_gather_has_the_bits_of_the_cpu(cuda, case, out_dtype, apart, seed):
    cache, _ = filled(case, seed)
    size = case.page_size
    rng = np.random.default_rng(seed)
    table = np.stack([rng.permutation(9)[:4] for _ in range(3)]).astype(np.int32)
    indptr = np.array([2, 2 + 2 * size, 2 + 2 * size, 4 + 3 * size], np.int32)
    starts = np.array([size // 2, 0, 1], np.int32)
    shapes = [(indptr[-1] + 3, d) for d in (case.dims if apart else (sum(case.dims),))]
    given = [np.full(shape, 7, out_dtype) for shape in shapes]
    on_device = [cuda.tensor(out) for out in given]
    host = cache[0] if len(cache) == 1 else tuple(cache)
    fp.gather_mla(
        host,
        table,
        indptr,
        starts=starts,
        out=tuple(given) if apart else given[0],
        scale=case.scale,
    )
    fp.gather_mla(
        on_gpu(cuda, cache)[1],
        cuda.tensor(table),
        cuda.tensor(indptr),
        starts=cuda.tensor(starts),
        out=tuple(on_device) if apart else on_device[0],
        scale=case.scale,
    )
    for actual, wanted in zip(on_device, given, strict=True):
        assert np.array_equal(bits(cuda.array(actual)), bits(wanted))


@pytest.mark.parametrize("kv_dtype", [None, DS_MLA])
def test_pages_outside_of_the_cache_give_zeros(cuda, kv_dtype, seed):
    case = OpCase(kv_dtype=kv_dtype)
    cache, _ = filled(case, seed)
    table = np.array([[1, -1], [9, INT_MAX], [2, 3]], np.int32)
    indptr, starts = np.array([0, 20, 40, 60], np.int32), np.array([0, 0, 20], np.int32)
    out = cuda.tensor(np.full((64, 576), 7, "bfloat16"))
    index = [cuda.tensor(x) for x in (table, indptr, starts)]
    fp.gather_mla(cuda.tensor(cache[0]), *index[:2], starts=index[2], out=out)
    actual = cuda.array(out).astype(np.float32)
    wanted = fp.gather_mla(cache[0], table[:1, :1].copy(), np.array([0, 16], np.int32))
    assert np.array_equal(actual[:16], wanted.astype(np.float32))
    assert not actual[16:40].any(), "pages that do not exist"
    assert actual[40:52].any(axis=1).all() and not actual[52:60].any(), "behind the table"
    assert np.all(actual[60:] == 7)


def test_graphs_follow_slots_and_lengths(cuda, torch, seed):
    case = OpCase(norm="float32", rope="interleaved", num_heads=2)
    inputs = make_op_inputs(case, seed)
    tensors, cache = on_gpu(cuda, inputs.cache)
    options = append_options(case, inputs, cuda.tensor)
    kv_c, k_pe = cuda.tensor(inputs.kv_c), cuda.tensor(inputs.k_pe)
    slots = options["slot_mapping"]
    slots.fill_(-1)
    table, indptr = cuda.tensor(np.array([[1, 0]], np.int32)), cuda.tensor(np.zeros(2, np.int32))
    out = torch.zeros(32, 576, dtype=torch.bfloat16, device=cuda.device)

    def step():
        fp.append_mla(kv_c, k_pe, cache, **options)
        fp.gather_mla(cache, table, indptr, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    assert not out.any()
    slots.copy_(torch.arange(len(slots), device=cuda.device))
    indptr.copy_(torch.tensor([0, 32], device=cuda.device))
    graph.replay()
    wanted = torch.cat([tensors[0][1], tensors[0][0]]).reshape(32, 576)
    assert torch.equal(out.view(torch.int16), wanted.view(torch.int16))
