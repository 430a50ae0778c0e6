# SPDX-License-Identifier: Apache-2.0
"""A DLPack producer whose every field can be wrong."""

import ctypes

import numpy as np

FLOAT, INT, UINT, BFLOAT, HANDLE = 2, 0, 1, 4, 3
CPU, CUDA, METAL = 1, 2, 8
READ_ONLY = 1

_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


def _int64s(values):
    return None if values is None else (ctypes.c_int64 * max(len(values), 1))(*values)


class Producer:
    """Exports the memory of a NumPy array, with changes to the fields of the DLPack tensor.

    `fresh`: a copy for each export instead, which the deleter overwrites with NaN and drops.
    """

    def __init__(self, array, fresh=False, name=b"dltensor_versioned", **changes):
        self.array, self.fresh, self.name, self.changes = array, fresh, name, changes
        self.exports = []  # [structure, what it points to, is it alive]

    @property
    def alive(self):
        return sum(export[-1] for export in self.exports)

    def __dlpack_device__(self):
        return (CPU, 0)

    def __dlpack__(self, **_):
        array = self.array.copy() if self.fresh else self.array
        kinds = {"f": FLOAT, "i": INT, "u": UINT}
        fields = {
            "shape": array.shape,
            "strides": [stride // array.itemsize for stride in array.strides],
            "data": array.ctypes.data,
            "device_type": CPU,
            "ndim": array.ndim,
            "code": kinds[array.dtype.kind],
            "bits": 8 * array.itemsize,
            "lanes": 1,
            "major": 1,
        } | self.changes
        shape, strides = _int64s(fields.pop("shape")), _int64s(fields.pop("strides"))
        managed = _Managed(major=fields.pop("major"), flags=fields.pop("flags", 0))
        managed.tensor = _Tensor(shape=shape, strides=strides, **fields)
        export = [managed, (array, shape, strides), True]

        @_Deleter
        def delete(_):
            assert export[-1], "deleted twice"
            if self.fresh:
                array.view(np.uint8)[...] = 0xFF
            export[-1] = False

        managed.deleter = delete
        self.exports.append(export)
        return _new(ctypes.addressof(managed), self.name, None)
