# SPDX-License-Identifier: Apache-2.0
"""The attention problems that tests run, by the feature that they are about."""

import numpy as np

from case import Case
from random_cases import random_cases


def _one_axis(name, values, **fixed):
    return [Case(**(BATCH | fixed | {name: value})) for value in values]


# A prefill, a decode, a continued prefill and an empty request, in one batch.
BATCH = {"qo_lens": (33, 1, 5, 0), "kv_lens": (33, 71, 40, 9)}
DECODE = {"qo_lens": (1,) * 5, "kv_lens": (200, 1, 64, 65, 130)}

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

# A system prompt, few-shot examples behind it, and separate prefixes; for decodes, drafts, prompts.
_TREE = {"qo_lens": (1,) * 9, "kv_lens": (300, 290, 259, 700, 400, 401, 402, 90, 30)}
_FOREST = {
    "qo_lens": (1, 4, 0, 2, 60, 2, 1, 1, 1),
    "kv_lens": (800, 930, 790, 900, 850, 670, 680, 690, 900),
}
PREFIXES = (
    [
        Case(**batch, shared_prefixes=groups, num_qo_heads=8, num_ctas=ctas, **options)
        for batch, groups in (
            (_TREE, ((0, 9, 29), (0, 7, 200), (4, 3, 399), (7, 2, 29))),
            (_FOREST, ((0, 5, 700), (5, 4, 640), (0, 2, 790), (6, 2, 670))),
        )
        for ctas in (1, 7, 132)
        for options in (
            {"q_dtype": "float32"},
            {"head_dim": 128, "csr": True, "page_size": 3, "kv_dtype": "float8_e4m3fn"},
            {"page_size": None, "causal": False, "q_dtype": "float16", "softcap": 9.0},
            {"page_size": 64, "kv_layout": "HND", "memory": "strided", "num_kv_heads": 4},
        )
    ]
    + [
        # As on a GPU: long prefixes, with more rows than a tile has, cut at any step.
        Case(
            (1,) * 40,
            tuple(2100 + 7 * r for r in range(40)),
            num_qo_heads=16,
            shared_prefixes=((0, 40, 2000), (3, 20, 2080)),
            num_ctas=ctas,
            head_dim=(64, 128),
        )
        for ctas in (5, 132)
    ]
    + [
        # Requests shorter than planned.
        Case(
            **_TREE,
            shared_prefixes=((0, 7, 256), (4, 3, 390)),
            planned_lens=tuple(n + 100 for n in _TREE["kv_lens"]),
            num_qo_heads=8,
            num_ctas=1,
            page_size=page_size,
        )
        for page_size in (16, None)
    ]
    + [
        # Plans that do not share prefixes give the same result.
        Case(**_TREE, shared_prefixes=((0, 9, 29), (0, 7, 200)), window_left=250),
        Case(**_TREE, shared_prefixes=((0, 9, 29), (0, 7, 200)), batch_invariant=True),
    ]
    + [
        # Masks that begin behind a prefix or inside one, also with real lengths.
        Case(
            **_FOREST,
            shared_prefixes=((0, 5, 700), (5, 4, 640)),
            num_qo_heads=8,
            custom_mask="random",
            mask_begin=begin,
            planned_lens=planned,
        )
        for begin in (None, (770,) * 9, (770,) * 6 + (30,) * 3)
        for planned in (None, tuple(n + 90 for n in _FOREST["kv_lens"]))
    ]
)


# Plans for upper bounds of the lengths: less than a page above them, some pages, and far above.
PLANNED_LENS = [
    Case(**batch, planned_lens=planned, **options)
    for batch, planned in (
        (BATCH, (33, 80, 700, 9)),
        (DECODE, (200, 3, 64, 300, 2000)),
        ({"qo_lens": (1, 9, 70), "kv_lens": (0, 4, 100)}, (50, 300, 170)),
    )
    for options in (
        {"q_dtype": "float32"},
        {"page_size": None, "head_dim": 128},
        {"csr": True, "page_size": 3, "causal": False, "q_dtype": "float16"},
        {"window_left": 17, "kv_dtype": "float8_e4m3fn", "memory": "strided"},
        {"window_left": 0, "page_size": None, "memory": "strided", "q_dtype": "float32"},
        {"window_left": 90, "causal": False, "softcap": 9.0},
    )
] + [
    Case(qo, kv, planned_lens=planned, num_ctas=7, window_left=window, batch_invariant=invariant)
    for qo, kv, planned in (
        ((1, 2), (4100, 30), (5000, 3000)),
        ((40, 1), (3, 2500), (3000, 2600)),
        ((4,), (1025,), (6000,)),
    )
    for window in (-1, 1023)
    for invariant in (False, True)
]


