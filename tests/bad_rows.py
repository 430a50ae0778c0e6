# SPDX-License-Identifier: Apache-2.0
"""The operators on rows: see bad_inputs.py."""

import numpy as np

import flashplan as fp
from scene import half, integers, read_only, sharing, zeros

NAN = float("nan")
VALUE, TYPE = ValueError, TypeError


def out_over_scale(s):
    out = zeros(4, 4, 8) + np.float32(1)
    s.rmsnorm(out=out, scale=out.reshape(-1)[:1])


def out_over_residual(s):
    residual = zeros(4, 4, 8)
    s.add_rmsnorm(residual=residual, out=residual)


RMSNORM = [
    ("rmsnorm x text", TYPE, "x", lambda s: s.rmsnorm(x="x")),
    ("rmsnorm x none", TYPE, "x", lambda s: s.rmsnorm(x=None)),
    ("rmsnorm x int", TYPE, "x", lambda s: s.rmsnorm(x=integers([1, 2]))),
    ("rmsnorm x rank", VALUE, "x", lambda s: s.rmsnorm(x=zeros(1, 1, 1, 4, 8))),
    ("rmsnorm weight size", VALUE, "weight", lambda s: s.rmsnorm(weight=zeros(7))),
    ("rmsnorm weight rank", VALUE, "weight", lambda s: s.rmsnorm(weight=zeros(1, 8))),
    ("rmsnorm weight dtype", TYPE, "weight", lambda s: s.rmsnorm(weight=half(8))),
    ("rmsnorm other weight", TYPE, "weight", lambda s: half_rmsnorm("bfloat16")),
    ("rmsnorm narrow weight", TYPE, "weight", lambda s: half_rmsnorm("float8_e5m2")),
    ("rmsnorm eps", VALUE, "eps", lambda s: s.rmsnorm(eps=-1e-6)),
    ("rmsnorm eps nan", VALUE, "eps", lambda s: s.rmsnorm(eps=NAN)),
    ("rmsnorm eps text", TYPE, "eps", lambda s: s.rmsnorm(eps="small")),
    ("rmsnorm gemma", TYPE, "gemma", lambda s: s.rmsnorm(gemma=2)),
    ("rmsnorm out shape", VALUE, "out", lambda s: s.rmsnorm(out=zeros(4, 4, 9))),
    ("rmsnorm out dtype", TYPE, "out", lambda s: s.rmsnorm(out=half(4, 4, 8))),
    ("rmsnorm out read-only", TYPE, "out", lambda s: s.rmsnorm(out=read_only(zeros(4, 4, 8)))),
    ("rmsnorm out sharing", VALUE, "out", lambda s: s.rmsnorm(out=sharing(4, 4, 8, step=7))),
    ("rmsnorm out beside x", VALUE, "out", lambda s: shifted(s.rmsnorm)),
    ("rmsnorm out over weight", VALUE, "out", lambda s: out_over(s.rmsnorm, "weight")),
    ("rmsnorm out_dtype", TYPE, "out_dtype", lambda s: s.rmsnorm(out_dtype="float8_e5m2")),
    ("rmsnorm scale", VALUE, "scale", lambda s: s.rmsnorm(scale=0)),
    ("rmsnorm scale value", VALUE, "scale", lambda s: s.rmsnorm(scale=zeros(1))),
    ("rmsnorm scale size", VALUE, "scale", lambda s: s.rmsnorm(scale=zeros(2))),
    ("rmsnorm scale dtype", TYPE, "scale", lambda s: s.rmsnorm(scale=half(1))),
    ("rmsnorm scale text", TYPE, "scale", lambda s: s.rmsnorm(scale="one")),
    ("rmsnorm out over scale", VALUE, "out", out_over_scale),
]

LAYERNORM = [
    ("layernorm bias size", VALUE, "bias", lambda s: s.layernorm(bias=zeros(9))),
    ("layernorm bias dtype", TYPE, "bias", lambda s: s.layernorm(bias=half(8))),
    (
        "layernorm bias dtype alone",
        TYPE,
        "bias",
        lambda s: s.layernorm(weight=None, bias=half(8)),
    ),
    ("layernorm bias unlike weight", TYPE, "bias", lambda s: unlike_weight()),
    ("layernorm weight dtype", TYPE, "weight", lambda s: s.layernorm(weight=half(8))),
    ("layernorm eps", VALUE, "eps", lambda s: s.layernorm(eps=float("inf"))),
    ("layernorm out shape", VALUE, "out", lambda s: s.layernorm(out=zeros(4, 8))),
    ("layernorm out beside x", VALUE, "out", lambda s: shifted(s.layernorm)),
    ("layernorm out over weight", VALUE, "out", lambda s: out_over(s.layernorm, "weight")),
    ("layernorm scale", VALUE, "scale", lambda s: s.layernorm(scale=NAN)),
    ("layernorm out over bias", VALUE, "out", lambda s: out_over(s.layernorm, "bias")),
]

