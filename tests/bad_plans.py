# SPDX-License-Identifier: Apache-2.0
"""Options and plan(): see bad_inputs.py."""

import numpy as np

import flashplan as fp
from scene import int64, integers, read_only, zeros

NAN, INF = float("nan"), float("inf")
VALUE, TYPE, UNSUPPORTED = ValueError, TypeError, fp.UnsupportedError
ROPE = fp.Rope()

OPTIONS = [
    ("num_qo_heads zero", VALUE, "num_qo_heads", lambda s: s.attention(num_qo_heads=0)),
    ("num_qo_heads negative", VALUE, "num_qo_heads", lambda s: s.attention(num_qo_heads=-4)),
    ("num_qo_heads text", TYPE, "num_qo_heads", lambda s: s.attention(num_qo_heads="4")),
    ("num_kv_heads zero", VALUE, "num_kv_heads", lambda s: s.attention(num_kv_heads=0)),
    ("num_kv_heads no divisor", VALUE, "num_qo_heads", lambda s: s.attention(num_kv_heads=3)),
    ("head_dim zero", VALUE, "head_dim", lambda s: s.attention(head_dim=0)),
    ("head_dim vo zero", VALUE, "head_dim", lambda s: s.attention(head_dim=(8, 0))),
    ("head_dim huge", VALUE, "head_dim_(qk|vo)", lambda s: s.attention(head_dim=1 << 20)),
    ("head_dim of three", VALUE, "head_dim", lambda s: s.attention(head_dim=(8, 8, 8))),
    ("head_dim text", TYPE, "head_dim", lambda s: s.attention(head_dim="64")),
    ("page_size zero", VALUE, "page_size", lambda s: s.attention(page_size=0)),
    ("page_size negative", VALUE, "page_size", lambda s: s.attention(page_size=-16)),
    ("window_left of 2**31", VALUE, "window_left", lambda s: s.attention(window_left=2**31)),
    ("window_left -2", VALUE, "window_left", lambda s: s.attention(window_left=-2)),
    ("softmax_scale NaN", VALUE, "softmax_scale", lambda s: s.attention(softmax_scale=NAN)),
    ("softmax_scale infinite", VALUE, "softmax_scale", lambda s: s.attention(softmax_scale=INF)),
    ("softmax_scale zero", VALUE, "softmax_scale", lambda s: s.attention(softmax_scale=0.0)),
    ("softmax_scale negative", VALUE, "softmax_scale", lambda s: s.attention(softmax_scale=-0.1)),
    ("softmax_scale tiny", VALUE, "softmax_scale", lambda s: s.attention(softmax_scale=1e-40)),
    ("softcap negative", VALUE, "softcap", lambda s: s.attention(softcap=-1.0)),
    ("softcap tiny", VALUE, "softcap", lambda s: s.attention(softcap=1e-40)),
    ("softcap zero in float32", VALUE, "softcap", lambda s: s.attention(softcap=1e-60)),
    ("softcap NaN", VALUE, "softcap", lambda s: s.attention(softcap=NAN)),
    ("kv_layout array", VALUE, "kv_layout", lambda s: s.attention(kv_layout=integers())),
    ("kv_layout unknown", VALUE, "kv_layout", lambda s: s.attention(kv_layout="DNH")),
    ("max_batch_size zero", VALUE, "max_batch_size", lambda s: s.attention(max_batch_size=0)),
    ("max_batch_size huge", VALUE, "max_batch_size", lambda s: s.attention(max_batch_size=1 << 30)),
    ("max_qo_tokens zero", VALUE, "max_qo_tokens", lambda s: s.attention(max_qo_tokens=0)),
    ("max_qo_tokens huge", VALUE, "max_qo_tokens", lambda s: s.attention(max_qo_tokens=1 << 30)),
    (
        "max_qo_tokens over int32",
        VALUE,
        "max_qo_tokens",
        lambda s: s.attention(max_qo_tokens=1 << 40),
    ),
    ("num_ctas negative", VALUE, "num_ctas", lambda s: s.attention(num_ctas=-1)),
    ("num_ctas zero", VALUE, "num_ctas", lambda s: s.attention(num_ctas=0)),
    ("causal text", TYPE, "causal", lambda s: s.attention(causal="no")),
    ("custom_mask number", TYPE, "custom_mask", lambda s: s.attention(custom_mask=1)),
    ("lse_base2 number", TYPE, "lse_base2", lambda s: s.attention(lse_base2=1)),
    ("kernels that are none", VALUE, "kernels", lambda s: s.attention(kernels="sm90")),
    ("kernels number", VALUE, "kernels", lambda s: s.attention(kernels=1)),
    ("batch_invariant number", TYPE, "batch_invariant", lambda s: s.attention(batch_invariant=1)),
    ("softcap over float", VALUE, "softcap", lambda s: s.attention(softcap=10**400)),
    ("softcap bytes", TYPE, "softcap", lambda s: s.attention(softcap=memoryview(b"30"))),
    ("softcap text", TYPE, "softcap", lambda s: s.attention(softcap="30")),
    ("num_ctas huge", VALUE, "num_ctas", lambda s: s.attention(num_ctas=1 << 20)),
    (
        "q_dtype float8 over a wide cache",
        UNSUPPORTED,
        "kv_dtype",
        lambda s: s.attention(q_dtype="float8_e4m3fn", kv_dtype="bfloat16"),
    ),
    ("q_dtype unknown", UNSUPPORTED, "q_dtype", lambda s: s.attention(q_dtype="float128")),
    ("kv_dtype other", UNSUPPORTED, "kv_dtype", lambda s: s.attention(kv_dtype="float16")),
    ("o_dtype float8", UNSUPPORTED, "o_dtype", lambda s: s.attention(o_dtype="float8_e5m2")),
    ("variant text", TYPE, "variant", lambda s: s.attention(variant="alibi")),
    ("rope number", TYPE, "rope", lambda s: s.attention(rope=10000.0)),
    ("rope theta", VALUE, "rope.theta", lambda s: s.attention(rope=fp.Rope(theta=1.0))),
    (
        "rope of more dims",
        VALUE,
        "rope.rotary_dim",
        lambda s: s.attention(rope=fp.Rope(rotary_dim=10)),
    ),
    (
        "rope of one dim",
        VALUE,
        "rope.rotary_dim",
        lambda s: s.attention(rope=fp.Rope(), head_dim=1),
    ),
    (  # no GPU, or none that takes float32
        "device without kernels",
        UNSUPPORTED,
        "(device|q_dtype)",
        lambda s: s.attention(device="cuda:0"),
    ),
    ("device unknown", VALUE, "device", lambda s: s.attention(device="toaster")),
    (
        "workspace small",
        VALUE,
        "workspace",
        lambda s: s.attention(workspace=zeros(512, dtype=np.uint8)),
    ),
    ("workspace text", TYPE, "workspace", lambda s: s.attention(workspace="many")),
    (
        "workspace read-only",
        TYPE,
        "workspace",
        lambda s: s.attention(workspace=read_only(workspace())),
    ),
    (
        "num_qo_heads above the limit",
        VALUE,
        "num_qo_heads",
        lambda s: s.attention(num_qo_heads=65540),
    ),
    ("device of a huge index", VALUE, "device", lambda s: s.attention(device="cuda:9999999999")),
    ("device of another digit", VALUE, "device", lambda s: s.attention(device="cuda:\u00b2")),
    (
        "workspace of objects",
        TYPE,
        "workspace",
        lambda s: s.attention(workspace=np.empty(1 << 19, object)),
    ),
    ("workspace strided", VALUE, "workspace", lambda s: s.attention(workspace=workspace()[::2])),
]


