# SPDX-License-Identifier: Apache-2.0
"""The cases of the CPU tests for which the GPU at hand has kernels, and more cases for GPUs."""

import dataclasses
import os

import numpy as np

import flashplan as fp
from batches import BATCH
from case import Case
from cases import CASES
from gpu_schedule_cases import DIVIDED, PREFIXES, PREPARED

DEVICE = "cuda:0"
SOAK = int(os.environ.get("FLASHPLAN_SOAK", 20000))  # replays of a graph in the longest tests

# For tests of other things than the results: a batch, and an Attention that has planned it.
CASE = Case(**BATCH)


def planned(inputs, **options):
    attn = fp.Attention(**CASE.options() | {"device": DEVICE} | options)
    attn.plan(*inputs.plan_args())
    return attn


def on_gpu(case):
    """Makes float32 queries, which no GPU kernel takes, bfloat16 or float16, half and half."""
    if case.q_dtype != "float32":
        return case
    dtype = "bfloat16" if case.num_kv_heads % 2 else "float16"
    return dataclasses.replace(case, q_dtype=dtype, gain=min(case.gain, 50.0))


def is_supported(case):
    return fp.is_supported(**case.options() | {"device": DEVICE})[0]


# Batches with more rows than any body of the kernel takes, and with many work queues.
LARGER = [
    Case((1,) * 64, tuple(17 * i for i in range(64)), num_qo_heads=8, num_kv_heads=2, head_dim=128),
    Case((300, 1, 1, 40), (300, 900, 2, 4000), num_qo_heads=8, num_kv_heads=2, head_dim=128),
    Case((700,), (700,), head_dim=128, page_size=None, window_left=200),
    Case((129, 128, 127), (129, 500, 127), head_dim=128, page_size=None, causal=False),
    # Several heads of one work tile, each of several tiles of keys.
    Case((70,) * 3, (300, 90, 1200), num_qo_heads=8, num_kv_heads=8, head_dim=128, num_ctas=2),
    Case((70,) * 3, (300, 90, 1200), num_kv_heads=4, head_dim=128, num_ctas=3, page_size=1),
    # Pages that are too small for boxes of tensor maps.
    Case((300, 1, 70), (900, 40, 1500), num_qo_heads=8, head_dim=128, page_size=3, csr=True),
    Case((140, 40), (700, 3000), page_size=5, kv_layout="HND", head_dim=72),
    Case((130, 90), (500, 128), head_dim=128, page_size=1, memory="strided", num_ctas=5),
    Case((200, 33), (1000, 64), planned_lens=(2000, 300), head_dim=128, page_size=2, num_ctas=7),
    Case((17, 16, 15), (64, 65, 63), num_qo_heads=4, num_kv_heads=4, head_dim=128),
    Case((1, 1), (20000, 3), num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=1),
    Case((64,), (3000,), num_qo_heads=16, num_kv_heads=2, head_dim=256),
    # Two warps share rows; with 8-bit keys a step has two parts.
    Case((130, 40), (500, 900), num_qo_heads=8, num_kv_heads=2, head_dim=256, num_ctas=3),
    Case((70,), (400,), head_dim=256, q_dtype="float16", kv_dtype="float8_e4m3fn", page_size=3),
    Case((90, 1), (5000, 9000), num_qo_heads=2, num_kv_heads=2, head_dim=256, batch_invariant=True),
    Case((300,), (300,), head_dim=256, page_size=None, window_left=70, softcap=20.0),
    # More rows than the warps hold, with few keys in a step, and outputs of another dtype.
    Case((40, 12), (333, 9000), num_qo_heads=1, num_kv_heads=1, head_dim=256, o_dtype="float32"),
    Case((12,), (9000,), num_qo_heads=2, head_dim=(192, 128), batch_invariant=True),
    Case((1,) * 3, (5000, 300, 17), head_dim=(192, 128), num_qo_heads=16, num_kv_heads=2),
    Case((100, 1), (100, 2500), head_dim=(192, 128), page_size=None),
]