ADD_RMSNORM = [
    ("add_rmsnorm residual", VALUE, "residual", lambda s: s.add_rmsnorm(residual=zeros(4, 8))),
    (
        "add_rmsnorm residual type",
        TYPE,
        "residual",
        lambda s: s.add_rmsnorm(residual=half(4, 4, 8)),
    ),
    ("add_rmsnorm weight", VALUE, "weight", lambda s: s.add_rmsnorm(weight=zeros(4))),
    ("add_rmsnorm eps", VALUE, "eps", lambda s: s.add_rmsnorm(eps=-1)),
    ("add_rmsnorm scale", VALUE, "scale", lambda s: s.add_rmsnorm(scale=-1)),
    ("add_rmsnorm out shape", VALUE, "out", lambda s: s.add_rmsnorm(out=zeros(4, 8))),
    ("add_rmsnorm out over residual", VALUE, "out", out_over_residual),
    ("add_rmsnorm one tensor", VALUE, "x", lambda s: s.add_rmsnorm(residual=s.out.view)),
    ("add_rmsnorm read-only", TYPE, "x", lambda s: s.add_rmsnorm(x=read_only(zeros(4, 4, 8)))),
    ("add_rmsnorm of a list", TYPE, "x", lambda s: s.add_rmsnorm(x=[[1.0] * 8] * 4)),
    ("add_rmsnorm float64", TYPE, "x", lambda s: s.add_rmsnorm(x=np.zeros((4, 4, 8)))),
]

GATED = [
    ("silu odd", VALUE, "x", lambda s: s.silu(x=zeros(4, 4, 15))),
    ("silu x none", TYPE, "x", lambda s: fp.silu_and_mul(None)),
    ("silu x narrow", TYPE, "x", lambda s: s.silu(x=zeros(4, 4, 16, dtype="float8_e5m2"))),
    ("silu out shape", VALUE, "out", lambda s: s.silu(out=zeros(4, 4, 16))),
    ("silu out dtype", TYPE, "out", lambda s: s.silu(out=half(4, 4, 8))),
    ("silu scale", VALUE, "scale", lambda s: s.silu(scale=0)),
    ("silu scale text", TYPE, "scale", lambda s: s.silu(scale="one")),
    ("silu out_dtype", fp.UnsupportedError, "out_dtype", lambda s: s.silu(out_dtype="int8")),
    (
        "silu other out_dtype",
        TYPE,
        "out_dtype",
        lambda s: s.silu(out_dtype="float8_e4m3fn"),
    ),
    ("silu new wide", TYPE, "out", lambda s: s.silu(out=None, out_dtype="bfloat16")),
    ("silu out over x", VALUE, "out", lambda s: silu_over_itself(s)),
]

GATHER = [
    ("gather x none", TYPE, "x", lambda s: s.gather(x=None)),
    ("gather x ints", TYPE, "x", lambda s: s.gather(x=integers([1, 2]))),
    ("gather x rank", VALUE, "x", lambda s: s.gather(x=zeros(8))),
    ("gather indices none", TYPE, "indices", lambda s: s.gather(indices=None)),
    ("gather indices floats", TYPE, "indices", lambda s: s.gather(indices=zeros(4))),
    ("gather indices rank", VALUE, "indices", lambda s: s.gather(indices=integers([0, 1]))),
    (
        "gather below",
        VALUE,
        r"indices\[2\]",
        lambda s: s.gather(indices=integers(0, 1, -1, 2)),
    ),
    ("gather above", VALUE, r"indices\[0\]", lambda s: s.gather(indices=integers(9, 0, 0, 0))),
    ("gather out rows", VALUE, "out", lambda s: s.gather(out=zeros(5, 8))),
    ("gather out width", VALUE, "out", lambda s: s.gather(out=zeros(4, 9))),
    ("gather out dtype", TYPE, "out", lambda s: s.gather(out=half(4, 8))),
    ("gather out read-only", TYPE, "out", lambda s: s.gather(out=read_only(zeros(4, 8)))),
    ("gather out over x", VALUE, "out", lambda s: gather_over_itself(s)),
]

