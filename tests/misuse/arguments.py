# SPDX-License-Identifier: Apache-2.0
"""Arguments that are no tensors: options, lists of lengths, numbers, streams, layouts."""

import contextlib

import numpy as np

import flashplan as fp
from misuse import note
from misuse.any_call import any_call
from misuse.calls import Run, pick
from misuse.finding import Finding, OfTheCaller, check_refusal, is_of_the_caller, kind


class Number:
    """Becomes a number by a method that does something else as well."""

    def __init__(self, value, before=None):
        self.value = value
        self.before = before

    def _give(self):
        if self.before is not None:
            self.before()
        return self.value

    __index__ = __int__ = __float__ = __bool__ = _give


def raising(error):
    def method(*_):
        raise error

    return method


class Hostile:
    """Every conversion raises."""

    def __init__(self, error):
        self.error = error

    def _raise(self, *_):
        raise self.error

    __index__ = __int__ = __float__ = __bool__ = __str__ = __repr__ = __eq__ = __len__ = _raise
    __iter__ = __hash__ = __getitem__ = _raise


class HostileAttributes(Hostile):
    def __getattr__(self, name):
        raise self.error


def any_object(rng):
    big = 2 ** int(rng.integers(0, 70))
    return pick(
        rng,
        None, True, False, 0, 1, -1, 2, 7, big, -big, big - 1, 2**31 - 1, -(2**31), 10**400,
        0.0, -0.0, 0.5, 1e-45, 1e-39, 1e38, 1e39, -1.0, float("nan"), float("inf"), -float("inf"),
        "", "1", "cpu", "cpu:0", "cpu:9", "cuda", "cuda:0", "cuda:-1", "cuda:9999999999", "cuda:²",
        "cuda:99999999999999999999", "cpu\0", "NHD", "HND", "bfloat16", "float32", "torch.float16",
        "int32", "\ud800", "x" * 500, b"cpu", b"", (), (8,), (8, 8), (8, 8, 8), [64, 64], [None, 1],
        {}, set(), object(), object, int, float, np.float32, np.int64(4), np.float64(0.5),
        np.bool_(1), np.array(4), np.array([4]), np.dtype("f4"), np.zeros((0,), np.int32),
        1 + 2j, range(3), Number(4), Number("4"), Number(2**40), Number(0.25),
        Hostile(OfTheCaller("mine")), HostileAttributes(OfTheCaller("mine")),
        Hostile(KeyboardInterrupt()), Hostile(TypeError("mine")), Ellipsis,
        NotImplemented, lambda: 0, iter([1, 2]), memoryview(b"1234"),
    )  # fmt: skip


def expect(names, make):
    """Calls `make`; a refusal must name one of `names`. Returns what was made, or None."""
    try:
        return make()
    except (Exception, KeyboardInterrupt) as error:
        if not is_of_the_caller(error):
            check_refusal(error, names)
    return None


OPTIONS = (
    "num_qo_heads", "num_kv_heads", "head_dim", "page_size", "q_dtype", "kv_dtype", "o_dtype",
    "causal", "window_left", "softmax_scale", "softcap", "variant", "kv_layout", "max_batch_size",
    "max_qo_tokens", "device", "workspace", "num_ctas", "batch_invariant",
)  # fmt: skip
# What a combination of several may be refused for instead.
ALSO = {
    "head_dim": ("head_dim_qk", "head_dim_vo"),
    "num_kv_heads": ("num_qo_heads",),
    "q_dtype": ("kv_dtype", "o_dtype"),
    "max_qo_tokens": ("workspace",),
    "max_batch_size": ("workspace",),
    "num_ctas": ("workspace",),
}


def few(rng, values):
    return {str(name) for name in rng.choice(values, int(rng.integers(1, 4)), replace=False)}