# Masks that begin at any key; rows that see nothing; every kind of split.
CUSTOM_MASKS = [
    Case(**batch, mask_begin=begin, custom_mask=kind, **options)
    for batch, begin in (
        ({"qo_lens": (33, 1, 5, 0), "kv_lens": (33, 71, 40, 9)}, None),
        ({"qo_lens": (33, 1, 5, 0), "kv_lens": (33, 71, 40, 9)}, (0, 30, 1000, 3)),
        ({"qo_lens": (64, 8, 3), "kv_lens": (200, 8, 2)}, None),
        ({"qo_lens": (1, 9, 70), "kv_lens": (500, 40, 170)}, (77, 0, 101)),
    )
    for kind, options in (
        ("tree", {"q_dtype": "float32"}),
        ("random", {"causal": False, "page_size": None, "head_dim": 128}),
        ("random", {"window_left": 20, "csr": True, "page_size": 3, "memory": "strided"}),
        ("random", {"softcap": 9.0, "kv_dtype": "float8_e4m3fn", "num_qo_heads": 6}),
        ("random", {"causal": False, "special": (("v", np.nan),), "q_dtype": "float32"}),
    )
] + [
    Case(
        (2, 40),
        (4100, 2500),
        mask_begin=begin,
        custom_mask="random",
        causal=False,
        num_ctas=7,
        batch_invariant=invariant,
        planned_lens=planned,
    )
    for begin in (None, (1000, 2499))
    for invariant in (False, True)
    for planned in (None, (5000, 2600))
]