def find(**changes):
    arguments = {"qo_indptr": [0, 1, 2], "kv_lens": [9, 9], "page_size": 4, "block_table": TABLE}
    return fp.find_shared_prefixes(**arguments | changes)


def csr(page_indptr, page_indices):
    tables = {"page_indptr": integers(*page_indptr), "page_indices": integers(*page_indices)}
    return {"block_table": None} | tables


PLAN = [
    ("qo_indptr empty", VALUE, "qo_indptr", lambda s: s.plan(qo_indptr=[])),
    ("qo_indptr from 1", VALUE, r"qo_indptr\[0\]", lambda s: s.plan(qo_indptr=[1, 3, 4])),
    ("qo_indptr decreasing", VALUE, r"qo_indptr\[2\]", lambda s: s.plan(qo_indptr=[0, 3, 2])),
    ("qo_indptr short", VALUE, "(qo_indptr|kv_lens)", lambda s: s.plan(qo_indptr=[0, 3])),
    ("qo_indptr long", VALUE, "(qo_indptr|kv_lens)", lambda s: s.plan(qo_indptr=[0, 1, 2, 3])),
    (
        "qo_indptr int64 over int32",
        VALUE,
        r"qo_indptr\[2\]",
        lambda s: s.plan(qo_indptr=int64(0, 3, (1 << 32) + 4)),
    ),
    (
        "qo_indptr float",
        TYPE,
        "qo_indptr",
        lambda s: s.plan(qo_indptr=integers(0, 3, 4, dtype="f4")),
    ),
    ("qo_indptr matrix", VALUE, "qo_indptr", lambda s: s.plan(qo_indptr=integers([0, 3, 4]))),
    ("qo_indptr text", TYPE, "qo_indptr", lambda s: s.plan(qo_indptr="034")),
    ("qo_indptr range", VALUE, "qo_indptr", lambda s: s.plan(qo_indptr=range(1 << 40))),
    ("kv_lens range", VALUE, r"kv_lens\[1\]", lambda s: s.plan(kv_lens=range(0, -2, -1))),
    ("qo_indptr of floats", TYPE, r"qo_indptr\[1\]", lambda s: s.plan(qo_indptr=[0, 3.5, 4])),
    ("qo_indptr over int32", VALUE, r"qo_indptr\[2\]", lambda s: s.plan(qo_indptr=[0, 3, 1 << 40])),
    ("too many tokens", VALUE, r"qo_indptr\[2\]", lambda s: s.plan(qo_indptr=[0, 3, 5])),
    ("kv_lens negative", VALUE, r"kv_lens\[1\]", lambda s: s.plan(kv_lens=[9, -3])),
    (
        "kv_lens int64 below int32",
        VALUE,
        r"kv_lens\[1\]",
        lambda s: s.plan(kv_lens=int64(9, -(1 << 31) - 1)),
    ),
    (
        "kv_lens unsigned over int32",
        VALUE,
        r"kv_lens\[0\]",
        lambda s: s.plan(kv_lens=integers((1 << 31) + 9, 6, dtype="u4")),
    ),
    (
        "kv_lens uint64 over int64",
        VALUE,
        r"kv_lens\[1\]",
        lambda s: s.plan(kv_lens=integers(9, (1 << 64) - 6, dtype="u8")),
    ),
    ("kv_lens bool", TYPE, "kv_lens", lambda s: s.plan(kv_lens=integers(1, 1, dtype="?"))),
    (
        "kv_lens bfloat16",
        TYPE,
        "kv_lens",
        lambda s: s.plan(kv_lens=integers(9, 6, dtype="bfloat16")),
    ),
    ("kv_lens scalar", TYPE, "kv_lens", lambda s: s.plan(kv_lens=9)),
    ("kv_lens matrix", VALUE, "kv_lens", lambda s: s.plan(kv_lens=integers([9, 6]))),
    ("kv_lens over 2^32", VALUE, r"kv_lens\[0\]", lambda s: s.plan(kv_lens=[(1 << 32) + 9, 6])),
    ("kv_lens over int32", VALUE, r"kv_lens\[0\]", lambda s: s.plan(kv_lens=[1 << 31, 6])),
    (
        "too many requests",
        VALUE,
        "kv_lens",
        lambda s: s.plan(qo_indptr=[0, 1, 2, 3], kv_lens=[1] * 3),
    ),
    ("kv_indptr with pages", VALUE, "kv_indptr", lambda s: s.plan(kv_indptr=[0, 9, 15])),
    ("kv_indptr short", VALUE, "kv_indptr", lambda s: s.plan_ragged(kv_indptr=[0, 9])),
    (
        "kv_indptr negative",
        VALUE,
        r"kv_indptr\[0\]",
        lambda s: s.plan_ragged(kv_indptr=[-1, 9, 15]),
    ),
    ("kv_indptr tight", VALUE, r"kv_indptr\[1\]", lambda s: s.plan_ragged(kv_indptr=[0, 8, 15])),
    (
        "kv_indptr decreasing",
        VALUE,
        r"kv_indptr\[2\]",
        lambda s: s.plan_ragged(kv_indptr=[0, 9, 3]),
    ),
    (
        "kv_lens sum over int32",
        VALUE,
        "kv_lens",
        lambda s: s.plan_ragged(kv_lens=[2**31 - 1] * 2, kv_indptr=None),
    ),
    (
        "mask_begin without custom_mask",
        VALUE,
        "mask_begin",
        lambda s: s.plan(mask_begin=[6, 5]),
    ),
    (
        "mask_begin negative",
        VALUE,
        r"mask_begin\[1\]",
        lambda s: s.plan_masked(mask_begin=[6, -1]),
    ),
    ("mask_begin short", VALUE, "mask_begin", lambda s: s.plan_masked(mask_begin=[6])),
    ("mask_begin long", VALUE, "mask_begin", lambda s: s.plan_masked(mask_begin=[6, 5, 4])),
    ("mask_begin float", TYPE, "mask_begin", lambda s: s.plan_masked(mask_begin=zeros(2))),
    ("mask_begin scalar", TYPE, "mask_begin", lambda s: s.plan_masked(mask_begin=6)),
    ("kv_lens of objects", TYPE, "kv_lens", lambda s: s.plan(kv_lens=np.empty(2, object))),
    (
        "kv_lens of another byte order",
        TYPE,
        "kv_lens",
        lambda s: s.plan(kv_lens=integers(9, 6, dtype=">i4")),
    ),
    *(
        (f"shared_prefixes {name}", exception, where, lambda s, g=groups: s.plan(shared_prefixes=g))
        for name, exception, where, groups in (
            ("of no request", VALUE, r"shared_prefixes\[0\]", [[0, 0, 4]]),
            ("before the first", VALUE, r"shared_prefixes\[1\]", [[0, 1, 4], [-1, 1, 4]]),
            ("after the last", VALUE, r"shared_prefixes\[0\]", [[1, 2, 4]]),
            ("of too many requests", VALUE, r"shared_prefixes\[0\]", [[0, 1 << 31, 4]]),
            ("negative", VALUE, r"shared_prefixes\[0\]", [[0, 2, -4]]),
            ("too long", VALUE, r"shared_prefixes\[1\]", [[0, 2, 2], [0, 2, 7]]),
            ("too long around another", VALUE, r"shared_prefixes\[0\]", [[0, 2, 6], [1, 1, 2]]),
            ("too many", VALUE, "shared_prefixes", [[0, 1, 1]] * 600),
            ("flat", TYPE, r"shared_prefixes\[0\]", [0, 2, 4]),
            ("of two columns", VALUE, r"shared_prefixes\[1\]", [[0, 2, 4], [0, 2]]),
            ("of floats", TYPE, r"shared_prefixes\[0\]\[2\]", [[0, 2, 4.5]]),
            ("array flat", VALUE, "shared_prefixes", integers(0, 2, 4)),
            ("array of two columns", VALUE, "shared_prefixes", integers([0, 2])),
            ("array of floats", TYPE, "shared_prefixes", integers([0, 2, 4], dtype="f4")),
            ("array over int32", VALUE, r"shared_prefixes\[0\]", int64([0, 2, 1 << 40])),
            ("text", TYPE, "shared_prefixes", "0 2 4"),
            ("number", TYPE, "shared_prefixes", 7),
        )
    ),
    ("kv_lens endless", VALUE, "kv_lens", lambda s: s.plan(kv_lens=endless())),
    ("qo_indptr endless", VALUE, "qo_indptr", lambda s: s.plan(qo_indptr=endless())),
    ("kv_lens emptied", VALUE, "kv_lens", lambda s: s.plan(kv_lens=emptied())),
    (
        "kv_lens overflowing",
        VALUE,
        r"kv_indptr\[2\]",
        lambda s: s.plan_ragged(kv_lens=[9, 0], kv_indptr=[0, 2**31 - 1, -2]),
    ),
]