@kind("options", weight=3)
def options(rng):
    """Attention() and is_supported() with any objects as options."""
    given = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "q_dtype": "float32"}
    given |= {"device": "cpu", "max_batch_size": 4, "max_qo_tokens": 64}
    names = few(rng, OPTIONS)
    given |= {name: any_object(rng) for name in names}
    text = {name: type(given[name]).__name__ if isinstance(given[name], Hostile) else given[name]
            for name in names}  # fmt: skip
    note(f"Attention with {text!r:.300}")
    if "device" in names:
        names |= set(OPTIONS)  # a GPU has other limits
    names |= {other for name in names for other in ALSO.get(name, ())}
    attn = expect(names, lambda: fp.Attention(**given))
    given.pop("workspace", None)
    answer = expect(names, lambda: fp.is_supported(**given))
    if attn is None:
        return
    if answer is not None and not answer[0]:
        raise Finding(f"Attention() works, is_supported() says {answer}")
    expect({"qo_indptr", "kv_lens"}, lambda: attn.plan([0, 1, 3], [5, 4]))
    attn._plan.describe(), attn.workspace_bytes


def lengths(rng):
    """Valid (qo_indptr, kv_lens, kv_indptr) for bounds of 64 tokens and 4 requests, ragged."""
    size = int(rng.integers(0, 5))
    qo = np.concatenate([[0], np.cumsum(rng.integers(0, 16, size))]).astype(np.int32)
    kv = rng.integers(0, 100, size).astype(np.int32)
    begins = np.concatenate([[0], np.cumsum(kv + rng.integers(0, 3, size))]).astype(np.int32)
    return {"qo_indptr": qo, "kv_lens": kv, "kv_indptr": begins}


def planner():
    return fp.Attention(
        4, 2, 8, page_size=None, q_dtype="float32", device="cpu", max_batch_size=4,
        max_qo_tokens=64, num_ctas=3,
    )  # fmt: skip


@kind("lengths", weight=3)
def plan_lengths(rng):
    """plan() of lists, tuples and tensors with some entries replaced; a refused plan leaves the
    last one as it was."""
    attn, last = planner(), lengths(rng)
    attn.plan(**last)
    tiles = attn._plan.work_tiles
    given = {name: list(map(int, array)) for name, array in lengths(rng).items()}
    changed = []
    for _ in range(int(rng.integers(0, 3))):
        name = pick(rng, *given)
        values = given[name]
        if values:
            i = int(rng.integers(len(values)))
            values[i] = pick(rng, values[i], -1, 2**31 - 1, 2**31, -(2**31), 2**63, any_object(rng))
        elif rng.integers(2):
            values.append(0)
        changed.append(name)
    form = pick(rng, list, tuple, lambda x: np.array(x, np.int32), lambda x: np.array(x),
                lambda x: np.array(x, np.int32)[::-1].copy()[::-1],
                lambda x: np.repeat(np.array(x, np.int32), 2)[::2])  # fmt: skip
    plain = {name: tuple(values) for name, values in given.items()}
    try:
        given = {name: form(values) for name, values in given.items()}
    except (OverflowError, TypeError, ValueError, OfTheCaller, KeyboardInterrupt):
        return
    note(f"plan of {changed if changed else repr(plain)}")
    if expect({"qo_indptr", "kv_lens", "kv_indptr"}, lambda: attn.plan(**given)) is None:
        if attn._plan.work_tiles != tiles:
            raise Finding("a refused plan() changed the plan")
        if not changed and isinstance(next(iter(given.values())), list | tuple):
            raise Finding(f"valid lengths were refused: {plain}")
        return
    again = planner()
    same = {name: list(map(int, np.ravel(values))) for name, values in given.items()}
    again.plan(**{name: np.array(values, np.int32) for name, values in same.items()})
    if again._plan.work_tiles != attn._plan.work_tiles:
        raise Finding(f"lengths in another form give another plan: {plain}")


