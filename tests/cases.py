# SPDX-License-Identifier: Apache-2.0
"""One list of attention problems for tests and benchmarks."""

import dataclasses
import itertools
import random

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with NumPy)
import numpy as np

from reference import visible_keys

SHORT_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


def _lens_id(lens):
    """1x64 for sixty-four ones; the lengths themselves while they are few."""
    runs = [(n, len(list(same))) for n, same in itertools.groupby(lens)]
    text = "_".join(f"{n}x{times}" if times > 1 else f"{n}" for n, times in runs)
    return text if len(text) <= 32 else f"{len(lens)}lens{sum(lens)}"


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention problem: the options, the lengths, and how the tensors lie in memory."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | tuple[int, int] = 64
    page_size: int | None = 16
    q_dtype: str = "bfloat16"
    kv_dtype: str | None = None
    o_dtype: str | None = None
    causal: bool = True
    window_left: int = -1
    softmax_scale: float | None = None
    softcap: float = 0.0
    kv_layout: str = "NHD"
    k_scale: float = 1.0
    v_scale: float = 1.0
    num_ctas: int | None = None
    batch_invariant: bool = False
    csr: bool = False  # page_indptr and page_indices, not block_table
    memory: str = "dense"  # "strided": gaps in every tensor; "combined": one [pages, 2, ...] cache
    gain: float = 1.0  # of q: large logits make a peaked softmax
    # ("k", value): one element of k of each request is that; also "q" and "v", and one of "sinks".
    # NaN is of all bits.
    special: tuple[tuple[str, float], ...] = ()
    # Upper bounds of kv_lens for plan(); run() gets kv_lens on the device.
    planned_lens: tuple[int, ...] | None = None
    shared_prefixes: tuple[tuple[int, int, int], ...] = ()
    # "random" bits, or those of a random "tree" of draft tokens.
    custom_mask: str | None = None
    mask_begin: tuple[int, ...] | None = None
    sinks: bool = False
    # Page lists from a common pool: rows of a block-sparse mask, or pages that were selected.
    common_pages: bool = False

    def __str__(self):
        dims = self.head_dims
        parts = [
            SHORT_NAMES[self.q_dtype],
            self.kv_dtype and f"kv_{SHORT_NAMES[self.kv_dtype]}",
            self.o_dtype and f"o_{SHORT_NAMES[self.o_dtype]}",
            f"h{self.num_qo_heads}x{self.num_kv_heads}",
            f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}x{dims[1]}",
            f"page{self.page_size}" if self.page_size else "ragged",
            self.kv_layout == "HND" and "HND",
            self.csr and "csr",
            self.common_pages and "common",
            self.memory != "dense" and self.memory,
            "causal" if self.causal else "full",
            self.window_left >= 0 and f"window{self.window_left}",
            self.softmax_scale is not None and f"scale{self.softmax_scale:g}",
            self.softcap and f"cap{self.softcap:g}",
            self.k_scale != 1 and f"ks{self.k_scale:g}",
            self.v_scale != 1 and f"vs{self.v_scale:g}",
            self.num_ctas and f"ctas{self.num_ctas}",
            self.batch_invariant and "invariant",
            self.gain != 1 and f"gain{self.gain:g}",
            *(f"{name}={value:g}" for name, value in self.special),
            *("shared" + "_".join(map(str, group)) for group in self.shared_prefixes),
            f"qo{_lens_id(self.qo_lens)}",
            f"kv{_lens_id(self.kv_lens)}",
            self.planned_lens and f"planned{_lens_id(self.planned_lens)}",
            self.custom_mask and f"mask_{self.custom_mask}",
            self.mask_begin and f"from{_lens_id(self.mask_begin)}",
            self.sinks and "sinks",
        ]
        return "-".join(part for part in parts if part)

    @property
    def head_dims(self):
        return self.head_dim if isinstance(self.head_dim, tuple) else (self.head_dim, self.head_dim)

    @property
    def cache_dtype(self):
        return self.kv_dtype or self.q_dtype

    @property
    def output_dtype(self):
        return self.o_dtype or self.q_dtype

    @property
    def flops(self):
        pairs = sum(self._visible(qo, kv).sum() for qo, kv in self._lens())
        return int(2 * sum(self.head_dims) * self.num_qo_heads * pairs)

    @property
    def kv_bytes(self):
        """Bytes of K and V that some query sees, each read once."""
        keys = sum(self._visible(qo, kv).any(axis=0).sum() for qo, kv in self._lens())
        item_size = np.dtype(self.cache_dtype).itemsize
        return int(keys * self.num_kv_heads * sum(self.head_dims) * item_size)

    def _lens(self):
        return zip(self.qo_lens, self.kv_lens, strict=True)

    def _visible(self, qo_len, kv_len):
        return visible_keys(qo_len, kv_len, self.causal, self.window_left)

    def options(self):
        """Keyword arguments of flashplan.Attention."""
        names = (
            "num_qo_heads num_kv_heads head_dim page_size q_dtype kv_dtype o_dtype causal "
            "window_left softmax_scale softcap kv_layout num_ctas batch_invariant"
        )
        return {name: getattr(self, name) for name in names.split()} | {
            "max_batch_size": max(1, len(self.qo_lens)),
            "max_qo_tokens": max(1, sum(self.qo_lens)),
            "custom_mask": self.custom_mask is not None,
            "device": "cpu",
        }

    @property
    def first_masked_keys(self):
        """Of each request."""
        if self.mask_begin is not None:
            return self.mask_begin
        return tuple(kv_len - qo_len for qo_len, kv_len in self._lens())

    def reference_options(self):
        """Keyword arguments of reference.attention."""
        names = "causal window_left softmax_scale softcap k_scale v_scale"
        return {name: getattr(self, name) for name in names.split()}


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

