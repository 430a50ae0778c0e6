# SPDX-License-Identifier: Apache-2.0
"""Tensors at the boundary: DLPack exports that are wrong or short-lived, __array_interface__."""

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
from misuse.capsules import CUDA, HANDLE, METAL, READ_ONLY, Exporter

BF16 = ml_dtypes.bfloat16


@pytest.fixture(params=["float32", "bfloat16"])
def attn(request):
    attn = fp.Attention(2, 1, 8, page_size=None, q_dtype=request.param, device="cpu")
    attn.plan([0, 3], [5])
    return attn


def tensors(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((3, 2, 8), (5, 1, 8), (5, 1, 8))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.fixture
def attn32():
    attn = fp.Attention(2, 1, 8, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 3], [5])
    return attn


def test_a_producer_without_changes(attn32):
    q, k, v = tensors()
    producers = [Exporter(x) for x in (q, k, v)]
    out = np.empty((3, 2, 8), np.float32)
    attn32.run(*producers, out=out)
    assert np.array_equal(out, attn32.run(q, k, v))
    assert [len(p.exports) for p in producers] == [1, 1, 1]
    assert [p.alive for p in producers] == [0, 0, 0]


def test_byte_offset(attn32):
    q, k, v = tensors()
    expected = attn32.run(q, k, v)
    wide = np.full(q.size + 5, np.nan, np.float32)
    wide[5:] = q.reshape(-1)
    rows = {"shape": q.shape, "strides": [16, 8, 1], "ndim": 3}
    moved = Exporter(wide, rows | {"byte_offset": 20})
    out = np.empty_like(expected)
    assert np.array_equal(attn32.run(moved, k, v, out=out), expected)
    target = np.full(out.size + 3, 7, np.float32)
    attn32.run(q, k, v, out=Exporter(target, rows | {"byte_offset": 12}))
    assert np.array_equal(target[3:].reshape(out.shape), expected)
    assert (target[:3] == 7).all()
    lens = Exporter(np.array([99, 0, 3], np.int32), {"shape": [2], "byte_offset": 4})
    assert fp.Attention(2, 1, 8, device="cpu").plan(lens, [5]).num_tokens == 3


# What is wrong, by the shape of a contiguous tensor.
WRONG = {
    "null shape": (TypeError, "got a null pointer", lambda shape: {"shape": None}),
    "null data": (ValueError, "a null pointer", lambda shape: {"data": None}),
    "no dimension": (ValueError, "got 0", lambda shape: {"ndim": 0}),
    "negative rank": (ValueError, "got -1", lambda shape: {"ndim": -1}),
    "high rank": (ValueError, "got 2147483647", lambda shape: {"ndim": 2**31 - 1}),
    "negative size": (ValueError, "-3", lambda shape: {"shape": [-3, *shape[1:]]}),
    "too many elements": (
        ValueError,
        "address space",
        lambda shape: {"shape": [2**62, *shape[1:]], "strides": None},
    ),
    "strides that wrap round": (
        ValueError,
        "address space",
        lambda shape: {"strides": [2**62, *strides(shape)[1:]]},
    ),
    "negative strides": (
        ValueError,
        "strides >= 0",
        lambda shape: {"strides": [-strides(shape)[0], *strides(shape)[1:]]},
    ),
    "misaligned": (ValueError, "aligned to 4 bytes", lambda shape: {"byte_offset": 2}),
    "lanes": (TypeError, "vectors", lambda shape: {"lanes": 4}),
    "no lanes": (TypeError, "vectors", lambda shape: {"lanes": 0}),
    "bits": (TypeError, "float31", lambda shape: {"bits": 31}),
    "unknown code": (TypeError, "another kind of float", lambda shape: {"code": 200}),
    "handles": (TypeError, "handle32", lambda shape: {"code": HANDLE}),
    "another maker's device": (
        TypeError,
        "got one on DLPack device 8",
        lambda shape: {"device_type": METAL},
    ),
    "another device": (
        TypeError,
        "got one on cuda:3",
        lambda shape: {"device_type": CUDA, "device_index": 3},
    ),
    "another DLPack": (TypeError, "another DLPack version", lambda shape: {"major": 2}),
    "no tensor": (TypeError, "expected a tensor", lambda shape: {"name": b"dlnothing"}),
}