@kind("changing lengths", weight=2)
def changing_lengths(rng):
    """A list that its own items change while it is read, or whose items plan or run themselves."""
    attn = planner()
    right = lengths(rng)
    if len(right["kv_lens"]) == 0:
        return
    attn.plan(**right)
    given = {name: list(map(int, array)) for name, array in right.items()}
    name = pick(rng, *given)
    target = given[pick(rng, name, name, *given)]

    def plan_again():
        attn.plan(**lengths(rng))

    def fail():
        raise OfTheCaller("mine")

    act = pick(rng, target.clear, target.pop, lambda: target.extend([1] * 10000),
               lambda: target.__setitem__(slice(None), [object()] * len(target)),
               plan_again, fail)  # fmt: skip
    i = int(rng.integers(len(given[name])))
    given[name][i] = Number(given[name][i], act)
    note(f"{name}[{i}] changes a list while it is read")
    try:
        attn.plan(**given)
    except RuntimeError as error:
        if "one thread at a time" not in str(error) and not isinstance(error, OfTheCaller):
            raise
    except OfTheCaller:
        pass
    except Exception as error:
        check_refusal(error, set(given))
    attn.plan(**right)


@kind("numbers", weight=2)
def numbers(rng):
    """Scales, layouts, streams and dtypes of the calls."""
    call = any_call(rng)
    name = pick(rng, "stream", *call.numbers)
    value = any_object(rng)
    if name != "stream" and (value is not None or name in call.tensors):
        call.verify = lambda: None
    text = type(value).__name__ if isinstance(value, Hostile) else f"{value!r:.200}"
    note(f"{type(call).__name__}: {name} = {text}")
    before = call.snapshot()
    names = call.names(name)
    if name.endswith(("layout", "dtype")):  # another layout or dtype is that of other tensors
        names |= set(call.tensors)
    result = expect(names, lambda: (call.invoke(**{name: value}), 1))
    if result is None:
        call.assert_only_written(before, ())
    else:
        call.assert_only_written(before, call.written)
        call.verify()


@kind("missing arguments")
def missing(rng):
    call = any_call(rng)
    name = pick(rng, *(n for n in call.tensors if n not in call.optional))
    note(f"{type(call).__name__}: {name} is None")
    if name in ("out", "lse", "out_q", "num_accepted"):  # then new ones are returned
        call.invoke(**{name: None})
        return
    tables = ("block_table", "page_indptr", "page_indices")
    call.judge({name: None}, tables if name in tables else [name], must_refuse=True)


@kind("reentry", weight=2)
def reentry(rng):
    """An argument that uses the object while the call reads its arguments."""
    call = Run(rng, device_scales=None)
    other = {"qo_indptr": [0], "kv_lens": []}

    def act():
        with contextlib.suppress(ValueError, RuntimeError):
            pick(rng, lambda: call.attn.plan(**other), call.invoke)()
        call.attn.plan(*call.inputs.plan_args())

    name = pick(rng, "k_scale", "v_scale", "q", "out", "k")
    note(f"run(): {name} plans and runs itself")
    if name.endswith("scale"):
        changes = {name: Number(call.options[name], act)}
    else:
        array = call.array(name)
        changes = {name: Acting(array, act)}
    if rng.integers(2):
        changes |= {"out": None, "lse": None, "return_lse": True}
        before = call.snapshot()
        o, lse = call.invoke(**changes)
        call.assert_only_written(before, ("out", "lse"))
        rows = call.num_rows
        call.array("out")[:rows], call.array("lse")[:rows] = o, lse
        call.verify()
    else:
        call.judge(changes, [name])


class Acting:
    """Does something when it is exported, or asked for its shape or dtype."""

    def __init__(self, array, act):
        self.array, self.act = array, act

    def _then(self, value):
        self.act()
        return value

    shape = property(lambda self: self._then(self.array.shape))
    dtype = property(lambda self: self._then(self.array.dtype))
    __array_interface__ = property(lambda self: self._then(self.array.__array_interface__))

    def __dlpack__(self, **options):
        return self._then(self.array).__dlpack__(**options)

    def __dlpack_device__(self):
        return self._then(self.array).__dlpack_device__()