# NaN and infinity: rows that see them, rows that do not, requests that are split.
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

# A system prompt, few-shot examples inside it, and others apart; by decodes, drafts and prompts.
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
        # As on a GPU: prefixes of more rows than a tile has, cut at any step, and long ones.
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
        # Plans that do not share: the result is the same.
        Case(**_TREE, shared_prefixes=((0, 9, 29), (0, 7, 200)), window_left=250),
        Case(**_TREE, shared_prefixes=((0, 9, 29), (0, 7, 200)), batch_invariant=True),
    ]
    + [
        # Masks behind a prefix, or inside one, and real lengths.
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


# Plans for upper bounds of the lengths: within a page, by pages, and far beyond them.
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


# Keys before, across and behind the first masked one; rows that see nothing; every kind of split.
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


# Requests whole, split and in chunks, with rows that see no key, prefixes and outputs of any kind.
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


# Block-sparse rows of 64 and of 7 queries; pages selected for each of 8 heads, the last one partly
# filled.
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


def random_case(rng):
    """Any combination of all axes."""
    batch_size = rng.choice((1, 2, 5, 9))
    group_size, num_kv_heads = rng.choice((1, 2, 3, 4, 7, 8)), rng.choice((1, 2, 3))
    page_size = rng.choice((None, 1, 2, 5, 16, 64))
    q_dtype = rng.choice(("float32", "float16", "bfloat16"))
    kv_dtype = rng.choice((None, None, "float8_e4m3fn", "float8_e5m2"))
    head_dim = rng.choice((8, 33, 64, 64, 80, 128, (48, 32)))
    memory = rng.choice(("dense", "strided", "combined"))
    if memory == "combined" and (page_size is None or isinstance(head_dim, tuple)):
        memory = "dense"
    case = Case(
        qo_lens=tuple(rng.choice((0, 1, 1, 1, 2, 17, 60)) for _ in range(batch_size)),
        kv_lens=tuple(rng.choice((0, 1, 16, 50, 65, 300)) for _ in range(batch_size)),
        num_qo_heads=group_size * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        o_dtype=rng.choice((None, None, "float32", "float16")),
        causal=rng.choice((True, True, False)),
        window_left=rng.choice((-1, -1, -1, 0, 20)),
        softcap=rng.choice((0.0, 0.0, 10.0)),
        kv_layout=rng.choice(("NHD", "HND")) if page_size else "NHD",
        k_scale=rng.choice((1.0, 0.7)) if kv_dtype else 1.0,
        v_scale=rng.choice((1.0, 1.9)) if kv_dtype else 1.0,
        num_ctas=rng.choice((None, None, 1, 3, 50)),
        batch_invariant=rng.choice((False, False, True)),
        csr=page_size is not None and rng.choice((False, True)),
        memory=memory,
    )
    if rng.choice((False, False, True)):
        beyond = [rng.choice((0, 0, 1, 30, 400)) for _ in case.kv_lens]
        planned = tuple(n + more for n, more in zip(case.kv_lens, beyond, strict=True))
        case = dataclasses.replace(case, planned_lens=planned)
    if rng.choice((False, False, False, True)):
        case = dataclasses.replace(case, custom_mask=rng.choice(("random", "tree")))
        if rng.choice((False, True)):
            begin = tuple(rng.choice((0, n // 2, n)) for n in case.kv_lens)
            case = dataclasses.replace(case, mask_begin=begin)
    return dataclasses.replace(case, sinks=rng.choice((False, False, False, True)))


def random_cases(count, seed):
    rng = random.Random(seed)
    return [random_case(rng) for _ in range(count)]


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
        + BLOCK_SPARSE
        + random_cases(150, seed=0)
    )
)


def _decode(batch_size, kv_len, **options):
    defaults = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    return Case((1,) * batch_size, (kv_len,) * batch_size, **defaults | options)


def _prefill(qo_len, kv_len=None, **options):
    defaults = {"num_qo_heads": 8, "num_kv_heads": 8, "head_dim": 128, "page_size": None}
    return Case((qo_len,), (kv_len or qo_len,), **defaults | options)


BENCH = {
    "decode b8 kv4096": _decode(8, 4096),
    "decode b8 kv4096 f32": _decode(8, 4096, q_dtype="float32"),
    "decode b8 kv4096 f16": _decode(8, 4096, q_dtype="float16"),
    "decode b8 kv4096 e4m3": _decode(8, 4096, kv_dtype="float8_e4m3fn"),
    "decode b8 kv4096 page 1": _decode(8, 4096, page_size=1),
    "decode b1 kv32768": _decode(1, 32768),
    "decode b64 kv512": _decode(64, 512),
    "decode b8 kv4096 32/32": _decode(8, 4096, num_kv_heads=32),
    "decode b8 kv1024 9/3 d64": _decode(8, 1024, num_qo_heads=9, num_kv_heads=3, head_dim=64),
    "prefill s512": _prefill(512),
    "prefill s1024": _prefill(1024),
    "prefill s2048": _prefill(2048),
    "prefill s1024 f32": _prefill(1024, q_dtype="float32"),
    "prefill s1024 32/8": _prefill(1024, num_qo_heads=32),
    "prefill s1024 page 16": _prefill(1024, page_size=16),
    "append 128 to kv4096 32/8": _prefill(128, 4096, num_qo_heads=32, page_size=16),
    "mixed s512 + 7 decodes": Case(
        (512,) + (1,) * 7,
        (512,) + (2048,) * 7,
        num_qo_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
}


def _shuffled(lens):
    return tuple(random.Random(0).sample(lens, len(lens)))


def zipf_lens(mean, count=16):
    """Lengths proportional to 1, 1/2, 1/3, ... in random order; their sum is count * mean."""
    harmonic = sum(1 / rank for rank in range(1, count + 1))
    lens = [round(count * mean / harmonic / rank) for rank in range(1, count + 1)]
    lens[0] += count * mean - sum(lens)
    return _shuffled(lens)


def uniform_lens(low, high, count=16):
    """Lengths evenly spaced from low to high, in random order."""
    return _shuffled([low + (high - low) * i // (count - 1) for i in range(count)])


def _gpu_prefill(lens, num_qo_heads=16, num_kv_heads=None, head_dim=128, **options):
    defaults = {"page_size": None, "head_dim": head_dim, "num_qo_heads": num_qo_heads}
    defaults["num_kv_heads"] = num_kv_heads or num_qo_heads
    return Case(lens, lens, **defaults | options)


def _gpu_decode(lens, num_qo_heads=32, num_kv_heads=8, **options):
    defaults = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": 128}
    return Case(**{"qo_lens": (1,) * len(lens), "kv_lens": lens} | defaults | options)


def _gpu_chunk_and_decodes(chunk, chunk_kv_len, num_decodes, kv_len):
    kv_lens = (chunk_kv_len,) + (kv_len,) * num_decodes
    return _gpu_decode(kv_lens, qo_lens=(chunk,) + (1,) * num_decodes)


_GPU_RAGGED = {
    **{f"s{n}": _gpu_prefill((n,) * 16) for n in (512, 1024, 2048, 4096, 8192, 16384)},
    "b4 s8192 full": _gpu_prefill((8192,) * 4, causal=False),
    "b4 s8192 32/8": _gpu_prefill((8192,) * 4, 32, 8),
    "b4 s8192 d64": _gpu_prefill((8192,) * 4, 32, head_dim=64),
    "b4 s8192 d256": _gpu_prefill((8192,) * 4, 8, head_dim=256),
    "zipf 1024": _gpu_prefill(zipf_lens(1024), 32),
    "uniform 512-1024": _gpu_prefill(uniform_lens(512, 1024), 32),
}
_GPU_E4M3 = {"page_size": 16, "kv_dtype": "float8_e4m3fn"}

# By section: bfloat16, on one large GPU. bench/bench_gpu.py runs them.
GPU_BENCH = {
    "prefill": {
        **_GPU_RAGGED,
        "s4096 page 16 e4m3": _gpu_prefill((4096,) * 16, **_GPU_E4M3),
        "b4 s8192 d256 page 16 e4m3": _gpu_prefill((8192,) * 4, 8, head_dim=256, **_GPU_E4M3),
    },
    "paged": {
        f"{name} page {page_size}": dataclasses.replace(_GPU_RAGGED[name], page_size=page_size)
        for name in ("s1024", "s4096", "b4 s8192 32/8", "zipf 1024")
        for page_size in (1, 16, 64)
    },
    "decode": {
        "b1 kv8k": _gpu_decode((8192,)),
        "b1 kv128k": _gpu_decode((131072,)),
        "b16 kv1k": _gpu_decode((1024,) * 16),
        "b64 kv4k": _gpu_decode((4096,) * 64),
        "b64 kv4k page 1": _gpu_decode((4096,) * 64, page_size=1),
        "b64 kv4k 64/8": _gpu_decode((4096,) * 64, 64),
        "b256 kv2k": _gpu_decode((2048,) * 256),
        "b64 kv4k 32/32": _gpu_decode((4096,) * 64, 32, 32),
        "b16 kv1k 32/32": _gpu_decode((1024,) * 16, 32, 32),
        "b16 uniform 512-1024 32/32": _gpu_decode(uniform_lens(512, 1024), 32, 32),
        "b16 zipf 1024 32/32": _gpu_decode(zipf_lens(1024), 32, 32),
        "b16 zipf 16k": _gpu_decode(zipf_lens(16384)),
        "b64 kv4k e4m3": _gpu_decode((4096,) * 64, kv_dtype="float8_e4m3fn"),
        "b256 kv2k e4m3": _gpu_decode((2048,) * 256, kv_dtype="float8_e4m3fn"),
        "b1 kv1M": _gpu_decode((1 << 20,)),
        "b1024 kv512": _gpu_decode((512,) * 1024),
        "b8 kv2k 64/8": _gpu_decode((2048,) * 8, 64),
        "b64 kv4k 48/1": _gpu_decode((4096,) * 64, 48, 1),
        "b64 kv4k 64/8 d64": _gpu_decode((4096,) * 64, 64, head_dim=64),
        "b64 kv4k 16/8 d256": _gpu_decode((4096,) * 64, 16, head_dim=256),
        "b64 kv4k d80": _gpu_decode((4096,) * 64, head_dim=80),
        "b64 kv4k 64/8 e4m3": _gpu_decode((4096,) * 64, 64, kv_dtype="float8_e4m3fn"),
        "b1 kv8k e4m3": _gpu_decode((8192,), kv_dtype="float8_e4m3fn"),
        "b64 kv32k window 4k": _gpu_decode((32768,) * 64, window_left=4095),
    },
    # Steps of a serving engine: chunks of prompts, alone or beside decodes, and drafts to verify.
    "serving": {
        "chunk 2048 of 32k": _gpu_decode((32768,), qo_lens=(2048,)),
        "chunk 512 of 128k": _gpu_decode((131072,), qo_lens=(512,)),
        "chunk 2048 of 8k + 64 x 4k": _gpu_chunk_and_decodes(2048, 8192, 64, 4096),
        "chunk 512 of 16k + 128 x 2k": _gpu_chunk_and_decodes(512, 16384, 128, 2048),
        "64 x 4 drafts": _gpu_decode((4096,) * 64, qo_lens=(4,) * 64),
        "16 x 8 drafts 64/8": _gpu_decode((8192,) * 16, 64, qo_lens=(8,) * 16),
    },
    # A prefix that all requests share, and 128 keys of each request's own.
    "prefix": {
        f"{prefix} x {count}": _gpu_decode(
            (prefix + 128,) * count, shared_prefixes=((0, count, prefix),)
        )
        for count in (16, 64)
        for prefix in (1024, 8192, 32768)
    },
    # Beside own causal, and beside a plan with the exact lengths.
    "device": {
        "16 trees of 64": _gpu_decode((4096,) * 16, qo_lens=(64,) * 16, custom_mask="tree"),
        "b64 kv4k real lengths": _gpu_decode((4096,) * 64, planned_lens=(4112,) * 64),
    },
}