TABLE = integers([0, 1, 2], [0, 1, 3])
FIND = [
    (f"find {name}", exception, where, lambda s, c=changes: find(**c))
    for name, exception, where, changes in (
        ("qo_indptr from 1", VALUE, r"qo_indptr\[0\]", {"qo_indptr": [1, 2, 3]}),
        ("qo_indptr decreasing", VALUE, r"qo_indptr\[2\]", {"qo_indptr": [0, 2, 1]}),
        ("qo_indptr short", VALUE, "qo_indptr", {"qo_indptr": [0, 2]}),
        ("kv_lens negative", VALUE, r"kv_lens\[1\]", {"kv_lens": [9, -1]}),
        ("kv_lens of floats", TYPE, r"kv_lens\[0\]", {"kv_lens": [9.5, 1]}),
        ("page_size 0", VALUE, "page_size", {"page_size": 0}),
        ("page_size of text", TYPE, "page_size", {"page_size": "4"}),
        ("page_size over int32", VALUE, "page_size", {"page_size": 1 << 40}),
        ("no table", VALUE, "block_table", {"block_table": None}),
        ("both tables", VALUE, "block_table", {"page_indptr": TABLE[0], "page_indices": TABLE[0]}),
        ("block_table int64", TYPE, "block_table", {"block_table": int64([0, 1, 2], [0, 1, 3])}),
        ("block_table flat", VALUE, "block_table", {"block_table": TABLE[0]}),
        ("block_table short", VALUE, "block_table", {"block_table": TABLE[:1]}),
        ("block_table narrow", VALUE, "block_table", {"block_table": TABLE[:, :2]}),
        ("block_table a list", TYPE, "block_table", {"block_table": [[0, 1, 2], [0, 1, 3]]}),
        ("page_indptr short", VALUE, "page_indptr", csr([0, 3], [0] * 6)),
        ("page_indptr decreasing", VALUE, r"page_indptr\[2\]", csr([0, 3, 2], [0] * 6)),
        ("page_indptr beyond", VALUE, r"page_indptr\[2\]", csr([0, 3, 7], [0] * 6)),
        ("page_indptr of few pages", VALUE, r"page_indptr\[1\]", csr([0, 2, 5], [0] * 6)),
    )
]


def workspace():
    return zeros(1 << 24, dtype=np.uint8)


def endless():
    """2^31 - 1 entries in the memory of one."""
    return np.broadcast_to(np.int32(1), 2**31 - 1)


def emptied():
    """A list that loses its items while they are read."""

    class Item:
        def __index__(self):
            items.clear()
            return 9

    items = [Item(), 6]
    return items
