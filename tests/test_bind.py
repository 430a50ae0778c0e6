# SPDX-License-Identifier: Apache-2.0
"""bind(): calls do what run() does, on tensors that are kept, for whatever is planned."""

import copy
import gc
import pickle
import re
import weakref

import numpy as np
import pytest

import flashplan as fp
import frameworks
from bad_runs import RUN
from case import Case
from cases import CASES
from frameworks import Jax, NumPy, bits
from inputs import make_inputs
from misuse.capsules import Exporter
from scene import Scene
from solve import Runner, run_arguments

OF_VARIANTS = [case for case in CASES if case.variant]
SOME_CASES = [case for case in CASES if not case.variant][::19] + OF_VARIANTS[:1]
PAGED = Case((3, 1, 0), (9, 60, 5), head_dim=8, page_size=4, q_dtype="float32")


def bind_and_call(attn, *args, stream=None, **kwargs):
    return attn.bind(*args, **kwargs)(stream)


@pytest.mark.parametrize("framework", ["numpy", "torch"], indirect=True)
@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_results_are_those_of_run(case, framework, seed, monkeypatch):
    inputs = make_inputs(case, seed)
    runner = Runner(case)
    expected = runner.run(inputs, framework)
    monkeypatch.setattr(fp.Attention, "run", bind_and_call)
    result = runner.run(inputs, framework)
    for actual, wanted in zip(result, expected, strict=True):
        assert np.array_equal(bits(actual), bits(wanted))


@pytest.mark.parametrize("bad", RUN, ids=lambda bad: bad[0].replace(" ", "_"))
def test_mistakes_are_refused_as_by_run(bad, monkeypatch):
    _, exception, argument, call = bad
    scene = Scene()
    with monkeypatch.context() as patch:
        patch.setattr(fp.Attention, "run", bind_and_call)
        with pytest.raises(exception) as caught:
            call(scene)
    assert re.match(rf"{argument}(?!\w).*: expected .+, got .+", str(caught.value))
    scene.assert_unharmed()


def planned(case=PAGED, seed=0):
    """(Attention, inputs, [q, k, v], other arguments), planned."""
    inputs = make_inputs(case, seed)
    attn = fp.Attention(**case.options() | {"max_batch_size": 8, "max_qo_tokens": 99})
    attn.plan(*inputs.plan_args())
    return attn, inputs, *run_arguments(case, inputs, NumPy())


def test_outputs_are_those_of_bind_at_each_call():
    attn, _, args, kwargs = planned()
    call = attn.bind(*args, **kwargs, return_lse=True)
    o, lse = call()
    expected, expected_lse = attn.run(*args, **kwargs, return_lse=True)
    rows = len(expected)
    assert len(o) == len(args[0]) > rows  # as many as q: what is planned later may have more
    assert np.array_equal(o[:rows], expected)
    assert np.array_equal(lse[:rows], expected_lse)
    assert call()[0] is o and call()[1] is lse
    assert repr(call) == f"<BoundRun of {attn.plan(*planned()[1].plan_args())!r}>"
    out = np.empty_like(o)
    assert attn.bind(*args, **kwargs, out=out)() is out


def test_values_may_change_between_calls(rng):
    attn, inputs, [q, k, v], kwargs = planned()
    call = attn.bind(q, k, v, **kwargs)
    call()
    q[...] = rng.standard_normal(q.shape)
    v *= 2
    inputs.block_table[:2] = np.roll(inputs.block_table[:2, :2], 1)[0, 0]
    assert np.array_equal(call()[:4], attn.run(q, k, v, **kwargs))
    inputs.block_table[1, 3] = -1  # contents are checked at each call
    with pytest.raises(ValueError, match=r"^block_table\[1, 3\]: expected a page in .*, got -1"):
        call()


def test_each_call_runs_the_current_plan():
    attn, _, args, kwargs = planned()
    fresh = fp.Attention(**attn.options)
    call = fresh.bind(*args, **kwargs)
    with pytest.raises(RuntimeError, match="^run: expected plan"):
        call()
    for lens in (([0, 3, 4], [9, 60]), ([0, 1, 2], [2, 3]), ([0], []), ([0, 4], [9])):
        for each in (attn, fresh):
            each.plan(*lens)
        expected = attn.run(*args, **kwargs)
        assert np.array_equal(call()[: len(expected)], expected)


def test_tensors_must_be_large_enough_for_the_current_plan():
    attn, inputs, args, kwargs = planned()
    rows = len(args[0])
    call = attn.bind(*args, **kwargs)
    before = call()[:4].copy()
    columns = inputs.block_table.shape[1]
    for lens, message in (
        (([0, rows + 1], [90]), rf"^q: expected shape \(>={rows + 1}, "),
        (([0] * 9, [0] * 8), r"^block_table: expected shape \(>=8, "),
        (([0, 1], [4 * columns + 1]), "^block_table: expected >= .* columns for kv_lens"),
    ):
        attn.plan(*lens)
        with pytest.raises(ValueError, match=message):
            call()
    attn.plan(*inputs.plan_args())
    assert np.array_equal(call()[:4], before)


def test_tensors_are_released_while_an_exception_is_set():
    """What releases them may be Python code."""
    attn = fp.Attention(2, 1, 8, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 3], [5])
    q, kv = np.zeros((3, 2, 8), np.float32), np.zeros((4, 1, 8), np.float32)
    exporter = Exporter(kv)
    with pytest.raises(ValueError, match="^k: expected shape"):
        attn.bind(q, exporter, kv)()
    assert [export.releases for export in exporter.exports] == [1]