# More than 256 dims: warps share rows and take different dims of values.
LARGER += [
    Case(qo, kv, num_qo_heads=8, num_kv_heads=4, head_dim=dims, **options)
    for qo, kv in (
        ((1, 1, 3), (700, 5000, 90)),
        ((300, 1, 64, 33), (300, 900, 64, 2100)),
    )
    for dims, options in (
        (512, {}),
        (512, {"page_size": None, "q_dtype": "float16", "window_left": 100, "num_ctas": 7}),
        (512, {"kv_dtype": "float8_e4m3fn", "page_size": 64, "sinks": True}),
        (512, {"batch_invariant": True, "page_size": 1, "num_ctas": 40}),
        (512, {"softcap": 20.0, "kv_layout": "HND", "csr": True, "o_dtype": "float32"}),
        (512, {"custom_mask": "random", "memory": "strided", "page_size": 5}),
        (512, {"rope": "plain"}),
        (512, {"variant": "alibi", "causal": False}),
        (512, {"page_ids": "missing", "num_ctas": 3}),
        (384, {"page_size": 8}),
        (320, {"kv_dtype": "float8_e4m3fn", "q_dtype": "float16", "page_size": None}),
        ((512, 300), {"window_left": 250}),
        ((130, 512), {"lse_base2": True}),
        (301, {"page_size": None, "memory": "strided"}),
    )
]
LARGER += [
    Case(
        (200, 1, 3),
        (900, 4000, 41),
        planned_lens=(1500, 6000, 700),
        num_qo_heads=4,
        head_dim=512,
        num_ctas=num_ctas,
    )
    for num_ctas in (3, 40, None)
]

# Queues in which work tiles of more than 64 rows, of fewer, and without keys follow each other.
LARGER += [
    Case(
        (1, 200, 3, 150, 70, 1, 16, 33),
        (300, 200, 3, 20, 71, 1, 2000, 700),
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=dim,
        num_ctas=num_ctas,
        page_size=page_size,
    )
    for dim in (64, 128, 256, (192, 128))
    for num_ctas, page_size in ((1, 16), (3, 64), (7, None))
]

# Requests shorter than planned, so that pieces of splits have no keys, in every body of both
# families.
LARGER += [
    Case(qo, kv, planned_lens=planned, num_qo_heads=8, head_dim=dim, **options)
    for qo, kv, planned in (
        ((1, 1), (3, 9000), (20000, 9100)),
        ((12, 1), (700, 0), (9000, 40)),
        ((300,), (310,), (5000,)),
        ((200, 150), (4000, 200), (4001, 6000)),
    )
    for dim in (64, 128, 256)
    for options in (
        {"num_ctas": 40},
        {"num_ctas": 40, "page_size": None, "window_left": 250},
        {"num_ctas": 40, "window_left": 250, "batch_invariant": True},
    )
]

LARGER += PREPARED + PREFIXES + DIVIDED

