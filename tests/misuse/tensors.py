# SPDX-License-Identifier: Apache-2.0
"""Tensor arguments with one thing wrong: DLPack capsules, array interfaces, objects."""

import gc

import numpy as np

import flashplan as fp
from misuse import note
from misuse.any_call import any_call
from misuse.calls import Merge, MergeStack, Run, pick
from misuse.capsules import NAMED_CODES, READ_ONLY, Export, Exporter, dtype_fields
from misuse.finding import Finding, OfTheCaller, Skip, kind

HUGE = (2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, -1, -(2**31), -(2**63))


def any_argument(rng, call):
    return pick(rng, *(name for name in call.tensors if name != "workspace"))


# --- capsules: each returns (fields, whether it must be refused) ---------------------------------


def wrong_data(rng, array, written):
    if array.size == 0:
        return {"data": None}, False
    if array.itemsize > 1 and rng.integers(2):
        return {"data": array.ctypes.data + 1}, True
    return {"data": None}, True


def wrong_offset(rng, array, written):
    offset = pick(rng, 4, 8, 4096, 2**40, 2**63, 2**64 - 8)
    if array.itemsize > 1 and array.size and rng.integers(3) == 0:
        return {"byte_offset": 1}, True
    return {"data": (array.ctypes.data - offset) % 2**64, "byte_offset": offset}, False


def wrong_device(rng, array, written):
    kinds = pick(rng, 0, 2, 4, 7, 10, 13, 14, 20, -1, 2**31 - 1, -(2**31))
    return {"device_type": kinds, "device_index": pick(rng, 0, 1, -1, 2**31 - 1)}, True


def harmless_device(rng, array, written):
    return {"device_type": pick(rng, 1, 3), "device_index": pick(rng, 0, 1, -1, 2**31 - 1)}, False


def wrong_ndim(rng, array, written):
    ndim = pick(rng, 0, -1, 5, 64, 2**31 - 1, -(2**31), array.ndim - 1)
    if ndim == 0 and array.ndim == 1 and array.dtype == np.float32:
        raise Skip  # one scale for all heads
    return {"ndim": ndim}, True


def wrong_dtype(rng, array, written):
    code, bits, lanes = (int(rng.integers(16)), pick(rng, 0, 1, 4, 8, 16, 32, 64, 255), 1)
    if rng.integers(3) == 0:
        return {"lanes": pick(rng, 0, 2, 4, 65535)}, True
    if rng.integers(3) == 0:
        return {"bits": pick(rng, 0, 1, 4, 64, 128, 255)}, True
    if code == 1 and bits == 8 * array.itemsize:
        raise Skip  # uint8 and uint16 stand for other dtypes
    fields = {"code": code, "bits": bits, "lanes": lanes}
    if fields == dtype_fields(array.dtype):
        raise Skip
    return fields, True


