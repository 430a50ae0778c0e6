# SPDX-License-Identifier: Apache-2.0
"""The attention problems that tests run. Those here are about dtypes, shapes, masks, memory, splits
and special values; feature_cases.py has the others."""

import numpy as np

from batches import BATCH, DECODE
from case import Case
from feature_cases import (
    BLOCK_SPARSE,
    CUSTOM_MASKS,
    DEVICE_SCALES,
    LSE_BASE2,
    NARROW_QUERIES,
    PLANNED_LENS,
    PREFIXES,
    ROPES,
    SINKS,
    VARIED,
)
from random_cases import random_cases


def _one_axis(name, values, **fixed):
    return [Case(**(BATCH | fixed | {name: value})) for value in values]


DTYPES = [
    Case(**batch, q_dtype=q, kv_dtype=kv, k_scale=ks, v_scale=vs)
    for batch in (BATCH, DECODE)
    for q in ("float32", "float16", "bfloat16")
    for kv, ks, vs in ((None, 1.0, 1.0), ("float8_e4m3fn", 0.5, 1.7), ("float8_e5m2", 1.3, 0.25))
] + [
    Case(**BATCH, q_dtype=q, o_dtype=o)
    for q in ("float32", "float16", "bfloat16")
    for o in ("float32", "float16", "bfloat16")
    if o != q
]

HEAD_DIMS = [
    Case(**batch, head_dim=dim, q_dtype=dtype)
    for dim in (1, 2, 7, 32, 80, 96, 128, 256, (192, 128), (64, 128), (3, 130), (576, 512))
    for batch, dtype in ((BATCH, "float32"), (DECODE, "bfloat16"))
]

GROUPS = [
    Case(**batch, num_qo_heads=qo, num_kv_heads=kv, head_dim=32, q_dtype=dtype)
    for qo, kv in ((1, 1), (3, 1), (3, 3), (9, 3), (4, 1), (14, 2), (8, 1), (32, 4), (65, 1))
    for batch, dtype in ((BATCH, "float32"), (DECODE, "float16"))
]

PAGES = [
    Case(**BATCH, page_size=size, kv_layout=layout, csr=csr, q_dtype="float16", head_dim=40)
    for size in (1, 3, 16, 64, 1000)
    for layout in ("NHD", "HND")
    for csr in (False, True)
] + _one_axis("head_dim", (64, (192, 128)), page_size=None)

# Page ids that no query sees: of no page, or of a page that holds NaN.
HIDDEN_PAGES = [
    Case((70, 1, 3, 0), (70, 150, 90, 40), page_ids="hidden", window_left=window, **options)
    for window in (-1, 0, 40)
    for options in (
        {"q_dtype": "float32", "page_size": 1},
        {"page_size": 5, "csr": True, "planned_lens": (80, 150, 100, 40)},
        {"q_dtype": "float16", "kv_dtype": "float8_e4m3fn", "batch_invariant": True},
    )
]

MASKS = [
    Case(
        qo_lens=(70, 1, 3, 9),
        kv_lens=(70, 150, 90, 4),
        page_size=page_size,
        q_dtype="float32",
        causal=causal,
        window_left=window,
        softcap=softcap,
        softmax_scale=scale,
    )
    for page_size, softcap, scale in ((16, 0.0, None), (None, 5.0, 0.3))
    for causal in (True, False)
    for window in (-1, 0, 1, 17, 64, 1000)
] + _one_axis("softmax_scale", (1.0, 0.01), q_dtype="float32")

MEMORY = [
    Case(
        **BATCH,
        memory=memory,
        page_size=page_size,
        kv_layout=layout,
        csr=csr,
        q_dtype=q,
        kv_dtype=kv,
    )
    for memory, page_size, layout, csr in (
        ("strided", 16, "NHD", False),
        ("strided", 3, "HND", True),
        ("strided", None, "NHD", False),
        ("combined", 16, "NHD", True),
        ("combined", 16, "HND", False),
    )
    for q, kv in (("float32", None), ("bfloat16", None), ("float16", "float8_e4m3fn"))
]

LENS = [
    Case(qo, kv, q_dtype=dtype, causal=causal, head_dim=32)
    for qo, kv in (
        ((1,), (1,)),
        ((1,), (0,)),
        ((0,), (0,)),
        ((0,), (7,)),
        ((3, 0, 2), (0, 0, 0)),
        ((17,), (5,)),
        ((130, 1), (3, 0)),
        ((63, 64, 65), (63, 64, 65)),
        ((31, 32, 33), (127, 128, 129)),
        ((15, 16, 17), (16, 16, 16)),
        ((200,), (200,)),
        ((1,) * 40, tuple(range(40))),
        ((1, 50, 1, 1, 20, 0, 4), (300, 50, 1, 17, 100, 12, 4)),
    )
    for dtype, causal in (("float32", True), ("bfloat16", False))
]

SPLITS = [
    Case(
        qo_lens=qo,
        kv_lens=kv,
        num_qo_heads=8,
        num_kv_heads=2,
        num_ctas=ctas,
        batch_invariant=invariant,
        q_dtype=dtype,
        page_size=page_size,
    )
    for qo, kv, dtype, page_size in (
        ((1,), (4100,), "bfloat16", 16),
        ((4, 1), (2500, 600), "float32", None),
    )
    for ctas in (1, 2, 7, 64, 132)
    for invariant in (False, True)
]

GAINS = _one_axis("gain", (20.0, 400.0), q_dtype="float32") + _one_axis("gain", (20.0,))

# NaN and infinity, with rows that see them, rows that do not, and requests that are split.
_SPECIALS = [
    *([(name, value)] for name in "qkv" for value in (np.nan, np.inf, -np.inf)),
    [("k", np.inf), ("v", np.nan)],
]
SPECIAL = [
    Case(**batch, special=tuple(special))
    for special in _SPECIALS
    for batch in (
        BATCH | {"q_dtype": "float32"},
        DECODE | {"num_qo_heads": 8, "window_left": 70},
        {"qo_lens": (256,), "kv_lens": (256,), "head_dim": 128, "q_dtype": "float16"},
        {"qo_lens": (1, 2), "kv_lens": (5000, 3000), "num_ctas": 7, "page_size": None},
        {"qo_lens": (1, 20), "kv_lens": (5000, 1500), "num_ctas": 3, "batch_invariant": True},
        {"qo_lens": (1, 40), "kv_lens": (1500, 40), "softcap": 20.0, "o_dtype": "float32"},
    )
] + [
    Case(**batch, kv_dtype=kv, special=((name, np.nan),), q_dtype=q)
    for name in "kv"
    for q, kv in (("float32", "float8_e4m3fn"), ("bfloat16", "float8_e5m2"))
    for batch in (BATCH, DECODE)
]

CASES = list(
    dict.fromkeys(
        DTYPES
        + HEAD_DIMS
        + GROUPS
        + PAGES
        + HIDDEN_PAGES
        + MASKS
        + MEMORY
        + LENS
        + SPLITS
        + GAINS
        + SPECIAL
        + PLANNED_LENS
        + PREFIXES
        + CUSTOM_MASKS
        + SINKS
        + LSE_BASE2
        + VARIED
        + DEVICE_SCALES
        + NARROW_QUERIES
        + ROPES
        + BLOCK_SPARSE
        + random_cases(150, seed=0)
    )
)
