# SPDX-License-Identifier: Apache-2.0
"""append_mla() and gather_mla(): see bad_inputs.py."""

import ml_dtypes

import flashplan as fp
from scene import half, int64, integers, read_only, zeros

VALUE, TYPE = ValueError, TypeError
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def append(**changes):
    """3 tokens of 8 and 4 dims, to a cache of 3 pages of 4 tokens."""
    arguments = {"kv_c": zeros(3, 8), "k_pe": zeros(3, 4), "cache": zeros(3, 4, 12)}
    return fp.append_mla(**arguments | {"slot_mapping": int64(0, -1, 11)} | changes)


def append_rotated(**changes):
    arguments = {"rope": fp.Rope(), "positions": integers(0, 1, 2), "q_pe": zeros(3, 2, 4)}
    return append(**arguments | changes)


def append_ds_mla(**changes):
    bf16 = {"kv_c": zeros(3, 512, dtype=BF16), "k_pe": zeros(3, 64, dtype=BF16)}
    return append(**bf16 | {"cache": zeros(3, 4, 656, dtype="u1")} | changes)


def gather(**changes):
    """2 and 3 tokens of the pages 1 and 2, 0."""
    arguments = {
        "cache": zeros(3, 4, 12),
        "block_table": integers([1, 0], [2, 0]),
        "kv_indptr": integers(0, 2, 5),
        "starts": integers(2, 3),
        "out": zeros(5, 12),
    }
    return fp.gather_mla(**arguments | changes)


CACHE = zeros(3, 4, 12)

APPEND_MLA = [
    ("append_mla kv_c None", TYPE, "kv_c", lambda s: append(kv_c=None)),
    ("append_mla kv_c of rank 3", VALUE, "kv_c", lambda s: append(kv_c=zeros(3, 1, 8))),
    ("append_mla kv_c integers", TYPE, "kv_c", lambda s: append(kv_c=zeros(3, 8, dtype="i4"))),
    ("append_mla kv_c 8 bits", TYPE, "kv_c", lambda s: append(kv_c=zeros(3, 8, dtype=E4M3))),
    ("append_mla kv_c wide", VALUE, "kv_c", lambda s: append(kv_c=zeros(3, 4097))),
    ("append_mla k_pe dtype", TYPE, "k_pe", lambda s: append(k_pe=half(3, 4))),
    ("append_mla k_pe short", VALUE, "slot_mapping", lambda s: append(k_pe=zeros(2, 4))),
    ("append_mla cache None", TYPE, "cache", lambda s: append(cache=None)),
    ("append_mla cache dims", VALUE, "cache", lambda s: append(cache=zeros(3, 4, 13))),
    ("append_mla cache heads", VALUE, "cache", lambda s: append(cache=zeros(3, 4, 2, 12))),
    ("append_mla cache dtype", TYPE, "cache", lambda s: append(cache=half(3, 4, 12))),
    ("append_mla cache of three", TYPE, "cache", lambda s: append(cache=(CACHE,) * 3)),
    (
        "append_mla cache_tail dims",
        VALUE,
        "cache_tail",
        lambda s: append(cache=(zeros(3, 4, 8), zeros(3, 4, 5))),
    ),
    (
        "append_mla cache_tail page",
        VALUE,
        "cache_tail",
        lambda s: append(cache=(zeros(3, 4, 8), zeros(3, 3, 4))),
    ),
    (
        "append_mla cache_tail dtype",
        TYPE,
        "cache_tail",
        lambda s: append(cache=(zeros(3, 4, 8), half(3, 4, 4))),
    ),
    ("append_mla cache read only", TYPE, "cache", lambda s: append(cache=read_only(CACHE))),
    ("append_mla no slots", TYPE, "slot_mapping", lambda s: append(slot_mapping=None)),
    (
        "append_mla slots int32",
        TYPE,
        "slot_mapping",
        lambda s: append(slot_mapping=integers(0, 1, 2)),
    ),
    (
        "append_mla too many slots",
        VALUE,
        "slot_mapping",
        lambda s: append(slot_mapping=int64(0, 1, 2, 3)),
    ),
    (
        "append_mla slot outside",
        VALUE,
        r"slot_mapping\[2\]",
        lambda s: append(slot_mapping=int64(0, 1, 12)),
    ),
    (
        "append_mla slot -2",
        VALUE,
        r"slot_mapping\[0\]",
        lambda s: append(slot_mapping=int64(-2, 1, 2)),
    ),
    ("append_mla scale 0", VALUE, "scale", lambda s: append(scale=0.0)),
    ("append_mla scale text", TYPE, "scale", lambda s: append(scale="1")),
    ("append_mla eps", VALUE, "eps", lambda s: append(eps=-1.0)),
    ("append_mla weight size", VALUE, "norm_weight", lambda s: append(norm_weight=zeros(7))),
    ("append_mla weight dtype", TYPE, "norm_weight", lambda s: append(norm_weight=half(8))),
    ("append_mla rope", TYPE, "rope", lambda s: append_rotated(rope=10000.0)),
    (
        "append_mla rotary_dim",
        VALUE,
        "rope.rotary_dim",
        lambda s: append_rotated(rope=fp.Rope(rotary_dim=6)),
    ),
    ("append_mla no rope", VALUE, "positions", lambda s: append(positions=integers(0, 1, 2))),
    ("append_mla q_pe alone", VALUE, "q_pe", lambda s: append(q_pe=zeros(3, 2, 4))),
    (
        "append_mla no k_pe",
        VALUE,
        "k_pe",
        lambda s: append_rotated(k_pe=None, cache=zeros(3, 4, 8)),
    ),
    ("append_mla no positions", TYPE, "positions", lambda s: append_rotated(positions=None)),
    (
        "append_mla few positions",
        VALUE,
        "positions",
        lambda s: append_rotated(positions=integers(0, 1)),
    ),
    (
        "append_mla far position",
        VALUE,
        r"positions\[1\]",
        lambda s: append_rotated(positions=int64(0, 2**41, 2)),
    ),
    ("append_mla q_pe dims", VALUE, "q_pe", lambda s: append_rotated(q_pe=zeros(3, 2, 5))),
    ("append_mla q_pe rows", VALUE, "q_pe", lambda s: append_rotated(q_pe=zeros(2, 2, 4))),
    ("append_mla q_pe dtype", TYPE, "q_pe", lambda s: append_rotated(q_pe=half(3, 2, 4))),
    (
        "append_mla kv_c in the cache",
        VALUE,
        "cache",
        lambda s: append(cache=CACHE, kv_c=CACHE[0, :3, :8]),
    ),
    (
        "append_mla kv_dtype",
        TYPE,
        "kv_dtype",
        lambda s: append(kv_dtype="float8_e4m3fn"),
    ),
    (
        "append_mla kv_dtype name",
        fp.UnsupportedError,
        "kv_dtype",
        lambda s: append(kv_dtype="int8"),
    ),
    ("append_mla ds_mla scale", VALUE, "scale", lambda s: append_ds_mla(scale=0.5)),
    (
        "append_mla ds_mla dtype",
        TYPE,
        "kv_c",
        lambda s: append_ds_mla(kv_c=zeros(3, 512), k_pe=zeros(3, 64)),
    ),
    (
        "append_mla ds_mla dims",
        VALUE,
        "cache",
        lambda s: append_ds_mla(kv_c=zeros(3, 8, dtype=BF16)),
    ),
]

