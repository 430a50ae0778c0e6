# SPDX-License-Identifier: Apache-2.0
"""quantize_fp8 and 8-bit results of apply_rope: see bad_inputs.py."""

import numpy as np

import flashplan as fp
from scene import half, integers, read_only, zeros

VALUE, TYPE = ValueError, TypeError
E4M3 = "float8_e4m3fn"


def quantize(**changes):
    return fp.quantize_fp8(**{"x": zeros(4, 4, 8), "out": zeros(4, 4, 8, dtype=E4M3)} | changes)


def ones(*shape):
    return np.ones(shape, np.float32)


QUANTIZE = [
    ("quantize x none", TYPE, "x", lambda s: quantize(x=None)),
    ("quantize x rank", VALUE, "x", lambda s: quantize(x=zeros(4, 8), out=None)),
    ("quantize x narrow", TYPE, "x", lambda s: quantize(x=zeros(4, 4, 8, dtype=E4M3))),
    ("quantize x int", TYPE, "x", lambda s: quantize(x=integers([[1, 2]]))),
    ("quantize dtype", fp.UnsupportedError, "dtype", lambda s: quantize(dtype="float16")),
    ("quantize dtype of out", TYPE, "dtype", lambda s: quantize(dtype="float8_e5m2")),
    ("quantize out shape", VALUE, "out", lambda s: quantize(out=zeros(4, 4, 9, dtype=E4M3))),
    ("quantize out wide", TYPE, "dtype", lambda s: quantize(out=half(4, 4, 8))),
    (
        "quantize out read-only",
        TYPE,
        "out",
        lambda s: quantize(out=read_only(zeros(4, 4, 8, dtype=E4M3))),
    ),
    ("quantize out over x", VALUE, "out", lambda s: over_x()),
    ("quantize out over scale", VALUE, "out", lambda s: over_scale()),
    ("quantize scale zero", VALUE, "scale", lambda s: quantize(scale=0)),
    ("quantize scale NaN", VALUE, "scale", lambda s: quantize(scale=float("nan"))),
    ("quantize scale tiny", VALUE, "scale", lambda s: quantize(scale=1e-40)),
    ("quantize scale text", TYPE, "scale", lambda s: quantize(scale="one")),
    ("quantize scale dtype", TYPE, "scale", lambda s: quantize(scale=half(1))),
    ("quantize scale size", VALUE, "scale", lambda s: quantize(scale=ones(3))),
    ("quantize scale rank", VALUE, "scale", lambda s: quantize(scale=ones(1, 4))),
    (
        "quantize scale of a head",
        VALUE,
        r"scale\[2\]",
        lambda s: quantize(scale=np.float32([1, 1, 0, 1])),
    ),
    ("quantize per_head", TYPE, "per_head", lambda s: quantize(per_head=1)),
]


def over_x():
    memory = zeros(4, 4, 32, dtype=np.uint8)
    return quantize(x=memory.view(np.float32), out=memory[..., :8].view(E4M3))


def over_scale():
    memory = zeros(4, 4, 8, dtype=np.uint8)
    return quantize(scale=memory[0, 0, :4].view(np.float32), out=memory.view(E4M3))
