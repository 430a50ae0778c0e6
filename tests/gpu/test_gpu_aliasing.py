# SPDX-License-Identifier: Apache-2.0
"""Outputs on a GPU that share memory with other arguments, or whose own elements do: refused by
their pointers and strides alone, before anything is launched."""

import dataclasses

import numpy as np
import pytest

import flashplan as fp
from frameworks import TorchCuda
from gpu_cases import CASE, DEVICE, planned
from inputs import make_inputs
from solve import run_arguments

pytestmark = pytest.mark.gpu

TABLES = ("block_table", "page_indptr", "page_indices")


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(CASE, seed=0)


def arguments_of(case, inputs, torch):
    """Of a valid run(), outputs included."""
    args, kwargs = run_arguments(case, inputs, TorchCuda(torch, DEVICE))
    tensors = dict(zip("qkv", args, strict=True)) | kwargs
    tensors["out"] = torch.full_like(tensors["q"], float("nan"))
    tensors["lse"] = torch.full(tensors["q"].shape[:2], float("nan"), device=DEVICE)
    return tensors


@pytest.fixture
def arguments(inputs, torch):
    return arguments_of(CASE, inputs, torch)


def memory_of(owner, shape, dtype):
    """A contiguous tensor at the address of `owner`."""
    strides = [int(np.prod(shape[d + 1 :])) for d in range(len(shape))]
    view = owner.view(dtype)
    offset = view.storage_offset()
    return view.as_strided(tuple(shape), strides, offset)


def same_bits(a, b, torch):
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


def assert_refused(attn, arguments, output, other):
    outputs = [arguments[name] for name in ("out", "lse")]
    before = [x.clone() for x in outputs]
    expected = f"^({output}: expected memory apart from {other}"
    expected += f"|{other}: expected memory apart from {output}), got an overlap"
    with pytest.raises(ValueError, match=expected):
        attn.run(**arguments)
    for now, then in zip(outputs, before, strict=True):
        assert now.isnan().equal(then.isnan())


@pytest.mark.parametrize("output", ["out", "lse"])
@pytest.mark.parametrize("table", TABLES)
def test_tables_inside_outputs(output, table, inputs, arguments, torch):
    if table != "block_table":
        case = dataclasses.replace(CASE, csr=True)
        arguments = arguments_of(case, make_inputs(case, seed=0), torch)
    shape = arguments[table].shape
    # In front of the output, so that there is room for any table.
    memory = torch.zeros(1 << 20, dtype=torch.int32, device=DEVICE)
    memory[: shape.numel()] = arguments[table].reshape(-1)
    arguments[table] = memory[: shape.numel()].view(shape)
    arguments[output] = memory_of(memory, arguments[output].shape, arguments[output].dtype)
    assert_refused(planned(inputs), arguments, output, table)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("output", ["out", "lse"])
def test_outputs_over_inputs(output, name, inputs, arguments):
    old = arguments[output]
    arguments[output] = memory_of(arguments[name], old.shape, old.dtype)
    assert_refused(planned(inputs), arguments, output, name)


def test_outputs_over_each_other_and_over_the_workspace(inputs, arguments, torch):
    lse = arguments["lse"]
    arguments["lse"] = memory_of(arguments["out"], lse.shape, lse.dtype)
    assert_refused(planned(inputs), arguments, "out", "lse")
    arguments["lse"] = lse
    memory = torch.zeros(planned(inputs).workspace_bytes + 256, dtype=torch.uint8, device=DEVICE)
    attn = planned(inputs, workspace=memory)
    begin = -memory.data_ptr() % 256
    out = arguments["out"]
    arguments["out"] = memory_of(memory[begin:], out.shape, out.dtype)
    assert_refused(attn, arguments, "out", "workspace")


