# SPDX-License-Identifier: Apache-2.0
"""Attention problems with any combination of options."""

import dataclasses
import random

from case import Case


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
        lse_base2=rng.choice((False, False, True)),
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
    scales = rng.choice((None, None, None, "one", "heads"))
    sinks = rng.choice((False, False, False, True))
    return dataclasses.replace(case, device_scales=scales, sinks=sinks)


def random_cases(count, seed):
    rng = random.Random(seed)
    return [random_case(rng) for _ in range(count)]
