# SPDX-License-Identifier: Apache-2.0
"""Attention problems about features that a plan or a run asks for: shared prefixes, real lengths,
custom masks, sinks, scales on the device, rotations, block-sparse attention, variants."""

import numpy as np

from batches import BATCH, DECODE, FOREST, TREE
from case import Case

PREFIXES = (
    [
        Case(**batch, shared_prefixes=groups, num_qo_heads=8, num_ctas=ctas, **options)
        for batch, groups in (
            (TREE, ((0, 9, 29), (0, 7, 200), (4, 3, 399), (7, 2, 29))),
            (FOREST, ((0, 5, 700), (5, 4, 640), (0, 2, 790), (6, 2, 670))),
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
            **TREE,
            shared_prefixes=((0, 7, 256), (4, 3, 390)),
            planned_lens=tuple(n + 100 for n in TREE["kv_lens"]),
            num_qo_heads=8,
            num_ctas=1,
            page_size=page_size,
        )
        for page_size in (16, None)
    ]
    + [
        # Plans that do not share prefixes give the same result.
        Case(**TREE, shared_prefixes=((0, 9, 29), (0, 7, 200)), window_left=250),
        Case(**TREE, shared_prefixes=((0, 9, 29), (0, 7, 200)), batch_invariant=True),
    ]
    + [
        # Masks that begin behind a prefix or inside one, also with real lengths.
        Case(
            **FOREST,
            shared_prefixes=((0, 5, 700), (5, 4, 640)),
            num_qo_heads=8,
            custom_mask="random",
            mask_begin=begin,
            planned_lens=planned,
        )
        for begin in (None, (770,) * 9, (770,) * 6 + (30,) * 3)
        for planned in (None, tuple(n + 90 for n in FOREST["kv_lens"]))
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
    Case(**batch, **{"sinks": True} | options)
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
        {"sinks": "bfloat16", "page_size": None},
        {"sinks": "bfloat16", "q_dtype": "float16", "special": (("sinks", np.nan),)},
    )
] + [
    Case(
        **TREE,
        shared_prefixes=((0, 9, 29), (0, 7, 200), (4, 3, 399)),
        num_qo_heads=8,
        num_ctas=ctas,
        sinks=True,
        planned_lens=planned,
    )
    for ctas in (1, 132)
    for planned in (None, tuple(n + 90 for n in TREE["kv_lens"]))
]


# Written by whole work tiles and by merges, with sinks, which stay natural, and rows without keys.
LSE_BASE2 = [
    Case(**batch, lse_base2=True, **options)
    for batch in (
        BATCH | {"kv_lens": (33, 71, 3, 0)},
        {"qo_lens": (1, 3, 2), "kv_lens": (4100, 0, 700), "num_ctas": 7},
        {"qo_lens": (4, 40), "kv_lens": (2500, 600), "num_ctas": 7, "batch_invariant": True},
    )
    for options in (
        {"q_dtype": "float32"},
        {"sinks": True, "softcap": 9.0, "memory": "strided"},
        {"special": (("k", np.nan),), "page_size": None, "q_dtype": "float16"},
        {"variant": "biased"},
    )
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
] + [Case(**TREE, shared_prefixes=((0, 9, 29), (0, 7, 200)), num_ctas=7, device_scales="heads")]

# Queries of 8 bits: every body of a kernel, special numbers, and what results depend on besides.
NARROW_QUERIES = (
    [
        Case(**batch, q_dtype=q, kv_dtype=kv, q_scale=0.7, k_scale=0.5, v_scale=1.7)
        for batch in (BATCH, DECODE)
        for q, kv in (
            ("float8_e4m3fn", None),
            ("float8_e4m3fn", "float8_e5m2"),
            ("float8_e5m2", "float8_e4m3fn"),
            ("float8_e5m2", None),
        )
    ]
    + [
        Case(qo, kv, q_dtype="float8_e4m3fn", head_dim=dim, num_qo_heads=8, **options)
        for dim in (64, 128, 256, (192, 128), 80, 33)
        for qo, kv in (
            ((1, 1, 3), (4100, 60, 700)),
            ((12, 16, 1, 0), (300, 16, 2500, 40)),
            ((170, 33), (400, 900)),
        )
        for options in (
            {"q_scale": 0.3, "num_ctas": 7},
            {"device_scales": "heads", "page_size": None, "memory": "strided", "softcap": 9.0},
            {
                "device_scales": "one",
                "csr": True,
                "page_size": 3,
                "o_dtype": "float32",
                "gain": 3.0,
            },
            {"kv_layout": "HND", "sinks": True, "window_left": 70, "batch_invariant": True},
        )
    ]
    + [
        Case(**batch, q_dtype="float8_e4m3fn", special=((name, np.nan),))
        for name in "qkv"
        for batch in (BATCH, DECODE)
    ]
)


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
        ({**TREE, "shared_prefixes": ((0, 9, 29), (0, 7, 200))}, "scaled"),
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
        for variant in ("elements", "ends", "biased", "prefix_lm", "blocks", "sigmoid")
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
        for variant in ("elements", "ends", "biased", "prefix_lm", "sigmoid")
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
        # Logits that grow and that fall with the key: weights leave the range of the first maximum.
        Case(
            qo_lens=(4, 1, 150, 66, 200),
            kv_lens=(300, 777, 170, 1000, 200),
            variant=variant,
            q_dtype=dtype,
            head_dim=head_dim,
            **options,
        )
        for dtype in ("bfloat16", "float16")
        for head_dim in (64, 128, 256)
        for variant, options in (
            ("alibi", {"page_size": None}),
            ("linear", {"page_size": 16, "window_left": 150, "num_qo_heads": 6}),
            ("linear", {"page_size": 16, "causal": False, "num_ctas": 3, "softmax_scale": 0.7}),
        )
    ]
    + [
        Case(
            **BATCH, variant="prefix_lm", q_dtype="float16", kv_dtype="float8_e4m3fn", softcap=5.0
        ),
        Case(**BATCH, variant="elements", kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=1.7),
    ]
)