def strides(shape):
    return [int(np.prod(shape[d + 1 :])) for d in range(len(shape))]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("argument", ["q", "k", "out", "lse"])
def test_wrong_exports_are_refused(attn32, wrong, argument):
    exception, text, change = WRONG[wrong]
    q, k, v = tensors()
    arrays = {"q": q, "k": k, "v": v}
    arrays |= {"out": np.zeros((3, 2, 8), np.float32), "lse": np.zeros((3, 2), np.float32)}
    producer = Exporter(arrays[argument], change(arrays[argument].shape))
    with pytest.raises(exception, match=rf"^{argument}: expected .*, got ") as caught:
        attn32.run(**arrays | {argument: producer})
    assert text in str(caught.value)
    assert producer.alive == (wrong == "no tensor")  # nobody but its capsule could delete it
    assert not arrays["out"].any()
    assert not arrays["lse"].any()


# A workspace may lie anywhere, and have any dtype.
@pytest.mark.parametrize("wrong", sorted({*WRONG} - {"misaligned", "lanes", "unknown code"}))
def test_wrong_exports_are_no_workspace(wrong):
    exception, _, change = WRONG[wrong]
    memory = np.zeros(1 << 20, np.float32)
    producer = Exporter(memory, change(memory.shape))
    exception = ValueError if wrong == "no lanes" else exception  # memory of no bytes
    with pytest.raises(exception, match="^workspace: expected .*, got "):
        fp.Attention(2, 1, 8, device="cpu", num_ctas=1, workspace=producer)
    assert producer.alive == (wrong == "no tensor")


def test_read_only_exports_are_not_written(attn32):
    q, k, v = tensors()
    out = np.zeros((3, 2, 8), np.float32)
    with pytest.raises(TypeError, match="^out: expected a writable tensor, got a read-only one"):
        attn32.run(q, k, v, out=Exporter(out, {"flags": READ_ONLY}))
    assert not out.any()
    attn32.run(Exporter(q, {"flags": READ_ONLY}), k, v, out=out)
    assert out.any()


@pytest.mark.parametrize("name", ["plan", "workspace"])
def test_null_data_of_integers_and_workspaces(name):
    producer = Exporter(np.ones(1 << 20, np.int32), {"data": None})
    attn = fp.Attention(2, 1, 8, device="cpu", max_batch_size=1 << 20)
    expected = ("kv_lens" if name == "plan" else "workspace") + ": expected a tensor with storage"
    with pytest.raises(ValueError, match=expected):
        if name == "plan":
            attn.plan(np.arange((1 << 20) + 1, dtype=np.int32), producer)
        else:
            fp.Attention(2, 1, 8, device="cpu", num_ctas=1, workspace=producer)