# Decodes whose kv heads are read two at a time: whole and cut, with a head left over, drafts,
# unaligned tensors, and queries too small for float16.
LARGER += [
    Case(qo, kv, num_ctas=ctas, **heads, **short_rows, **options)
    for qo, kv, options in (
        ((1,) * 9, (300, 4000, 70, 1, 900, 64, 65, 2000, 0), {}),
        ((2, 1, 1, 2), (700, 3000, 129, 1), {"page_size": 1, "device_scales": "heads"}),
        ((1,) * 5, (500, 1, 4000, 90, 16), {"page_size": 64, "window_left": 250, "csr": True}),
        ((1,) * 4, (900, 90, 2000, 60), {"planned_lens": (2000, 300, 2000, 61), "sinks": True}),
        ((1, 2, 1), (3000, 70, 900), {"memory": "strided", "o_dtype": "float32"}),
        ((1, 1, 30), (3000, 900, 500), {"softcap": 20.0, "kv_layout": "HND", "gain": 1e-30}),
        ((1,) * 6, (700,) * 6, {"gain": 50.0, "memory": "combined"}),
        ((1,) * 3, (900, 70, 2000), {"special": (("q", float("inf")), ("v", float("nan")))}),
    )
    for ctas, heads in (
        (3, {"num_qo_heads": 12, "num_kv_heads": 3}),
        (5, {"num_qo_heads": 8, "num_kv_heads": 8}),
        (7, {"num_qo_heads": 32, "num_kv_heads": 4}),
    )
    for short_rows in (
        {"head_dim": 64},
        {"head_dim": 80, "q_dtype": "float16"},
        {"head_dim": 128, "kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 1.7},
        {"head_dim": 64, "kv_dtype": "float8_e5m2"},
    )
] + [
    Case((1,) * 9, (900,) * 9, num_qo_heads=8, num_kv_heads=4, head_dim=80, page_size=None),
]

# TMA boxes of every size. Work tiles have more steps than one batch of page ids is enough for. Some
# requests are split, some tiles have several kv heads, and some lengths end inside of a box.
LARGER += [
    Case(qo, kv, num_qo_heads=8, num_kv_heads=kv_heads, head_dim=dim, page_size=page, **options)
    for qo, kv, kv_heads, options in (
        ((130, 3, 70), (9001, 3000, 1090), 2, {"csr": True}),
        ((40, 200, 1), (700, 5000, 4400), 8, {"num_ctas": 7, "kv_layout": "HND"}),
        ((260, 40), (3000, 100), 2, {"planned_lens": (9000, 4100), "window_left": 2500}),
    )
    for dim, pages in ((64, (8, 16, 32)), (128, (8, 32, 48, 64, 256)), (256, (8, 16)))
    for page in pages
] + [Case((200, 9), (6000, 5000), head_dim=(192, 128), page_size=page) for page in (24, 64, 128)]

# Masks of bits in every body, in splits and chunks.
LARGER += [
    Case(qo, kv, custom_mask=kind, num_qo_heads=8, head_dim=dim, **options)
    for qo, kv, kind, options in (
        ((64,) * 4, (1500, 70, 64, 4000), "tree", {}),
        ((3, 12, 1), (5000, 300, 20000), "random", {"num_ctas": 40}),
        ((300, 5), (900, 40), "random", {"causal": False, "mask_begin": (77, 3)}),
        ((40, 90), (5000, 90), "random", {"batch_invariant": True, "planned_lens": (9000, 100)}),
    )
    for dim in (64, 128, 256)
] + [
    Case((64, 1), (700, 90), custom_mask="random", head_dim=128, kv_dtype="float8_e4m3fn"),
    Case((64, 9), (700, 90), custom_mask="random", head_dim=256, kv_dtype="float8_e5m2"),
]

# Sinks in every body: whole, merged by few and by many rows, in chunks, of prefixes' readers, with
# rows that see no key.
LARGER += [
    Case(qo, kv, sinks=True, num_qo_heads=8, head_dim=dim, **options)
    for qo, kv, options in (
        ((1, 1, 4), (9000, 70, 0), {}),
        ((300, 12, 5), (900, 7000, 2), {"num_ctas": 40}),
        ((40, 90), (5000, 90), {"batch_invariant": True}),
        ((1, 200), (3000, 4000), {"page_size": 64, "planned_lens": (9000, 4100), "num_ctas": 40}),
        ((70, 1), (700, 9000), {"o_dtype": "float32", "memory": "strided"}),
        ((1, 70), (9000, 300), {"special": (("sinks", float("nan")),)}),
    )
    for dim in (64, 128, 256)
] + [dataclasses.replace(case, sinks=True) for case in PREFIXES[:6]]

# lse to base 2, in the bodies and merges that write it, beside sinks.
LARGER += [
    Case(qo, kv, lse_base2=True, num_qo_heads=8, head_dim=dim, **options)
    for qo, kv, options in (
        ((1, 1, 4), (9000, 70, 0), {"sinks": True}),
        ((300, 12, 5), (900, 7000, 2), {"num_ctas": 40}),
        ((40, 90), (5000, 90), {"batch_invariant": True}),
        ((70, 1), (700, 9000), {"o_dtype": "float32", "memory": "strided", "variant": "biased"}),
        ((1, 1), (9000, 80), {"kv_dtype": "float8_e4m3fn"}),
    )
    for dim in (64, 128, 256)
] + [dataclasses.replace(case, lse_base2=True) for case in PREFIXES[:3]]

# Scales that the kernels read, in every body; of several heads of one work tile.
LARGER += [
    Case(qo, kv, device_scales=scales, num_qo_heads=8, num_kv_heads=kv_heads, head_dim=dim, **other)
    for qo, kv, kv_heads, other in (
        ((1, 1, 4), (9000, 70, 5), 4, {"kv_dtype": "float8_e4m3fn"}),
        ((70,) * 3, (300, 90, 1200), 8, {"num_ctas": 2}),
        ((40, 90), (5000, 90), 2, {"batch_invariant": True, "kv_dtype": "float8_e5m2"}),
        ((300, 1), (900, 7000), 2, {"page_size": 64, "num_ctas": 40}),
        ((70, 1), (700, 9000), 4, {"softcap": 20.0, "o_dtype": "float32"}),
    )
    for dim in (64, 128, 256)
    for scales in ("one", "heads")
] + [dataclasses.replace(case, device_scales="heads") for case in PREFIXES[:6]]

# Variants that both families serve: of several row tiles and heads, in splits, with masks of bits.
LARGER += [
    Case(qo, kv, variant=variant, num_qo_heads=8, num_kv_heads=kv_heads, head_dim=dim, **options)
    for qo, kv, kv_heads, options in (
        ((300, 1, 40), (900, 7000, 41), 2, {"num_ctas": 40}),
        ((70,) * 3, (300, 90, 1200), 8, {"num_ctas": 2, "page_size": None, "o_dtype": "float32"}),
        ((64, 9, 1), (700, 90, 300), 4, {"custom_mask": "tree", "memory": "strided"}),
    )
    for variant in ("ends", "biased", "prefix_lm", "sigmoid")
    for dim in (128, 256)
]

# RoPE in the bodies for few, some and many rows: all dims of a head or a part of them, in chunks of
# 8 dims or one by one, several kv heads in a work tile, split requests, and states of key chunks.
LARGER += [
    Case(qo, kv, rope=rope, num_qo_heads=8, num_kv_heads=kv_heads, head_dim=dim, **options)
    for qo, kv, kv_heads, options in (
        ((1, 1, 4), (9000, 70, 5), 4, {}),
        ((70,) * 3, (300, 90, 1200), 8, {"num_ctas": 2}),
        ((40, 90), (5000, 90), 2, {"batch_invariant": True, "page_size": 3}),
        ((300, 1), (900, 7000), 2, {"page_size": None, "window_left": 250, "num_ctas": 40}),
    )
    for dim, rope in ((64, "plain"), (128, "llama3"), (128, "yarn interleaved"), (256, "scaled"))
] + [
    Case((70, 3), (700, 3000), rope="plain", head_dim=(192, 128), variant="biased"),
    Case((70, 3), (700, 3000), rope="yarn factor", head_dim=80, memory="strided"),
]
# Requests of one token have 16 heads: of 4 values of lse the twin may by luck err so little that
# right results exceed the budget.
LARGER += [
    Case(qo, kv, num_qo_heads=16, rope=rope, head_dim=dim, **options)
    for qo, kv, rope, dim, options in (
        ((70, 1), (700, 3000), "partial", 128, {"softcap": 20.0}),
        ((70, 1), (700, 3000), "partial interleaved", 96, {"variant": "elements"}),
        ((300, 1), (900, 3000), "plain", 128, {"variant": "ends", "num_ctas": 5}),
        ((300, 1), (900, 3000), "partial interleaved", 128, {"num_ctas": 5}),
        ((64, 9, 1), (700, 90, 300), "llama3", 128, {"custom_mask": "tree"}),
        ((300, 1), (900, 7000), "partial", (192, 128), {"page_size": 64, "num_ctas": 40}),
        ((300, 1), (900, 70), "plain", 72, {"q_dtype": "float16", "page_size": 1}),
    )
]

# Rotations of tiles of few rows, which take parts of the memory of queries, among tiles of many
# rows; of lengths from the device; of requests with more queries than keys.
_MIXED = (300, 1, 9, 200, 1, 1, 64, 65), (900, 700, 90, 2000, 3, 0, 64, 65)
LARGER += [
    Case(qo, kv, rope=rope, num_qo_heads=8, num_kv_heads=kv_heads, head_dim=dim, **options)
    for qo, kv, kv_heads, options in (
        (*_MIXED, 4, {"num_ctas": 3}),
        ((1, 200, 5), (3000, 4000, 2), 2, {"planned_lens": (9000, 4100, 5), "num_ctas": 40}),
        ((5, 129), (2, 129), 8, {"causal": False, "page_size": None, "o_dtype": "float32"}),
    )
    for dim, rope in ((64, "partial"), (128, "plain"), (128, "interleaved"), (96, "yarn"))
]

# Page ids that are none of the cache, in every loader: of rows, of boxes, of prepared keys, and of
# rows that are not aligned; in splits, in chunks, in several heads of a work tile.
LARGER += [
    Case(qo, kv, page_ids=ids, page_size=page, num_qo_heads=8, head_dim=dim, **options)
    for ids in ("hidden", "missing")
    for qo, kv, options in (
        ((1, 1, 4), (3000, 70, 900), {"window_left": 203, "num_kv_heads": 8}),
        ((300, 1, 40), (900, 4000, 41), {"num_ctas": 7}),
        ((70, 130, 1), (1200, 500, 9), {"planned_lens": (2000, 700, 60), "window_left": 300}),
    )
    for dim in (64, 128, 256, (192, 128))
    for page in (1, 5, 16, 64, 128)
] + [
    Case(qo, kv, page_ids=ids, num_qo_heads=8, **options)
    for ids in ("hidden", "missing")
    for qo, kv in (((1, 3, 1), (3000, 70, 900)), ((150, 1), (700, 3000)))
    for options in (
        {"head_dim": 128, "kv_dtype": "float8_e4m3fn", "window_left": 100, "page_size": 5},
        {"head_dim": 64, "kv_dtype": "float8_e5m2", "num_kv_heads": 4, "window_left": 100},
        {"head_dim": 80, "q_dtype": "float16", "window_left": 33, "num_kv_heads": 8},
        {"head_dim": 256, "kv_dtype": "float8_e4m3fn", "page_size": 64, "csr": True},
        {"head_dim": 128, "memory": "strided", "window_left": 100, "page_size": 3},
        {"head_dim": 72, "memory": "strided", "kv_layout": "HND", "window_left": 500},
        {"head_dim": 64, "memory": "combined", "softcap": 20.0, "window_left": 500},
        {"head_dim": 128, "batch_invariant": True, "window_left": 450},
        {"head_dim": 128, "custom_mask": "random", "page_size": 1},
        {"head_dim": 128, "custom_mask": "random", "causal": False, "window_left": 300},
        {"head_dim": 128, "variant": "biased", "window_left": 300},
        {"head_dim": 128, "variant": "sigmoid", "page_size": 64},
        {"head_dim": 128, "variant": "alibi", "window_left": 300, "page_size": 64},
        {"head_dim": 128, "rope": "plain", "window_left": 300},
        {"head_dim": 128, "sinks": True, "page_size": 64, "num_ctas": 40},
    )
]
PREPARED_IDS = [
    dataclasses.replace(case, page_ids="missing") for case in PREPARED if case.page_size
]
LARGER += PREPARED_IDS

# 8-bit keys and values in tiles of many rows, which kernels for Hopper widen: by boxes of one page
# and of several, ragged, to the last key of the tensor, in splits, with all masks, with prefixes.
WIDENED = [
    Case(qo, kv, num_qo_heads=8, kv_dtype=dtype, head_dim=dim, **options)
    for dtype, dim in (
        ("float8_e4m3fn", 128),
        ("float8_e5m2", 64),
        ("float8_e4m3fn", 80),
        ("float8_e4m3fn", 256),
        ("float8_e5m2", 192),
    )
    for qo, kv, options in (
        ((300, 1, 70), (900, 4000, 71), {"page_size": 16, "k_scale": 0.5, "v_scale": 1.7}),
        ((300, 1, 70), (900, 4000, 71), {"page_size": 8, "num_kv_heads": 8, "num_ctas": 7}),
        ((129, 40), (5000, 333), {"page_size": 64, "kv_layout": "HND", "num_ctas": 40}),
        ((129, 40), (500, 3333), {"page_size": 128, "csr": True, "num_kv_heads": 4}),
        ((200, 130), (1000, 130), {"page_size": None, "causal": False, "memory": "combined"}),
        ((200, 130), (1000, 130), {"page_size": None, "sinks": True}),
        ((70, 33), (1500, 64), {"page_size": 16, "window_left": 100, "softcap": 20.0}),
        ((64, 65), (700, 4100), {"page_size": 32, "custom_mask": "random", "memory": "strided"}),
        ((64, 200), (700, 900), {"page_size": 16, "planned_lens": (1500, 1000)}),
        ((64, 200), (700, 900), {"page_size": 16, "variant": "biased", "num_ctas": 9}),
        ((64, 200), (700, 900), {"page_size": 64, "device_scales": "heads", "num_kv_heads": 4}),
        ((150, 1), (700, 3000), {"page_size": 16, "page_ids": "hidden", "window_left": 100}),
        ((150, 1), (700, 3000), {"page_size": 16, "page_ids": "missing"}),
        ((150, 80), (150, 3000), {"page_size": 3}),
        ((300, 80), (300, 700), {"page_size": 16, "special": (("k", float("nan")),)}),
        ((300, 80), (300, 700), {"page_size": 16, "special": (("v", float("nan")),)}),
    )
] + [
    dataclasses.replace(case, kv_dtype="float8_e4m3fn", head_dim=128, rope=None)
    for case in PREFIXES
    if case.q_dtype != "float32" or case.kv_dtype is None
]
LARGER += WIDENED

# NaN and infinity in every body of the kernel, in splits, in batch-invariant chunks, in 8 bits.
_NAN, _INF = float("nan"), float("inf")
LARGER += [
    Case(**batch, special=special)
    for special in ((("q", _NAN),), (("k", _NAN),), (("k", _INF),), (("v", _NAN),), (("v", _INF),))
    for batch in (
        {"qo_lens": (1, 1), "kv_lens": (20000, 70), "num_qo_heads": 8, "head_dim": 128},
        {"qo_lens": (10, 300), "kv_lens": (5000, 700), "head_dim": 128, "page_size": None},
        {"qo_lens": (5, 40), "kv_lens": (9000, 5000), "head_dim": 128, "batch_invariant": True},
        {"qo_lens": (130, 1), "kv_lens": (500, 900), "head_dim": 256, "num_ctas": 3},
        {"qo_lens": (90, 1), "kv_lens": (90, 9000), "head_dim": (192, 128), "softcap": 20.0},
        {"qo_lens": (1, 70), "kv_lens": (6000, 300), "head_dim": 128, "window_left": 100},
    )
] + [
    Case((1, 80), (3000, 400), head_dim=dim, kv_dtype=kv, special=((name, _NAN),))
    for name in "kv"
    for dim in (128, 256)
    for kv in ("float8_e4m3fn", "float8_e5m2")
]

ALL_CASES = list(dict.fromkeys(on_gpu(case) for case in CASES + LARGER))
GPU_CASES = [case for case in ALL_CASES if is_supported(case)]


def without_hidden_values(case, inputs, exact_o, o):
    """A copy of `o` without NaN that comes from a hidden value: a row that shares a step of keys
    with such a value multiplies it by 0. Hidden keys and queries never change a row."""
    o = o.copy()
    spans = zip(
        inputs.qo_indptr, inputs.qo_indptr[1:], inputs.requests(case.kv_layout), strict=False
    )
    for begin, end, (_, v) in spans:
        special = ~np.isfinite(v.astype(np.float32)).all(axis=0)  # [num_kv_heads, head_dim]
        special = np.repeat(special, case.num_qo_heads // case.num_kv_heads, axis=0)
        rows, exact = o[begin:end], exact_o[begin:end]
        hidden = special & np.isfinite(exact) & np.isnan(rows.astype(np.float32))
        rows[hidden] = exact[hidden].astype(o.dtype)
    return o


def memory_in_use(torch):
    """Memory in use on the whole GPU; skips where other workers use the GPU too."""
    shared = "PYTEST_XDIST_WORKER" in os.environ
    return torch.cuda.memory_allocated(), None if shared else torch.cuda.mem_get_info()