def test_the_plan_and_all_tensors_are_kept():
    case = Case((3,), (40,), head_dim=8, page_size=4, q_dtype="float32", sinks=True)
    attn, inputs, args, kwargs = planned(case)
    expected = attn.run(*args, **kwargs)

    class Kept(np.ndarray):
        """Memory of its own, which is overwritten when it is freed."""

        def __del__(self):
            if self.base is None:
                self.view(np.ndarray)[...] = 0

    def kept(array):
        copy = np.ndarray.__new__(Kept, array.shape, array.dtype)
        copy[...] = array
        return copy

    q, k, v, table, sinks = map(kept, (*args, kwargs["block_table"], kwargs["sinks"]))
    refs = [weakref.ref(x) for x in (q, k, v, table, sinks)]
    others = {"k_scale": kwargs["k_scale"], "v_scale": kwargs["v_scale"]}
    call = attn.bind(q, k, v, block_table=table, sinks=sinks, **others)
    del attn, q, k, v, table, sinks
    gc.collect()
    assert np.array_equal(call()[: len(expected)], expected)
    assert all(ref() is not None for ref in refs)
    del call
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5


def test_memory_is_that_of_bind(torch):
    """Though a tensor of torch can be given other memory."""
    attn, _, _, kwargs = planned()
    args, kwargs = run_arguments(PAGED, make_inputs(PAGED, 0), frameworks.Torch(torch))
    expected = attn.run(*args, **kwargs)
    args = [x.clone() for x in args]
    call = attn.bind(*args, **kwargs)
    for x in args:
        x.data = torch.full_like(x, float("nan"))
        x.set_()
    for _ in range(100):  # memory that was freed would be taken for these
        torch.full((PAGED.page_size, 64), float("nan"))
    assert torch.equal(call()[: len(expected)], expected)


def test_cycles_are_collected():
    class Memory(np.ndarray):
        """A workspace that can refer to a call."""

    workspace = np.zeros(1 << 20, np.uint8).view(Memory)
    attn = fp.Attention(**PAGED.options() | {"num_ctas": 2}, workspace=workspace)
    _, _, args, kwargs = planned()
    workspace.call = attn.bind(*args, **kwargs)
    gone = weakref.ref(workspace)
    del attn, workspace
    gc.collect()
    assert gone() is None


class Memory(np.ndarray):
    """An array that can refer to a call."""


@pytest.mark.parametrize("argument", ["q", "k", "out", "lse", "block_table"])
def test_cycles_through_an_argument_are_collected(argument):
    attn = fp.Attention(4, 2, 8, page_size=4, q_dtype="float32", device="cpu", num_ctas=2)
    attn.plan([0, 1], [3])
    arguments = {
        "q": np.ones((1, 4, 8), np.float32),
        "k": np.ones((1, 4, 2, 8), np.float32),
        "v": np.ones((1, 4, 2, 8), np.float32),
        "block_table": np.zeros((1, 1), np.int32),
        "out": np.zeros((1, 4, 8), np.float32),
        "lse": np.zeros((1, 4), np.float32),
    }
    memory = Memory(arguments[argument].shape, arguments[argument].dtype)
    memory[...] = arguments[argument]
    call = attn.bind(**arguments | {argument: memory})
    arguments[argument] = None  # of this array the call alone knows
    del attn
    gc.collect()
    assert (call() == 1).all()
    memory.call = call
    gone = weakref.ref(memory)
    del call, memory
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(duplicate):
    attn, _, args, kwargs = planned()
    call = attn.bind(*args, **kwargs)
    with pytest.raises(TypeError, match="BoundRun: expected .*, got a request to copy"):
        duplicate(call)
    assert call().shape == args[0].shape


def test_arguments_are_those_of_run():
    attn, _, args, kwargs = planned()
    with pytest.raises(
        TypeError, match=r"^window: expected an argument of run\(\), got an unknown name$"
    ):
        attn.bind(*args, **kwargs, window=3)
    with pytest.raises(TypeError, match="stream"):
        attn.bind(*args, **kwargs, stream=None)
    call = attn.bind(*args, **kwargs)
    with pytest.raises(ValueError, match="^stream: expected None on the cpu, got 5"):
        call(5)
    with pytest.raises(ValueError, match="^stream: expected None on the cpu, got 5"):
        call(stream=5)


def test_tensors_that_require_gradients_are_refused(torch):
    attn, _, _, _ = planned()
    args, kwargs = run_arguments(PAGED, make_inputs(PAGED, 0), frameworks.Torch(torch))
    for i, name in enumerate("qkv"):
        bad = [x.clone().requires_grad_(i == j) for j, x in enumerate(args)]
        with pytest.raises(ValueError, match=rf"^{name}: .*inference.*no_grad.*detach"):
            attn.bind(*bad, **kwargs)
        with torch.no_grad():
            assert not attn.bind(*bad, **kwargs)().requires_grad


def test_jax_arrays_are_inputs_alone(jax):
    attn, inputs, _, _ = planned()
    args, kwargs = run_arguments(PAGED, inputs, Jax(jax))
    expected = np.asarray(attn.run(*args, **kwargs))
    for name, others in (("out", {}), ("lse", {"out": inputs.q.copy(), "return_lse": True})):
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor of another framework"):
            attn.bind(*args, **kwargs, **others)
    out = np.empty_like(inputs.q)
    call = attn.bind(*args, **kwargs, out=out)
    del args, kwargs
    gc.collect()
    assert np.array_equal(call()[: len(expected)], expected)