# Sinks with requests that are whole, split or in chunks, rows that see no key, prefixes, and
# outputs of any kind.
SINKS = [
    Case(**batch, sinks=True, **options)
    for batch in (
        BATCH | {"kv_lens": (33, 71, 3, 0)},
        {"qo_lens": (1, 3, 2), "kv_lens": (4100, 0, 700), "num_ctas": 7},
        {"qo_lens": (4, 40), "kv_lens": (2500, 600), "num_ctas": 7, "batch_invariant": True},
    )
    for options in (
        {"q_dtype": "float32", "num_qo_heads": 8},
        {"page_size": None, "head_dim": 128, "gain": 20.0},
        {"csr": True, "page_size": 3, "o_dtype": "float32", "memory": "strided", "head_dim": 40},
        {"softcap": 9.0, "kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 1.7},
        *({"q_dtype": "float32", "special": (("sinks", x),)} for x in (np.nan, np.inf, -np.inf)),
        {"q_dtype": "float16", "special": (("k", np.nan), ("sinks", 200.0))},
    )
] + [
    Case(
        **_TREE,
        shared_prefixes=((0, 9, 29), (0, 7, 200), (4, 3, 399)),
        num_qo_heads=8,
        num_ctas=ctas,
        sinks=True,
        planned_lens=planned,
    )
    for ctas in (1, 132)
    for planned in (None, tuple(n + 90 for n in _TREE["kv_lens"]))
]


# Read by the kernels: whole requests, splits and chunks, several heads of a work tile, prefixes.
DEVICE_SCALES = [
    Case(**batch, device_scales=scales, num_qo_heads=6, num_kv_heads=3, **options)
    for scales in ("one", "heads")
    for batch in (
        BATCH,
        {"qo_lens": (1, 3), "kv_lens": (4100, 700), "num_ctas": 7},
        {"qo_lens": (4, 40), "kv_lens": (2500, 600), "num_ctas": 7, "batch_invariant": True},
    )
    for options in (
        {"q_dtype": "float32", "page_size": None},
        {"kv_dtype": "float8_e4m3fn", "softcap": 9.0},
        {"kv_dtype": "float8_e5m2", "csr": True, "sinks": True, "head_dim": 128},
    )
] + [Case(**_TREE, shared_prefixes=((0, 9, 29), (0, 7, 200)), num_ctas=7, device_scales="heads")]


# Queries and keys are rotated as they are read: by positions in pages and tiles of any size, in
# splits and chunks, of requests shorter than planned, and with prefixes, which are not shared.
ROPES = [
    Case(**batch, rope=rope, num_qo_heads=6, num_kv_heads=3, **options)
    for batch, rope in (
        (BATCH, "plain"),
        (BATCH | {"kv_lens": (33, 71, 3, 0), "causal": False}, "interleaved"),
        ({"qo_lens": (1, 3), "kv_lens": (4100, 700), "num_ctas": 7}, "partial"),
        ({"qo_lens": (4, 40), "kv_lens": (2500, 600), "batch_invariant": True}, "llama3"),
        ({"qo_lens": (1, 9), "kv_lens": (500, 4), "planned_lens": (1200, 90)}, "yarn interleaved"),
        ({**_TREE, "shared_prefixes": ((0, 9, 29), (0, 7, 200))}, "scaled"),
    )
    for options in (
        {"q_dtype": "float32", "page_size": None},
        {"kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "page_size": 3, "csr": True},
        {"head_dim": (192, 128), "window_left": 300, "sinks": True},
    )
] + [Case(**BATCH, rope="partial", variant="elements", q_dtype="float32")]


# Block-sparse rows of 64 and of 7 queries; pages selected by each of 8 heads, of which the last is
# partly filled.
BLOCK_SPARSE = [
    Case((rows,) * len(blocks), tuple(columns * n for n in blocks), causal=False, **options)
    for rows, columns, blocks in ((64, 32, (3, 0, 9, 1)), (7, 5, (4, 40, 2)))
    for options in (
        {"page_size": columns, "csr": True, "common_pages": True, "q_dtype": "float32"},
        {"page_size": columns, "common_pages": True, "kv_layout": "HND", "head_dim": 128},
    )
] + [
    Case(
        (1,) * 8,
        (12 * 16 - 5,) * 8,
        num_qo_heads=group,
        num_kv_heads=1,
        common_pages=True,
        csr=True,
        num_ctas=ctas,
    )
    for group in (1, 4)
    for ctas in (None, 7)
]


# Every body, beside everything that could go wrong with it. Source is compiled once for each dtype
# of the cache and for a softcap: most cases share these.
VARIED = (
    [
        Case(**batch, variant=variant, q_dtype="float32", **options)
        for variant in ("elements", "biased", "prefix_lm", "blocks", "sigmoid")
        for batch in (BATCH, {"qo_lens": (4, 1, 2, 150), "kv_lens": (300, 777, 1, 170)})
        for options in (
            {"page_size": 16},
            {"page_size": None, "causal": False, "num_ctas": 5, "head_dim": (40, 24)},
            {"page_size": 3, "window_left": 20, "num_qo_heads": 6, "num_ctas": 40},
            {"page_size": 16, "batch_invariant": True, "custom_mask": "tree"},
        )
    ]
    + [
        # Real lengths, cut where nobody knew them; requests that the planner could have shared.
        Case(
            qo_lens=(1, 40, 3, 1),
            kv_lens=(7, 300, 0, 1100),
            planned_lens=(900, 700, 50, 1100),
            variant=variant,
            q_dtype="float32",
            num_ctas=9,
            batch_invariant=invariant,
        )
        for variant in ("elements", "biased", "prefix_lm", "sigmoid")
        for invariant in (False, True)
    ]
    + [
        Case(
            (1,) * 8,
            (400,) * 8,
            shared_prefixes=((0, 8, 390),),
            variant=variant,
            q_dtype="float32",
        )
        for variant in ("elements", "biased", "prefix_lm", "blocks", "sigmoid")
    ]
    + [
        Case(
            **BATCH, variant="prefix_lm", q_dtype="float16", kv_dtype="float8_e4m3fn", softcap=5.0
        ),
        Case(**BATCH, variant="elements", kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=1.7),
    ]
)

CASES = list(
    dict.fromkeys(
        DTYPES
        + HEAD_DIMS
        + GROUPS
        + PAGES
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
        + VARIED
        + DEVICE_SCALES
        + ROPES
        + BLOCK_SPARSE
        + random_cases(150, seed=0)
    )
)