GATHER_MLA = [
    ("gather_mla cache dims", VALUE, "cache", lambda s: gather(cache=zeros(3, 12))),
    (
        "gather_mla cache integers",
        TYPE,
        "cache",
        lambda s: gather(cache=zeros(3, 4, 12, dtype="i4")),
    ),
    (
        "gather_mla tail page",
        VALUE,
        "cache_tail",
        lambda s: gather(cache=(zeros(3, 4, 8), zeros(3, 5, 4))),
    ),
    ("gather_mla out dims", VALUE, "out", lambda s: gather(out=zeros(5, 13))),
    ("gather_mla out short", VALUE, "out", lambda s: gather(out=zeros(4, 12))),
    ("gather_mla out dtype", TYPE, "out", lambda s: gather(out=half(5, 12))),
    ("gather_mla out pair", VALUE, "out_tail", lambda s: gather(out=(zeros(5, 8), zeros(4, 4)))),
    ("gather_mla out pair dims", VALUE, "cache", lambda s: gather(out=(zeros(5, 8), zeros(5, 5)))),
    ("gather_mla out read only", TYPE, "out", lambda s: gather(out=read_only(zeros(5, 12)))),
    ("gather_mla no table", TYPE, "block_table", lambda s: gather(block_table=None)),
    ("gather_mla table rows", VALUE, "block_table", lambda s: gather(block_table=integers([0, 1]))),
    (
        "gather_mla table columns",
        VALUE,
        "block_table",
        lambda s: gather(block_table=integers([0], [1])),
    ),
    (
        "gather_mla page outside",
        VALUE,
        r"block_table\[1, 1\]",
        lambda s: gather(block_table=integers([0, 0], [1, 3])),
    ),
    ("gather_mla indptr int64", TYPE, "kv_indptr", lambda s: gather(kv_indptr=int64(0, 2, 5))),
    ("gather_mla indptr empty", VALUE, "kv_indptr", lambda s: gather(kv_indptr=integers())),
    (
        "gather_mla indptr below 0",
        VALUE,
        r"kv_indptr\[0\]",
        lambda s: gather(kv_indptr=integers(-1, 2, 5)),
    ),
    (
        "gather_mla indptr falls",
        VALUE,
        r"kv_indptr\[1\]",
        lambda s: gather(kv_indptr=integers(3, 2, 5)),
    ),
    ("gather_mla starts", VALUE, "starts", lambda s: gather(starts=integers(2))),
    ("gather_mla starts below 0", VALUE, r"starts\[0\]", lambda s: gather(starts=integers(-1, 3))),
    ("gather_mla scale", VALUE, "scale", lambda s: gather(scale=float("nan"))),
    (
        "gather_mla out in the cache",
        VALUE,
        "out",
        lambda s: gather(cache=CACHE, out=CACHE.reshape(12, 12)[:5]),
    ),
]
