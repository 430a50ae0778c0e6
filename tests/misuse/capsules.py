# SPDX-License-Identifier: Apache-2.0
"""Hand-made DLPack capsules. Their memory is forbidden once the consumer has released it."""

import ctypes

import ml_dtypes
import numpy as np

from misuse.memory import Pages, extent, view_at

INT64, UINT64 = ctypes.c_int64, ctypes.c_uint64


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", UINT64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", Tensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", UINT64),
        ("tensor", Tensor),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
NAMED_CODES = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}
CUDA, METAL = 2, 8  # devices
HANDLE = 3  # a code
READ_ONLY = 1


def dtype_fields(dtype):
    """The fields of a capsule that say its dtype."""
    dtype = np.dtype(dtype)
    code = NAMED_CODES[dtype.name] if dtype.name in NAMED_CODES else CODES[dtype.kind]
    return {"code": code, "bits": 8 * dtype.itemsize, "lanes": 1}


# Dtypes among which many tensors may be. uint16 stands for bfloat16.
FLOATS = [dtype_fields(dtype) for dtype in ("f4", "f2", ml_dtypes.bfloat16, "u2")]
EIGHT_BIT_FLOATS = [
    dtype_fields(dtype) for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
]
INTS = [dtype_fields(dtype) for dtype in ("i4", "i8")]

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Export:
    """One capsule of an array. `fields` replace what would be right; "shape" and "strides" take
    sequences or None, "name" the bytes of the capsule's name."""

    def __init__(self, array, versioned, fields, on_release=None):
        self.releases = 0
        self._on_release = on_release
        self._pages = Pages(4096, fill=0)
        self._versioned = versioned
        managed = (Versioned if versioned else Managed).from_address(self._pages.address)
        tensor = managed.tensor
        values = {
            "data": array.ctypes.data,
            "device_type": 1,
            "ndim": array.ndim,
            "shape": list(array.shape),
            "strides": [stride // array.itemsize for stride in array.strides],
            "major": 1,
            "minor": 1,
            "name": b"dltensor_versioned" if versioned else b"dltensor",
        }
        values |= dtype_fields(array.dtype) | fields
        for i, field in enumerate(("shape", "strides")):
            numbers = values.pop(field)
            if numbers is None:
                setattr(tensor, field, None)
                continue
            address = self._pages.address + 1024 * (i + 1)
            (INT64 * len(numbers)).from_address(address)[:] = [as_int64(n) for n in numbers]
            setattr(tensor, field, address)
        self._deleter = DELETER(self._release)  # kept: C holds its address alone
        self.has_deleter = values.pop("deleter", True)
        if self.has_deleter:
            managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        for field, value in values.items():
            owner = tensor if hasattr(Tensor, field) else managed
            if hasattr(type(owner), field):
                setattr(owner, field, value)
        self._text = values["name"]  # kept: the capsule has its address
        self.capsule = _new(self._pages.address, self._text, None)

    def _release(self, _):
        self.releases += 1
        self._pages.revoke()
        if self._on_release is not None:
            self._on_release()

    def spend(self):
        """Renames the capsule, as if it had been consumed before."""
        self._text = b"used_" + self._text
        _rename(self.capsule, self._text)

    @property
    def consumed(self):
        return _name(self.capsule).startswith(b"used_dltensor")


def as_int64(number):
    return (number + 2**63) % 2**64 - 2**63


class Exporter:
    """An object that exports an array by hand-made capsules.

    `fresh`: each export is a copy, in memory that is forbidden once it is released.
    """

    def __init__(self, array, fields=None, versioned=True, device=None, old=False, fresh=False):
        self.array = array
        self.exports = []
        self.fields = fields or {}
        self.versioned = versioned
        self.device = device
        self.old = old  # takes no keyword, as before DLPack 1.0
        self.fresh = fresh

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    def __dlpack__(self, *args, **options):
        if self.old and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        export = self.copy() if self.fresh else Export(self.array, self.versioned, self.fields)
        self.exports.append(export)
        return export.capsule

    def copy(self):
        shape, strides, itemsize = self.array.shape, self.array.strides, self.array.itemsize
        pages = Pages(extent(shape, strides, itemsize))
        array = view_at(pages, 0, shape, strides, self.array.dtype)
        array[...] = self.array
        fields = self.fields if array.size else {"data": pages.address} | self.fields
        return Export(array, self.versioned, fields, on_release=pages.revoke)

    def __dlpack_device__(self):
        if self.device is not None:
            return self.device
        return (self.fields.get("device_type", 1), self.fields.get("device_index", 0))

    @property
    def alive(self):
        return sum(export.releases == 0 for export in self.exports)

    def leaks(self):
        """A message about what is wrong with the releases so far; empty: nothing."""
        for export in self.exports:
            wanted = int(export.consumed and export.has_deleter)
            if export.releases != wanted:
                return f"a capsule was released {export.releases} times, expected {wanted}"
        return ""