def test_fake_tensors_of_torch_are_no_lengths(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        lens = torch.ones(3, dtype=torch.int32)
    attn = fp.Attention(1, 1, 8, device="cpu")
    with pytest.raises((TypeError, ValueError), match="^kv_lens: expected a tensor"):
        attn.plan([0, 1, 2, 3], lens)


def test_exports_are_held_as_long_as_their_memory_is_used():
    """A workspace whose memory belongs to the export alone."""
    q, k, v = tensors()
    producer = Exporter(np.zeros(1 << 20, np.uint8), fresh=True)
    attn = fp.Attention(
        2, 1, 8, page_size=None, q_dtype="float32", device="cpu", num_ctas=2, workspace=producer
    )
    assert producer.alive == 1
    attn.plan([0, 3], [5])
    for _ in range(3):
        o = attn.run(q, k, v)
        assert producer.alive == 1
    plain = fp.Attention(2, 1, 8, page_size=None, q_dtype="float32", device="cpu", num_ctas=2)
    plain.plan([0, 3], [5])
    assert np.array_equal(o, plain.run(q, k, v))
    del attn
    assert producer.alive == 0


def test_strided_integers():
    """A column of a table, reversed lengths: the same plan as from a copy."""
    attn = fp.Attention(2, 1, 8, device="cpu")
    table = np.array([[0, 7], [3, 5], [9, 2], [11, -1]], np.int32)
    for qo_indptr, kv_lens in (
        (table[:, 0], table[:3, 1]),
        (table[:, 0], table[2::-1, 1]),
        (np.array([0, -1, 3, -1, 9, -1, 11], np.int32)[::2], table[:3, 1]),
    ):
        tiles = attn.plan(qo_indptr, kv_lens).work_tiles
        assert tiles == attn.plan(qo_indptr.copy(), kv_lens.copy()).work_tiles
        assert tiles != attn.plan([0, 3, 9, 11], [1, 1, 1]).work_tiles


class Interface:
    """An object of a bfloat16 dtype whose __array_interface__ is anything."""

    dtype = np.dtype(BF16)

    def __init__(self, array, **changes):
        self.array = array
        self.__array_interface__ = array.__array_interface__ | changes


INTERFACES = [
    {"shape": [3, 2, 8]},
    {"shape": None},
    {"shape": (3, "2", 8)},
    {"shape": (1,) * 5},
    {"shape": (3, 2, -8)},
    {"shape": (3, 2, 1 << 70)},
    {"shape": (1 << 40, 1 << 40, 8)},
    {"data": None},
    {"data": b"memory"},
    {"data": (None, False)},
    {"data": (0, False)},
    {"data": (1,)},
    {"data": (-1, False)},
    {"data": (1 << 70, False)},
    {"strides": [32, 16, 2]},
    {"strides": (2,)},
    {"strides": (32, 16, 2, 2)},
    {"strides": (32, 16, 3)},
    {"strides": (33, 16, 2)},
    {"strides": (1 << 70, 16, 2)},
    {"typestr": None},
    {"typestr": ">V2"},
    {"typestr": "<V4"},
    {"typestr": "<V"},
    {"typestr": ""},
]


@pytest.mark.parametrize("changes", INTERFACES, ids=str)
@pytest.mark.parametrize("use", ["q", "workspace"])
def test_wrong_array_interfaces_are_refused(changes, use):
    q, k, v = tensors(BF16)
    attn = fp.Attention(2, 1, 8, page_size=None, device="cpu")
    attn.plan([0, 3], [5])
    with pytest.raises((TypeError, ValueError), match=f"^{use}: expected .*, got "):
        if use == "q":
            attn.run(Interface(q, **changes), k, v)
        else:
            fp.Attention(2, 1, 8, device="cpu", workspace=Interface(q, **changes))


def test_array_interface_without_changes():
    q, k, v = tensors(BF16)
    attn = fp.Attention(2, 1, 8, page_size=None, device="cpu")
    attn.plan([0, 3], [5])
    expected = attn.run(q, k, v)
    out = np.empty_like(expected)
    attn.run(Interface(q), Interface(k), v, out=out)
    assert np.array_equal(out, expected)


def test_fields_of_structures_and_foreign_byte_orders(attn):
    """Of float32 by DLPack's own refusal, of bfloat16 by ours: the message is the same."""
    dtype = attn._o_dtype
    q, k, v = tensors(dtype)
    size = q.itemsize
    odd = np.zeros(q.shape, np.dtype([("pad", "u1"), ("x", dtype)]))["x"]
    with pytest.raises(ValueError, match=rf"^q: expected strides of whole elements \({size} bytes"):
        attn.run(odd, k, v)
    with pytest.raises(ValueError, match="^out: expected strides of whole elements"):
        attn.run(q, k, v, out=odd)
    swapped = q.astype(q.dtype.newbyteorder(">"))
    with pytest.raises(TypeError, match="^q: expected the byte order of this machine, got >"):
        attn.run(swapped, k, v)
    even = np.zeros(q.shape, np.dtype([("x", dtype), ("pad", dtype)]))["x"]
    with pytest.raises(ValueError, match="^q: expected a contiguous last dimension"):
        attn.run(even, k, v)


def test_read_only_arrays_of_ml_dtypes_are_not_written():
    q, k, v = tensors(BF16)
    attn = fp.Attention(2, 1, 8, page_size=None, device="cpu")
    attn.plan([0, 3], [5])
    out = np.zeros((3, 2, 8), BF16)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="^out: expected a writable tensor, got a read-only one"):
        attn.run(q, k, v, out=out)
    with pytest.raises(TypeError, match="^workspace: expected a writable tensor"):
        fp.Attention(2, 1, 8, device="cpu", workspace=out)
    assert not out.astype("f4").any()


