# SPDX-License-Identifier: Apache-2.0
"""An Attention among Python's objects: copies, cycles, threads, and code that Python runs inside a
call."""

import bisect
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp


def make(workspace=None, kv_len=5, **options):
    options = {"page_size": None, "q_dtype": "float32", "device": "cpu"} | options
    attn = fp.Attention(2, 1, 8, workspace=workspace, **options)
    attn.plan([0, 3], [kv_len])
    return attn


def tensors(kv_len=5, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((3, 2, 8), (kv_len, 1, 8), (kv_len, 1, 8))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def run_child(code):
    code = "import gc, sys\nimport numpy as np\nimport flashplan as fp\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"FLASHPLAN_LEAK_WARNINGS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("part", [lambda attn: attn, lambda attn: attn.plan([0, 1], [1])])
def test_copies_are_refused(duplicate, part):
    attn = make()
    with pytest.raises(TypeError, match="(Attention|Plan): expected .*, got a request to copy"):
        duplicate(part(attn))
    attn.plan([0, 3], [5])
    assert attn.run(*tensors()).shape == (3, 2, 8)


def test_a_second_import_is_refused():
    out = run_child("""
q = np.ones((1, 1, 8), np.float32)
attn = fp.Attention(1, 1, 8, page_size=None, q_dtype="float32", device="cpu")
attn.plan([0, 1], [1])
for name in [name for name in sys.modules if name.startswith("flashplan")]:
    del sys.modules[name]
try:
    import flashplan
except ImportError as error:
    print(error)
assert (attn.run(q, q, q) == 1).all()
""")
    assert out == "flashplan: expected one import per process, got a second one"


class Memory(np.ndarray):
    """A workspace that can refer to its Attention."""


class Holder:
    """Exports memory that nothing else keeps alive, and can refer to its Attention."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack__(self, **options):
        return self.memory.__dlpack__(**options)


def torch_memory(memory):
    return pytest.importorskip("torch").from_numpy(memory)


@pytest.mark.parametrize("kind", [lambda memory: memory.view(Memory), Holder, torch_memory])
def test_cycles_through_a_workspace_are_collected(kind):
    gc.collect()
    gone = []
    for _ in range(3):
        memory = kind(np.zeros(1 << 20, np.uint8))
        memory.attn = make(memory, num_ctas=2)
        memory.attn.run(*tensors())
        gone.append(weakref.ref(memory.attn))
        del memory
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_types_of_the_user_are_not_kept():
    class Mine(np.ndarray):
        pass

    attn, (q, k, v) = make(), tensors()
    for _ in range(40):  # more than are remembered

        class Other(np.ndarray):
            pass

        attn.run(q.view(Other), k, v)
    attn.run(q.view(Mine), k.view(Mine), v)
    gone = [weakref.ref(Mine), weakref.ref(Other)]
    del Mine, Other
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert np.array_equal(attn.run(q, k, v), make().run(q, k, v))


def test_a_type_of_the_main_module_leaks_nothing():
    run_child("""
class Mine(np.ndarray):
    def method(self):
        return attn
attn = fp.Attention(1, 1, 8, page_size=None, q_dtype="float32", device="cpu")
attn.plan([0, 1], [1])
q = np.ones((1, 1, 8), np.float32).view(Mine)
attn.run(q, q, q)
""")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_exceptions_of_numbers_are_passed_on(error):
    class Number:
        def __index__(self):
            raise error("mine")

        def __float__(self):
            raise error("mine")

    attn, (q, k, v) = make(), tensors()
    for call in (
        lambda: attn.plan([0, 3], [Number()]),
        lambda: attn.plan([0, Number()], [5]),
        lambda: attn.run(q, k, v, k_scale=Number()),
        lambda: fp.Attention(Number(), 1, 8, device="cpu"),
    ):
        with pytest.raises(error, match="mine"):
            call()
    assert attn.run(q, k, v).shape == q.shape


def test_a_list_that_changes_is_read_once():
    """Entries are taken as they are when they are read; what is planned is what was checked."""

    class Grows:
        def __index__(self):
            lens.extend([1] * 1000)
            lens[2] = 7
            return 5

    lens = [Grows(), 1, 1]
    attn = make()
    plan = attn.plan([0, 1, 2, 3], lens)
    assert {tile[1] for tile in plan.work_tiles} == {0, 1, 2}
    assert max(tile[6] for tile in plan.work_tiles if tile[1] == 2) == 7


def test_an_attention_used_while_it_plans():
    """__index__ is Python code: it may call back."""
    attn, (q, k, v) = make(), tensors()
    plan = attn.plan([0, 3], [5])
    expected = attn.run(q, k, v)
    seen = []

    class Calls:
        def __index__(self):
            for call in (lambda: attn.plan([0, 1], [1]), plan.describe, lambda: plan.work_tiles):
                with pytest.raises(RuntimeError, match="^plan: expected one thread at a time"):
                    call()
            seen.append(self)
            return 5

    attn.plan([0, 3], [Calls()])
    assert len(seen) == 1
    assert np.array_equal(attn.run(q, k, v), expected)


def test_a_workspace_of_two_objects_is_used_by_one_at_a_time():
    """Whichever comes second is refused; results that were returned are right."""
    kv_len = 200_000
    q, k, v = tensors(kv_len)
    memory = np.zeros(1 << 22, np.uint8)
    options = {"kv_len": kv_len, "num_ctas": 4}
    first, second = (make(memory, **options) for _ in range(2))
    expected = make(**options).run(q, k, v)
    errors = []

    def work(attn, rounds):
        for _ in range(rounds):
            try:
                assert np.array_equal(attn.run(q, k, v), expected)
            except RuntimeError as error:
                errors.append(str(error))

    while not errors:
        worker = threading.Thread(target=work, args=(first, 10))
        worker.start()
        work(second, 10)
        worker.join()
    assert set(errors) == {"workspace: expected one run at a time in it, got a second one"}
    errors.clear()
    work(first, 3)
    work(second, 3)
    assert errors == []


def test_merge_states_releases_the_gil():
    o, lse = np.ones((1 << 16, 4, 64), np.float32), np.zeros((1 << 16, 4), np.float32)
    out, out_lse = np.empty_like(o), np.empty_like(lse)
    times = []

    def work():
        times.append(time.perf_counter())
        fp.merge_states(o, lse, o, lse, out=out, lse=out_lse)
        times.append(time.perf_counter())

    for _ in range(5):  # another program may have the processor
        times.clear()
        ticks = []
        worker = threading.Thread(target=work)
        worker.start()
        while worker.is_alive():
            ticks.append(time.perf_counter())
        begin, end = times
        quarter = (end - begin) / 4
        if any(begin + quarter < tick < end - quarter for tick in ticks):
            return
    pytest.fail("no other thread ran during merge_states()")


def test_run_returns_lse_beside_a_given_out():
    attn, (q, k, v) = make(), tensors()
    expected, expected_lse = attn.run(q, k, v, return_lse=True)
    out = np.empty_like(expected)
    o, lse = attn.run(q, k, v, out=out, return_lse=True)
    assert o is out
    assert np.array_equal(out, expected)
    assert np.array_equal(lse, expected_lse)


def test_bfloat16_without_ml_dtypes(monkeypatch):
    """Queries in uint16 memory: outputs are in memory of the same kind. Sinks are read from it."""
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in tensors())
    sinks = np.array([0.5, -1.0], ml_dtypes.bfloat16)
    attn = make(q_dtype="bfloat16")
    expected = attn.run(q, k, v, sinks=sinks).view(np.uint16)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    q, k, v, sinks = (x.view(np.uint16) for x in (q, k, v, sinks))
    o = attn.run(q, k, v, sinks=sinks)
    assert o.dtype == np.uint16
    assert np.array_equal(o, expected)


def test_what_alignment_skips_of_a_workspace_is_not_used():
    memory = np.zeros(1 << 20, np.uint8)
    aligned = memory[-memory.ctypes.data % 256 :]

    def takes(first, size):
        try:
            make(workspace=aligned[first : first + size])
        except ValueError:
            return False
        return True

    least = bisect.bisect_left(range(len(aligned)), True, key=lambda size: takes(0, size))
    assert 0 < least < len(aligned) - 512
    assert not takes(1, least + 254)
    assert takes(1, least + 255)


def test_a_workspace_larger_than_memory():
    out = run_child("""
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    fp.Attention(64, 1, 4096, device="cpu", num_ctas=4096)
except MemoryError as error:
    print(error)
""")
    assert out.startswith("workspace: expected ")
    assert out.endswith(" bytes of host memory, got none")


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_qo_heads": 0}, "num_qo_heads"),
        ({"softcap": -1.0}, "softcap"),
        ({"num_ctas": 1 << 20}, "num_ctas"),
    ],
)
def test_is_supported_raises_for_wrong_options(options, argument):
    options = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 8, "device": "cpu"} | options
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        fp.is_supported(**options)
    assert fp.is_supported(1, 1, 8, device="cpu", q_dtype="int32")[0] is False