def wrong_shape(rng, array, written):
    shape = list(array.shape)
    d = int(rng.integers(len(shape)))
    shape[d] = pick(rng, *HUGE, shape[d] + 1, shape[d] - 1, 0)
    if array.ndim == 1 and array.dtype == np.float32 and 1 in (array.size, shape[0]):
        raise Skip  # one scale for all heads, or one for each
    if array.ndim == 1 and array.dtype == np.int64 and shape[0] >= 0:
        raise Skip  # there may be fewer slots than tokens, so another number of slots is no mistake
    if shape[d] >= array.shape[d] or 0 in array.shape:
        # More rows or pages than there are cannot be told from the truth, and need not be read.
        strides = [s // array.itemsize for s in array.strides]
        if 0 in array.shape and 0 not in shape:
            raise Skip
        return {"shape": shape, "strides": strides}, False
    return {"shape": shape}, shape[d] < 0


def no_shape(rng, array, written):
    return {"shape": None}, True


def wrong_strides(rng, array, written):
    strides = [s // array.itemsize for s in array.strides]
    d = int(rng.integers(len(strides)))
    if array.shape[d] < 2 or array.size == 0:  # then its stride does not matter
        strides[d] = pick(rng, *HUGE, 0)
        return {"strides": strides}, False
    strides[d] = pick(rng, -1, -strides[d], 2**63 - 1, -(2**63), 2**63 // array.itemsize)
    return {"strides": strides}, True


def no_strides(rng, array, written):
    if not array.flags.c_contiguous:
        raise Skip
    return {"strides": None}, False


def overlapping_strides(rng, array, written):
    """Some elements share memory, all within the tensor's own."""
    strides = [s // array.itemsize for s in array.strides]
    wide = [d for d in range(len(strides) - 1) if array.shape[d] > 1]
    if not wide or array.size == 0:
        raise Skip
    d = pick(rng, *wide)
    inner = array.shape[-1]
    strides[d] = int(rng.integers(0, inner))
    if not written:
        raise Skip  # the result is that of other values
    offsets = sum(np.ix_(*(np.arange(n) * s for n, s in zip(array.shape, strides))))
    if len(np.unique(offsets)) == array.size:
        raise Skip
    return {"strides": strides}, True


def wrong_flags(rng, array, written):
    return {"flags": pick(rng, 2, 4, 2**40, 2**63)}, False


def read_only(rng, array, written):
    return {"flags": READ_ONLY}, written


def wrong_version(rng, array, written):
    if rng.integers(2):
        return {"minor": pick(rng, 0, 3, 2**32 - 1)}, False
    return {"major": pick(rng, 0, 2, 2**32 - 1)}, True


def no_deleter(rng, array, written):
    return {"deleter": False}, False


def nothing_wrong(rng, array, written):
    return {}, False


FIELDS = (
    wrong_data, wrong_offset, wrong_device, harmless_device, wrong_ndim, wrong_dtype, wrong_shape,
    no_shape, wrong_strides, no_strides, overlapping_strides, wrong_flags, read_only, wrong_version,
    no_deleter, nothing_wrong,
)  # fmt: skip
ONLY_VERSIONED = (wrong_flags, read_only, wrong_version)


@kind("capsule", weight=6)
def capsule(rng):
    call = any_call(rng)
    name = any_argument(rng, call)
    mistake = pick(rng, *FIELDS)
    array = call.array(name)
    fields, must_refuse = mistake(rng, array, name in call.written)
    if mistake is wrong_dtype and call.may_have(name, dtype_fields(array.dtype) | fields):
        raise Skip  # the same memory, as other values
    promised = fields.get("shape") or array.shape
    if name in call.read_whole and np.prod(promised, dtype=object) > array.size:
        raise Skip  # memory that is not there would be read
    if name == "logits" and np.prod(promised, dtype=object) < array.size:
        call.verify = lambda: None  # of a smaller vocabulary
    if isinstance(call, MergeStack) and -(2**40) < (fields.get("strides") or [0])[0] < 0:
        raise Skip  # states may follow each other backwards
    versioned = mistake in ONLY_VERSIONED or bool(rng.integers(2))
    exporter = Exporter(array, fields, versioned, old=not versioned and bool(rng.integers(2)))
    note(f"{type(call).__name__}: {name} by a capsule with {mistake.__name__} {fields}")
    call.judge({name: exporter}, [name], must_refuse)
    gc.collect(0)
    if exporter.leaks():
        raise Finding(exporter.leaks())


@kind("export", weight=2)
def export(rng):
    """Replacements for __dlpack__ and __dlpack_device__ that do not return what they should."""
    call = any_call(rng)
    name = any_argument(rng, call)
    array = call.array(name)
    used = Export(array, True, {})
    used.spend()

    def raising(error):
        def method(*args, **options):
            raise error

        return method

    mine = OfTheCaller("of the caller")
    way, method, foreign = pick(
        rng,
        ("None", lambda *a, **k: None, False),
        ("int", lambda *a, **k: 7, False),
        ("used capsule", lambda *a, **k: used.capsule, False),
        (
            "wrong name",
            lambda *a, **k: Exporter(array, {"name": b"dltensor_x"}).__dlpack__(),
            False,
        ),
        ("no name", lambda *a, **k: Exporter(array, {"name": b""}).__dlpack__(), False),
        ("raises", raising(mine), True),
        ("raises KeyboardInterrupt", raising(KeyboardInterrupt()), True),
        ("raises BufferError", raising(BufferError("no")), False),
        ("raises TypeError", raising(TypeError("mine")), True),
        ("no callable", 7, False),
        ("property raises", property(raising(mine)), True),
    )
    cls = type("Odd", (), {"__dlpack__": method, "__dlpack_device__": lambda s: (1, 0),
                           "shape": array.shape, "dtype": array.dtype})  # fmt: skip
    note(f"{type(call).__name__}: {name} with __dlpack__: {way}")
    call.judge({name: cls()}, [name], must_refuse=True, foreign=foreign)


@kind("device of an export")
def device_of_an_export(rng):
    call = any_call(rng)
    name = any_argument(rng, call)
    device = pick(rng, "cpu", (), (1,), (None, None), (2**40, 0), (1, 2**40), 7, (1.5, 0), (2, 0),
                  [1, 0], (1, 0, 0), None)  # fmt: skip
    exporter = Exporter(call.array(name), device=device)
    note(f"{type(call).__name__}: {name} with __dlpack_device__ {device!r}")
    call.judge({name: exporter}, [name, "stream", "device"])


class Interface:
    def __init__(self, interface, dtype, shape=()):
        self.__array_interface__ = interface
        self.dtype = dtype
        self.shape = shape


@kind("array interface", weight=4)
def array_interface(rng):
    """Of dtypes that DLPack's NumPy exporter does not know, the interface alone is read."""
    call = Merge(rng) if rng.integers(3) == 0 else Run(rng, q_dtype="bfloat16")
    names = [name for name in call.tensors if str(call.array(name).dtype) in NAMED_CODES]
    if not names:
        raise Skip
    name = pick(rng, *names)
    array = call.array(name)
    interface = dict(array.__array_interface__)
    strides = array.strides
    right = (array.ctypes.data, False)
    some = array.size > 0
    long = some and max(array.shape) > 1
    field, value, must_refuse = pick(
        rng,
        ("shape", list(array.shape), False),
        ("shape", None, True),
        ("shape", 3, True),
        ("shape", "three", True),
        ("shape", tuple(float(n) for n in array.shape), True),
        ("shape", tuple(-n - 1 for n in array.shape), True),
        ("shape", (2**64,) * array.ndim, True),
        ("shape", array.shape + (1,) * 3, True),
        ("shape", (), True),
        ("data", None, True),
        ("data", b"0" * 64, True),
        ("data", array.ctypes.data, True),
        ("data", (array.ctypes.data,), True),
        ("data", [array.ctypes.data, False], False),
        ("data", (None, False), True),
        ("data", (0, False), some),
        ("data", (-1, False), True),
        ("data", (2**64, False), True),
        ("data", (float(array.ctypes.data), False), True),
        ("data", (*right, 7), False),
        ("data", (array.ctypes.data, True), name in call.written and some),
        ("data", (array.ctypes.data, "no"), False),
        ("strides", list(strides), False),
        ("strides", strides[1:], True),
        ("strides", (*strides, 2), True),
        ("strides", "none", True),
        ("strides", tuple(s + 1 for s in strides), long and array.itemsize > 1),
        ("strides", tuple(-s for s in strides), long),
        ("strides", (2**64,) * array.ndim, True),
        ("strides", tuple(float(s) for s in strides), True),
        ("typestr", ">V2", array.itemsize > 1),
        ("typestr", "<V4", True),
        ("typestr", None, False),
        ("typestr", 5, False),
        ("version", 2, False),
        ("delete", "shape", True),
        ("delete", "data", True),
        ("delete", "strides", False),
        ("delete", "typestr", False),
        ("interface", [], True),
        ("interface", None, True),
        ("interface", 7, True),
        ("dtype", None, True),
        ("dtype", type("D", (), {"name": 5})(), True),
        ("dtype", type("D", (), {"name": "bfloat16\0"})(), False),
        ("dtype", type("D", (), {})(), True),
        ("dtype", np.dtype("f4"), True),
    )
    if field == "strides" and array.itemsize == 1 and value == tuple(s + 1 for s in strides):
        raise Skip  # other elements, as far as anyone can tell
    if field == "delete":
        del interface[value]
        if value == "strides" and not array.flags.c_contiguous:
            raise Skip
    elif field == "interface":
        interface = value
    elif field != "dtype":
        interface[field] = value
    dtype = value if field == "dtype" else array.dtype
    note(f"{type(call).__name__}: {name} by an array interface with {field} = {value!r}")
    call.judge({name: Interface(interface, dtype, array.shape)}, [name], must_refuse)


@kind("array", weight=2)
def odd_array(rng):
    """NumPy arrays of every odd sort in place of a right one."""
    call = any_call(rng)
    name = any_argument(rng, call)
    array = call.array(name)
    some = array.size > 0
    written = name in call.written
    pair = np.zeros(array.shape, [("gap", "u1"), ("value", array.dtype)])
    pair["value"] = array
    swapped = array.astype(array.dtype.newbyteorder(">")) if array.itemsize > 1 else array
    frozen = array.view()
    frozen.flags.writeable = False
    wide = np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array
    way, value, must_refuse = pick(
        rng,
        ("a field of a record", pair["value"], some and array.itemsize > 1),
        ("big-endian", swapped, some and array.itemsize > 1),
        ("read-only", frozen, some and written),
        ("every other element", wide, some and array.shape[-1] > 1 and name != "kv_lens"),
        ("objects", array.astype(object), True),
        ("text", np.zeros(array.shape, "S4"), True),
        ("0-d", np.array(1, array.dtype), True),
        ("bool", array.astype(bool), True),
        ("int64", array.astype(np.int64), not call.may_have(name, dtype_fields("int64"))),
        ("float64", array.astype(np.float64), True),
        ("complex", array.astype(np.complex64), True),
        ("masked", np.ma.array(array), False),
        ("a type", type(array), True),
        ("a dtype", array.dtype, True),
        ("bytes", array.tobytes(), True),
        ("a memoryview", memoryview(b"12345678"), True),
        ("a list", array.tolist(), True),
        ("an int", 5, True),
        ("a lambda", lambda: 0, True),
        ("an empty tuple", (), True),
    )
    if name in call.parameters and way in ("0-d", "an int", "int64"):
        raise Skip
    if written and not must_refuse and way not in ("masked", "read-only"):
        raise Skip  # a copy: the result is not where it is looked for
    note(f"{type(call).__name__}: {name} is {way} ({array.dtype})")
    call.judge({name: value}, [name], must_refuse)


@kind("fresh exports", weight=2)
def fresh_exports(rng):
    """Each export is new memory, which is forbidden once it is released. So calls must hold it as
    long as they use it, and a workspace as long as it exists."""
    call = Run(rng)
    name = pick(rng, "workspace", "q", "k", "v")
    note(f"{name} exports fresh memory")
    if name == "workspace":
        array = np.zeros(call.attn.workspace_bytes + 256, np.uint8)
    else:
        array = call.array(name)
    exporter = Exporter(array, fresh=True)
    if name != "workspace":
        call.judge({name: exporter}, [name])
        return
    try:
        attn = fp.Attention(**call.case.options(), workspace=exporter)
    except TypeError:
        return
    gc.collect()
    attn.plan(*call.inputs.plan_args())
    call.attn = attn
    call.judge({}, ["workspace"])