ROPE = [
    ("rope q none", TYPE, "q", lambda s: s.rope(q=None)),
    ("rope q rank", VALUE, "q", lambda s: s.rope(q=zeros(4, 32))),
    ("rope q dtype", TYPE, "q", lambda s: s.rope(q=zeros(4, 4, 8, dtype="float8_e5m2"))),
    ("rope q one dim", VALUE, "q", lambda s: s.rope(q=zeros(4, 4, 1))),
    ("rope k dtype", TYPE, "k", lambda s: s.rope(k=half(4, 2, 8))),
    ("rope k tokens", VALUE, "k", lambda s: s.rope(k=zeros(3, 2, 8))),
    ("rope k dim", VALUE, "k", lambda s: s.rope(k=zeros(4, 2, 6))),
    ("rope positions dtype", TYPE, "positions", lambda s: s.rope(positions=zeros(4))),
    ("rope positions size", VALUE, "positions", lambda s: s.rope(positions=integers(1, 2, 3))),
    ("rope none", TYPE, "rope", lambda s: s.rope(rope=None)),
    ("rope and table", TYPE, "rope", lambda s: s.rope(cos_sin_cache=zeros(9, 8))),
    ("rope and interleaved", VALUE, "interleaved", lambda s: s.rope(interleaved=True)),
    ("table interleaved", TYPE, "interleaved", lambda s: s.table(interleaved=1)),
    ("table dtype", TYPE, "cos_sin_cache", lambda s: s.table(cos_sin_cache=half(9, 8))),
    ("table rank", VALUE, "cos_sin_cache", lambda s: s.table(cos_sin_cache=zeros(9))),
    ("table odd", VALUE, "cos_sin_cache", lambda s: s.table(cos_sin_cache=zeros(9, 7))),
    ("table narrow", VALUE, "cos_sin_cache", lambda s: s.table(cos_sin_cache=zeros(9, 0))),
    ("table wide", VALUE, "cos_sin_cache", lambda s: s.table(cos_sin_cache=zeros(9, 10))),
    ("table of float64", TYPE, "cos_sin_cache", lambda s: s.table(cos_sin_cache=np.zeros((9, 8)))),
    ("table position", VALUE, r"positions\[3\]", lambda s: s.table(cos_sin_cache=zeros(3, 8))),
    (
        "table negative position",
        VALUE,
        r"positions\[0\]",
        lambda s: s.table(positions=integers(-1, 0, 0, 0)),
    ),
    ("rope theta", VALUE, r"rope\.theta", lambda s: s.rope(rope=fp.Rope(theta=1))),
    ("rope theta nan", VALUE, r"rope\.theta", lambda s: s.rope(rope=fp.Rope(theta=NAN))),
    ("rope theta text", TYPE, r"rope\.theta", lambda s: fp.Rope(theta="large")),
    ("rope scale", VALUE, r"rope\.scale", lambda s: s.rope(rope=fp.Rope(scale=0))),
    ("rope scale tiny", VALUE, r"rope\.scale", lambda s: s.rope(rope=fp.Rope(scale=9e-7))),
    ("rope odd", VALUE, r"rope\.rotary_dim", lambda s: s.rope(rope=fp.Rope(rotary_dim=5))),
    ("rope large", VALUE, r"rope\.rotary_dim", lambda s: s.rope(rope=fp.Rope(rotary_dim=10))),
    ("rope zero", VALUE, r"rope\.rotary_dim", lambda s: fp.Rope(rotary_dim=0)),
    ("rope interleaved", TYPE, r"rope\.interleaved", lambda s: fp.Rope(interleaved="yes")),
    ("rope scaling", VALUE, r"rope\.scaling", lambda s: fp.Rope(scaling="ntk")),
    ("rope truncate", TYPE, r"rope\.truncate", lambda s: fp.Rope(truncate=1)),
    ("rope mscale", VALUE, r"rope\.mscale_all_dim", lambda s: fp.Rope(mscale=1.0)),
    (
        "rope mscale and factor",
        VALUE,
        r"rope\.attention_factor",
        lambda s: fp.Rope(mscale=1.0, mscale_all_dim=1.0, attention_factor=1.0),
    ),
    (
        "rope few frequencies",
        VALUE,
        r"rope\.frequencies",
        lambda s: s.rope(rope=fp.Rope(frequencies=[1.0])),
    ),
    (
        "rope many frequencies",
        VALUE,
        r"rope\.frequencies",
        lambda s: fp.Rope(frequencies=[1.0] * 257),
    ),
    (
        "rope bad frequency",
        VALUE,
        r"rope\.frequencies\[2\]",
        lambda s: s.rope(rope=fp.Rope(frequencies=[1.0, 0.0, NAN, 1.0])),
    ),
    (
        "rope large frequency",
        VALUE,
        r"rope\.frequencies\[1\]",
        lambda s: s.rope(rope=fp.Rope(frequencies=[1e6, 1.01e6, 1.0, 1.0])),
    ),
    ("rope frequency text", TYPE, r"rope\.frequencies", lambda s: fp.Rope(frequencies=["x"])),
    (
        "rope frequencies and theta",
        VALUE,
        r"rope\.theta",
        lambda s: fp.Rope(frequencies=[1.0] * 4, theta=5.0),
    ),
    ("rope factor", VALUE, r"rope\.attention_factor", lambda s: fp.Rope(attention_factor=-1)),
    (
        "rope factor over float32",
        VALUE,
        r"rope\.attention_factor",
        lambda s: s.rope(rope=fp.Rope(scaling="yarn", attention_factor=1e39)),
    ),
    (
        "rope factor tiny",
        VALUE,
        r"rope\.attention_factor",
        lambda s: s.rope(rope=fp.Rope(scaling="yarn", attention_factor=1e-39)),
    ),
    (
        "rope length",
        VALUE,
        r"rope\.original_length",
        lambda s: s.rope(rope=fp.Rope(scaling="yarn", original_length=-1)),
    ),
    (
        "rope factors",
        VALUE,
        r"rope\.high_freq_factor",
        lambda s: s.rope(rope=fp.Rope(scaling="llama3", low_freq_factor=5.0)),
    ),
    (
        "rope betas",
        VALUE,
        r"rope\.beta_fast",
        lambda s: s.rope(rope=fp.Rope(scaling="yarn", beta_slow=50.0)),
    ),
    ("rope out_q shape", VALUE, "out_q", lambda s: s.rope(out_q=zeros(4, 4, 9))),
    ("rope out_k dtype", TYPE, "out_k", lambda s: s.rope(out_k=half(4, 2, 8))),
    ("rope out_q over k", VALUE, "out_q", lambda s: rope_over(s, "out_q", "k")),
    ("rope out_k over q", VALUE, "out_k", lambda s: rope_over(s, "out_k", "q")),
    ("rope one output", VALUE, "out_q", lambda s: rope_over(s, "out_q", "out_k")),
    (
        "rope position beyond 2^40",
        VALUE,
        r"positions\[2\]",
        lambda s: s.rope(positions=far(2**40 + 1)),
    ),
    (
        "rope position below -2^40",
        VALUE,
        r"positions\[2\]",
        lambda s: s.rope(positions=far(-(2**63))),
    ),
    ("rope out_q over positions", VALUE, "out_q", lambda s: rope_over(s, "out_q", "positions")),
]


def far(position):
    return np.array([0, 2**40, position, -(2**40)], np.int64)


def shifted(call):
    """`out` is x's memory, one row further on."""
    memory = zeros(5, 4, 8)
    return call(x=memory[:4], out=memory[1:])


def half_rmsnorm(weight_dtype):
    return fp.rmsnorm(half(4, 8), zeros(8, dtype=weight_dtype))


def unlike_weight():
    """A bias of bfloat16 beside a weight of float32."""
    return fp.layernorm(half(4, 8), zeros(8), zeros(8, dtype="bfloat16"))


def out_over(call, name):
    memory = zeros(4, 4, 8)
    return call(out=memory, **{name: memory[1, 2]})


def silu_over_itself(scene):
    x = zeros(4, 4, 16)
    return scene.silu(x=x, out=x[..., :8])


def gather_over_itself(scene):
    memory = zeros(9, 8)
    return scene.gather(x=memory, out=memory[:4])


def rope_over(scene, one, other):
    memory = zeros(4, 4, 8)
    views = {
        "k": memory[:, :2],
        "out_k": memory[:, 2:],
        "q": memory,
        "out_q": memory,
        "positions": memory.view(np.int32)[0, 0, :4],
    }
    return scene.rope(**{one: views[one], other: views[other]})