@pytest.mark.parametrize("output", ["out", "lse"])
def test_outputs_whose_elements_share_memory(output, inputs, arguments, torch):
    shape = arguments[output].shape
    memory = torch.zeros(shape.numel(), dtype=arguments[output].dtype, device=DEVICE)
    for step in (0, shape[-1] // 2):
        strides = [step] * (len(shape) - 1) + [1]
        with pytest.raises(ValueError, match=f"^{output}: expected memory of its own"):
            planned(inputs).run(**arguments | {output: memory.as_strided(shape, strides)})
    assert not memory.any()


def test_halves_of_one_tensor_are_apart(inputs, arguments, torch):
    """q and out beside each other in the rows of one tensor."""
    attn = planned(inputs)
    expected = attn.run(**arguments).clone()
    q = arguments["q"]
    both = torch.cat([q, torch.full_like(q, float("nan"))], dim=1)
    arguments |= {"q": both[:, : q.shape[1]], "out": both[:, q.shape[1] :]}
    assert same_bits(attn.run(**arguments), expected, torch)
    assert same_bits(both[:, : q.shape[1]], q, torch)


def append_arguments(torch):
    cache = torch.zeros((4, 2, 16, 2, 64), device=DEVICE)
    rows = torch.ones((3, 2, 64), device=DEVICE)
    integers = {"indptr": [0, 2, 3], "kv_lens": [9, 6], "block_table": [[0], [1]]}
    return {"k": rows, "v": rows + 1, "k_cache": cache[:, 0], "v_cache": cache[:, 1]} | {
        name: torch.tensor(x, dtype=torch.int32, device=DEVICE) for name, x in integers.items()
    }


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", ["k", "v", "indptr", "kv_lens", "block_table"])
def test_append_into_its_own_arguments(cache, name, torch):
    arguments = append_arguments(torch)
    fp.append_paged_kv(**arguments)  # into the halves of one cache
    assert (arguments["k_cache"][0, 8] == 1).all()
    assert (arguments["v_cache"][0, 8] == 2).all()
    old = arguments[name]
    arguments[name] = memory_of(arguments[cache], old.shape, old.dtype)
    before = arguments[cache].clone()
    with pytest.raises(ValueError, match=f"^{cache}: expected memory apart from {name}"):
        fp.append_paged_kv(**arguments)
    assert arguments[cache].equal(before)


def test_append_into_one_cache_twice(torch):
    arguments = append_arguments(torch)
    cache = arguments["k_cache"]
    with pytest.raises(ValueError, match="^k_cache: expected memory apart from v_cache"):
        fp.append_paged_kv(**arguments | {"v_cache": cache})
    with pytest.raises(ValueError, match="^k_cache: expected memory of its own"):
        shared = cache.as_strided(cache.shape, (0, *cache.stride()[1:]))
        fp.append_paged_kv(**arguments | {"k_cache": shared})
    assert not cache.any()


@pytest.mark.parametrize("written", ["k_cache", "v_cache", "out_q"])
@pytest.mark.parametrize("name", ["q", "k", "v", "indptr", "kv_lens", "block_table"])
def test_rope_append_into_its_own_arguments(written, name, torch):
    arguments = append_arguments(torch) | {"rope": fp.Rope(), "q": torch.ones(3, 4, 64).to(DEVICE)}
    arguments["out_q"] = torch.zeros(5, 4, 64, device=DEVICE)[:3]
    fp.rope_append_paged_kv(**arguments)
    old = arguments[name]
    begin = arguments[written]
    if (written, name) == ("out_q", "q"):
        begin = begin[1:]
    arguments[name] = memory_of(begin, old.shape, old.dtype)
    before = arguments[written].clone()
    with pytest.raises(ValueError, match=f"^{written}: expected memory apart from {name}"):
        fp.rope_append_paged_kv(**arguments)
    assert arguments[written].equal(before)


def test_merge_into_a_part_of_its_states(torch):
    memory = torch.ones((6, 4, 64), device=DEVICE)
    o, lse = memory[:4], torch.zeros((4, 4), device=DEVICE)
    for out, out_lse, name in (
        (memory[2:], lse.clone(), "out"),
        (o.transpose(0, 1), lse.clone(), "out"),
        (torch.empty_like(o), memory_of(o, lse.shape, lse.dtype), "lse"),
        (torch.empty_like(o).as_strided(o.shape, (64, 64, 1)), lse.clone(), "out"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected memory "):
            fp.merge_states(o, lse, o + 0, lse + 0, out=out, lse=out_lse)
    assert (memory == 1).all()
