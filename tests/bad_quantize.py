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


def rotate(**changes):
    arguments = {
        "q": zeros(4, 4, 8),
        "k": zeros(4, 2, 8),
        "positions": integers(0, 1, 2, 3),
        "rope": fp.Rope(),
        "out_q": zeros(4, 4, 8, dtype=E4M3),
        "out_k": zeros(4, 2, 8, dtype=E4M3),
    }
    return fp.apply_rope(**arguments | changes)


def rotated_over(name):
    """The output `name` shares the memory of its input."""
    memory = zeros(4, 4 if name == "out_q" else 2, 8)
    return rotate(**{name[4:]: memory, name: memory.view(E4M3)[..., :8]})


def rotated_over_scale():
    memory = zeros(4, 4, 8, dtype=np.uint8)
    return rotate(k_scale=memory[0, 0].view(np.float32), out_q=memory.view(E4M3))


ROTATE = [
    ("rotate out_dtype", fp.UnsupportedError, "out_dtype", lambda s: rotate(out_dtype="int8")),
    ("rotate dtype of out", TYPE, "out_dtype", lambda s: rotate(out_dtype="float8_e5m2")),
    (
        "rotate new wide",
        TYPE,
        "out_q",
        lambda s: rotate(out_q=None, out_k=None, out_dtype="float16"),
    ),
    ("rotate out_k dtype", TYPE, "out_k", lambda s: rotate(out_k=zeros(4, 2, 8))),
    (
        "rotate out_k of 8 bits",
        TYPE,
        "out_k",
        lambda s: rotate(out_k=zeros(4, 2, 8, dtype="float8_e5m2")),
    ),
    ("rotate q_scale zero", VALUE, "q_scale", lambda s: rotate(q_scale=0)),
    ("rotate k_scale NaN", VALUE, "k_scale", lambda s: rotate(k_scale=float("nan"))),
    ("rotate q_scale text", TYPE, "q_scale", lambda s: rotate(q_scale="one")),
    ("rotate q_scale of heads of q", VALUE, "q_scale", lambda s: rotate(q_scale=ones(4))),
    (
        "rotate q_scale of no head",
        VALUE,
        "q_scale",
        lambda s: rotate(k=zeros(4, 0, 8), out_k=zeros(4, 0, 8, dtype=E4M3), q_scale=ones(0)),
    ),
    ("rotate k_scale dtype", TYPE, "k_scale", lambda s: rotate(k_scale=half(2))),
    (
        "rotate k_scale of a head",
        VALUE,
        r"k_scale\[1\]",
        lambda s: rotate(k_scale=np.float32([1, 0])),
    ),
    (
        "rotate q_scale of no group",
        VALUE,
        "q_scale",
        lambda s: rotate(k=zeros(4, 3, 8), out_k=zeros(4, 3, 8, dtype=E4M3), q_scale=ones(3)),
    ),
    (
        "rotate q_scale without 8 bits",
        VALUE,
        "q_scale",
        lambda s: rotate(out_q=None, out_k=None, q_scale=2.0),
    ),
    (
        "rotate k_scale without 8 bits",
        VALUE,
        "k_scale",
        lambda s: rotate(out_q=None, out_k=None, k_scale=ones(1)),
    ),
    ("rotate out_q over q", VALUE, "out_q", lambda s: rotated_over("out_q")),
    ("rotate out_k over k", VALUE, "out_k", lambda s: rotated_over("out_k")),
    ("rotate out_q over k_scale", VALUE, "out_q", lambda s: rotated_over_scale()),
]


def run(softcap=0.0, **changes):
    """Attention of 8-bit queries, with softmax_scale 0.5."""
    attn = fp.Attention(
        4, 2, 8, page_size=None, q_dtype=E4M3, device="cpu", softmax_scale=0.5, softcap=softcap
    )
    attn.plan([0, 2], [3])
    arrays = {name: zeros(3, heads, 8, dtype=E4M3) for name, heads in zip("qkv", (4, 2, 2))}
    return attn.run(**arrays | changes)


RUN_NARROW = [
    ("run q_scale zero", VALUE, "q_scale", lambda s: run(q_scale=0)),
    ("run q_scale NaN", VALUE, "q_scale", lambda s: run(q_scale=float("nan"))),
    ("run q_scale text", TYPE, "q_scale", lambda s: run(q_scale="one")),
    ("run q_scale of heads of q", VALUE, "q_scale", lambda s: run(q_scale=ones(4))),
    ("run q_scale dtype", TYPE, "q_scale", lambda s: run(q_scale=half(2))),
    ("run q_scale rank", VALUE, "q_scale", lambda s: run(q_scale=ones(1, 2))),
    (
        "run q_scale of a head",
        VALUE,
        r"q_scale\[1\]",
        lambda s: run(q_scale=np.float32([1, -1])),
    ),
    ("run q_scale and k_scale", VALUE, "k_scale", lambda s: run(q_scale=1e-20, k_scale=1e-20)),
    (
        "run q_scale of a head and k_scale",
        VALUE,
        r"q_scale\[1\]",
        lambda s: run(q_scale=np.float32([1, 1e-20]), k_scale=1e-20),
    ),
    (
        "run q_scale and k_scale of a head",
        VALUE,
        r"[qk]_scale\[1\]",
        lambda s: run(q_scale=np.float32([1, 1e-20]), k_scale=np.float32([1, 3e-20])),
    ),
    (
        "run q_scale and softcap",
        VALUE,
        "k_scale",
        lambda s: run(softcap=1e-20, q_scale=1e10, k_scale=1e12),
    ),
    ("run q wide", TYPE, "q", lambda s: run(q=zeros(3, 4, 8))),
    ("run k of another format", TYPE, "k", lambda s: run(k=zeros(3, 2, 8, dtype="float8_e5m2"))),
]
