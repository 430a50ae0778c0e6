# SPDX-License-Identifier: Apache-2.0
"""Cases for GPUs whose schedules have more than work tiles: keys that are prepared, prefixes that
are computed once, and merges that several CTAs share."""

from case import Case

# Batches with prompts whose keys many row tiles read. On Hopper the kernel prepares the keys of all
# requests, and where pages are small also their values.
PREPARED = [
    Case(qo, kv, num_qo_heads=16, num_kv_heads=2, **options)
    for qo, kv in (
        ((3, 800, 1, 800), (500, 2000, 700, 1500)),
        ((1200, 40, 1100), (1300, 1300, 2200)),
    )
    for options in (
        {"head_dim": 128, "page_size": None, "rope": "plain"},
        {"head_dim": 128, "rope": "interleaved", "kv_layout": "HND", "memory": "strided"},
        {"head_dim": 64, "page_size": 64, "rope": "llama3", "q_dtype": "float16", "csr": True},
        {"head_dim": 96, "page_size": 8, "rope": "partial", "sinks": True, "causal": False},
        {"head_dim": 128, "page_size": None, "rope": "yarn", "num_ctas": 7},
        {"head_dim": 128, "rope": "scaled", "variant": "alibi"},
        {"head_dim": 128, "page_size": 1},
        {"head_dim": 128, "page_size": 3, "csr": True, "memory": "strided", "q_dtype": "float16"},
        {"head_dim": 64, "page_size": 5, "kv_layout": "HND", "causal": False, "num_ctas": 7},
        {"head_dim": 72, "page_size": 1, "special": (("k", float("nan")), ("v", float("inf")))},
        {"head_dim": 128, "page_size": 2, "custom_mask": "random"},
        {"head_dim": (96, 128), "page_size": 1},
        {"head_dim": (128, 64), "page_size": 4, "csr": True},
        {"head_dim": 128, "kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 1.7},
        {"head_dim": 64, "page_size": 5, "kv_dtype": "float8_e5m2", "csr": True, "sinks": True},
        {"head_dim": 128, "page_size": None, "kv_dtype": "float8_e4m3fn", "num_ctas": 7},
        {"head_dim": (96, 128), "kv_dtype": "float8_e5m2", "kv_layout": "HND", "causal": False},
        {"head_dim": 72, "kv_dtype": "float8_e4m3fn", "special": (("v", float("nan")),)},
        # Pairs 36 dims apart; few pairs, which are rotated one by one.
        {"head_dim": 72, "rope": "plain"},
        {"head_dim": 128, "rope": "partial interleaved"},
    )
]
# Their real lengths leave few or no keys, within and at the edge of a tile.
PREPARED += [
    Case(
        (800, 800, 40),
        kv,
        planned_lens=(2000, 1700, 900),
        num_qo_heads=16,
        num_kv_heads=2,
        head_dim=128,
        **options,
    )
    for kv in ((1999, 1664, 41), (900, 0, 900), (1, 1700, 0))
    for options in ({"rope": "plain"}, {"page_size": 1}, {"page_size": 1, "num_ctas": 100})
]

# Prefixes that a GPU's planner shares: of one row tile and of several, in every body, cut and
# whole, nested, of decodes and of drafts, and of requests whose real lengths the device knows.
PREFIXES = [
    Case(qo, kv, shared_prefixes=groups, num_qo_heads=8, num_ctas=ctas, **options)
    for qo, kv, groups in (
        ((1,) * 40, tuple(2100 + 13 * r for r in range(40)), ((0, 40, 2050),)),
        (
            (1, 4, 2, 1) * 6 + (90,),
            tuple(4500 + 31 * r for r in range(25)),
            ((0, 25, 1600), (0, 12, 3750), (3, 6, 4475), (13, 11, 3250)),
        ),
        # Requests of 80 rows, which two warpgroups of sm90 compute, among smaller ones.
        ((20, 1, 2, 1) * 4, tuple(4500 + 31 * r for r in range(16)), ((0, 16, 4096),)),
    )
    for ctas in (1, 7, 40)
    for options in (
        {"head_dim": 128},
        {"page_size": 3, "csr": True, "kv_dtype": "float8_e4m3fn", "q_dtype": "float16"},
        {"head_dim": 256, "page_size": 1, "softcap": 20.0},
        {"head_dim": 512, "kv_dtype": "float8_e4m3fn", "q_dtype": "float16", "num_kv_heads": 2},
        {"head_dim": (192, 128), "kv_layout": "HND", "memory": "strided", "num_kv_heads": 8},
    )
] + [
    Case(
        (1,) * 40,
        tuple(2100 + 13 * r for r in range(40)),
        planned_lens=tuple(3000 + r for r in range(40)),
        shared_prefixes=((0, 40, 2050),),
        num_qo_heads=8,
        head_dim=128,
        num_ctas=ctas,
    )
    for ctas in (7, 40)
]
# More requests in a queue than the list of Sm90ReaderMerges has room for.
PREFIXES.append(
    Case(
        (1,) * 300,
        tuple(1044 + r % 90 for r in range(300)),
        shared_prefixes=((0, 300, 1024), (100, 90, 1040)),
        num_qo_heads=8,
        head_dim=128,
        num_ctas=4,
    )
)

# Merges of more than 16 rows, which are divided among the CTAs that wrote the states. They have few
# states or many, and rows of one warpgroup or of two; some queues have other tiles after them.
DIVIDED = [
    Case(qo, kv, num_qo_heads=8, num_ctas=ctas, **options)
    for qo, kv in (((20,), (17000,)), ((9, 60), (900, 9000)), ((100, 1, 3), (6000, 300, 40)))
    for ctas in (3, 132)
    for options in (
        {"head_dim": 64, "num_kv_heads": 1},
        {"head_dim": 128, "num_kv_heads": 2},
        {"head_dim": 256, "num_kv_heads": 4, "q_dtype": "float16", "softcap": 20.0},
        {"head_dim": 128, "kv_dtype": "float8_e4m3fn", "page_size": 3, "sinks": True},
    )
]