@pytest.mark.parametrize("dtype", ["f8", "c16", "?", "i2", BF16, "u1"])
def test_a_workspace_of_any_numbers(dtype):
    q, k, v = tensors()
    memory = np.zeros((1 << 10, 1 << 10), dtype)
    attn = fp.Attention(
        2, 1, 8, page_size=None, q_dtype="float32", device="cpu", num_ctas=2, workspace=memory
    )
    attn.plan([0, 3], [5])
    attn.run(q, k, v)
    with pytest.raises(ValueError, match="^workspace: expected contiguous memory, got strides"):
        fp.Attention(2, 1, 8, device="cpu", workspace=memory.T)


@pytest.mark.parametrize("dtype", ["O", "M8[s]", [("a", "f4"), ("b", "f4")], "S8"])
def test_no_workspace_of_other_things(dtype):
    with pytest.raises(TypeError, match=r"^workspace: expected .*, got \w+"):
        fp.Attention(2, 1, 8, device="cpu", workspace=np.empty(1 << 19, dtype))


def test_why_an_object_is_not_exported(attn32):
    class Refuses:
        def __dlpack__(self, **_):
            raise BufferError("not today")

    q, k, v = tensors()
    with pytest.raises(TypeError, match=r"^q: expected a tensor .*, got .*Refuses.*\(not today\)"):
        attn32.run(Refuses(), k, v)


class Interrupted:
    """An array by __array_interface__; to ask for one of its attributes is interrupted."""

    def __init__(self, array, name):
        self._array, self._name = array, name

    def __getattr__(self, name):
        if name == self._name:
            raise KeyboardInterrupt
        if name not in ("__array_interface__", "dtype"):
            raise AttributeError(name)
        return getattr(self._array, name)


@pytest.mark.parametrize(
    "name", ["__dlpack__", "__dlpack_device__", "__array_interface__", "dtype"]
)
def test_exceptions_of_attributes_go_on(name):
    """A signal's handler may raise in the midst of any attribute that is Python code."""
    o, lse = np.ones((2, 1, 2, 8), BF16), np.zeros((2, 1, 2), np.float32)
    out, out_lse = np.zeros((1, 2, 8), BF16), np.zeros((1, 2), np.float32)
    with pytest.raises(KeyboardInterrupt):
        fp.merge_states(Interrupted(o, name), lse, out=out, lse=out_lse)


@pytest.mark.parametrize("name", ["__dlpack__", "__dlpack_device__"])
def test_attributes_that_are_no_methods(attn32, name):
    _, k, v = tensors()
    no_tensor = type("NoTensor", (), {name: 7})()
    with pytest.raises(TypeError, match="^q: expected a tensor .*, got .*NoTensor"):
        attn32.run(no_tensor, k, v, out=np.empty((3, 2, 8), np.float32))


def test_strides_of_a_stack_that_wrap_round():
    o, lse = np.ones((3, 1, 2, 8), np.float32), np.zeros((3, 1, 2), np.float32)
    far = [-(2**63), *strides(o.shape)[1:]]
    with pytest.raises(ValueError, match="^o_a: expected elements within the address space"):
        fp.merge_states(Exporter(o, {"strides": far}), lse)
    far = [2**62, *strides(lse.shape)[1:]]
    with pytest.raises(ValueError, match="^lse_a: expected elements within the address space"):
        fp.merge_states(o, Exporter(lse, {"strides": far}))


def test_strides_of_a_stack_without_elements_may_be_anything():
    o, lse = np.ones((3, 0, 2, 8), np.float32), np.zeros((3, 0, 2), np.float32)
    anything = {"strides": [-(2**63), 0, 0]}
    merged, _ = fp.merge_states(o, Exporter(lse, anything))  # overflows under a sanitizer, if used
    assert merged.shape == (0, 2, 8)


@pytest.mark.parametrize("index", [-1, 1000, 2**31 - 1])
def test_a_device_that_is_not_there(index):
    o, lse = np.ones((1, 2, 8), np.float32), np.zeros((1, 2), np.float32)
    elsewhere = Exporter(o, {"device_type": CUDA, "device_index": index})
    with pytest.raises(TypeError, match=f"^o_a: expected .*, got one on cuda:{index}$"):
        fp.merge_states(elsewhere, lse, o, lse, out=o.copy(), lse=lse.copy())
