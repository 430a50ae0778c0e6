# SPDX-License-Identifier: Apache-2.0
"""The attention problems that benchmarks time."""

import dataclasses
import random

from case import Case
from mla_cases import MlaCase
from sparse_cases import SparseCase


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


def _gpu_chunk_and_decodes(chunk, chunk_kv_len, num_decodes, kv_len, **options):
    kv_lens = (chunk_kv_len,) + (kv_len,) * num_decodes
    return _gpu_decode(kv_lens, qo_lens=(chunk,) + (1,) * num_decodes, **options)


_GPU_RAGGED = {
    **{f"s{n}": _gpu_prefill((n,) * 16) for n in (512, 1024, 2048, 4096, 8192, 16384)},
    "b4 s8192 full": _gpu_prefill((8192,) * 4, causal=False),
    "b4 s8192 32/8": _gpu_prefill((8192,) * 4, 32, 8),
    "b4 s8192 d64": _gpu_prefill((8192,) * 4, 32, head_dim=64),
    "b4 s8192 d256": _gpu_prefill((8192,) * 4, 8, head_dim=256),
    "b4 s4096 16/8 d512": _gpu_prefill((4096,) * 4, 16, 8, head_dim=512),
    "zipf 1024": _gpu_prefill(zipf_lens(1024), 32),
    "uniform 512-1024": _gpu_prefill(uniform_lens(512, 1024), 32),
}
_GPU_8_BIT = (
    "s1024",
    "s4096",
    "b4 s8192 32/8",
    "b4 s8192 d64",
    "b4 s8192 d256",
    "zipf 1024",
    "chunk 2048 of 32k",
    "chunk 2048 of 8k + 64 x 4k",
    "chunk 512 of 16k + 128 x 2k",
)
_GPU_SERVING = {
    "chunk 2048 of 32k": _gpu_decode((32768,), qo_lens=(2048,)),
    "chunk 512 of 128k": _gpu_decode((131072,), qo_lens=(512,)),
    "chunk 2048 of 8k + 64 x 4k": _gpu_chunk_and_decodes(2048, 8192, 64, 4096),
    "chunk 512 of 16k + 128 x 2k": _gpu_chunk_and_decodes(512, 16384, 128, 2048),
    "64 x 4 drafts": _gpu_decode((4096,) * 64, qo_lens=(4,) * 64),
    "16 x 8 drafts 64/8": _gpu_decode((8192,) * 16, 64, qo_lens=(8,) * 16),
}

# By section: bfloat16, on one large GPU. bench/bench_gpu.py runs them.
GPU_BENCH = {
    "prefill": _GPU_RAGGED,
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
        "b64 kv4k 16/8 d512": _gpu_decode((4096,) * 64, 16, head_dim=512),
        "b64 kv4k d80": _gpu_decode((4096,) * 64, head_dim=80),
        "b64 kv4k 64/8 e4m3": _gpu_decode((4096,) * 64, 64, kv_dtype="float8_e4m3fn"),
        "b1 kv8k e4m3": _gpu_decode((8192,), kv_dtype="float8_e4m3fn"),
        "b64 kv32k window 4k": _gpu_decode((32768,) * 64, window_left=4095),
        # Page-sparse decodes (Quest): the page table has only the pages that Quest selects.
        **{f"b1 {n} pages 32/32": _gpu_decode((n * 16,), 32, 32) for n in (64, 128, 256, 512)},
    },
    # Steps of a serving engine: chunks of prompts, alone or beside decodes, and drafts to verify.
    "serving": _GPU_SERVING,
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
    # Prompts over a cache of 8-bit floats, beside the same over one of bfloat16; then queries of 8
    # bits, too, beside queries and a cache of bfloat16.
    "8-bit cache": {
        **{
            f"{name} {dtype[7:11]}": dataclasses.replace(case, page_size=16, kv_dtype=dtype)
            for name, case in (_GPU_RAGGED | _GPU_SERVING).items()
            for dtype in ("float8_e4m3fn", "float8_e5m2")
            if name in _GPU_8_BIT and (dtype == "float8_e4m3fn" or name == "s4096")
        },
        **{
            f"{name} e4m3, also queries": dataclasses.replace(
                _GPU_RAGGED[name],
                page_size=16,
                q_dtype="float8_e4m3fn",
                kv_dtype="float8_e4m3fn",
            )
            for name in ("s1024", "s4096", "b4 s8192 32/8", "b4 s8192 d64", "b4 s8192 d256")
        },
    },
    # Beside the same without the variant or rotation.
    "variants": {
        "s4096 alibi": dataclasses.replace(_GPU_RAGGED["s4096"], variant="alibi"),
        "s4096 rope": dataclasses.replace(_GPU_RAGGED["s4096"], rope="plain"),
        "b64 kv4k rope": _gpu_decode((4096,) * 64, rope="plain"),
    },
    # Beside a plan that may cut as it likes.
    "invariant": {
        **{
            f"{name} invariant": dataclasses.replace(
                _GPU_RAGGED[name], page_size=16, batch_invariant=True
            )
            for name in ("s1024", "s4096", "b4 s8192 32/8")
        },
        "chunk 2048 of 32k invariant": _gpu_decode((32768,), qo_lens=(2048,), batch_invariant=True),
        "chunk 2048 of 8k + 64 x 4k invariant": _gpu_chunk_and_decodes(
            2048, 8192, 64, 4096, batch_invariant=True
        ),
        "16 x 8 drafts 64/8 invariant": _gpu_decode(
            (8192,) * 16, 64, qo_lens=(8,) * 16, batch_invariant=True
        ),
        "b1 kv8k invariant": _gpu_decode((8192,), batch_invariant=True),
        "b8 kv32k invariant": _gpu_decode((32768,) * 8, batch_invariant=True),
        "b64 kv4k invariant": _gpu_decode((4096,) * 64, batch_invariant=True),
    },
}


def _mla(num_heads, batch_size, kv_len, qo_len=1, **options):
    return MlaCase((qo_len,) * batch_size, (kv_len,) * batch_size, num_heads, **options)


# Decodes with multi-head latent attention, of one query token or, as "x 4", of several.
MLA_BENCH = {
    "h128 b64 kv4k": _mla(128, 64, 4096),
    "h128 b128 kv8k": _mla(128, 128, 8192),
    "h128 b64 kv4k x 2": _mla(128, 64, 4096, 2),
    "h128 b16 kv1k": _mla(128, 16, 1024),
    "h128 b1 kv64k": _mla(128, 1, 65536),
    "h64 b128 kv4k": _mla(64, 128, 4096),
    "h32 b128 kv4k": _mla(32, 128, 4096),
    "h16 b128 kv4k": _mla(16, 128, 4096),
    "h16 b16 kv1k": _mla(16, 16, 1024),
    "h16 b1 kv4k": _mla(16, 1, 4096),
    "h16 b32 kv4k x 4": _mla(16, 32, 4096, 4),
    "h128 b64 kv4k page 16": _mla(128, 64, 4096, page_size=16),
    "h128 b64 kv4k page 1": _mla(128, 64, 4096, page_size=1),
    "h16 b128 kv4k page 1": _mla(16, 128, 4096, page_size=1),
    "h128 b64 kv4k invariant": _mla(128, 64, 4096, batch_invariant=True),
    "h128 b1 kv64k invariant": _mla(128, 1, 65536, batch_invariant=True),
} | {
    f"{name} {short}": dataclasses.replace(_mla(*sizes), kv_dtype=kv_dtype)
    for short, kv_dtype in (("e4m3", "float8_e4m3fn"), ("ds", "fp8_ds_mla"))
    for name, sizes in (
        ("h128 b64 kv4k", (128, 64, 4096)),
        ("h128 b64 kv4k x 2", (128, 64, 4096, 2)),
        ("h128 b1 kv64k", (128, 1, 65536)),
        ("h64 b128 kv4k", (64, 128, 4096)),
        ("h16 b128 kv4k", (16, 128, 4096)),
        ("h16 b16 kv1k", (16, 16, 1024)),
    )
}


def _sparse(num_heads, qo_lens, kv_len, kv_dtype=None):
    return SparseCase(
        qo_lens,
        (kv_len,) * len(qo_lens),
        topk=2048,
        num_heads=num_heads,
        page_size=64,
        kv_dtype=kv_dtype,
    )


# Decodes and a prompt in which each token sees 2048 keys of a list; "656": of DeepSeek's format.
SPARSE_BENCH = {
    "h128 top 2048 b64": _sparse(128, (1,) * 64, 32768),
    "h128 top 2048 b128 x 2": _sparse(128, (2,) * 128, 32768),
    "h128 top 2048 b1": _sparse(128, (1,), 32768),
    "h16 top 2048 b128": _sparse(16, (1,) * 128, 32768),
    "h128 top 2048 prompt 4k": _sparse(128, (4096,), 32768),
    "h128 top 2048 b64 656": _sparse(128, (1,) * 64, 32768, "fp8_ds_mla"),
    "h128 top 2048 b128 x 2 656": _sparse(128, (2,) * 128, 32768, "fp8_ds_mla"),
    "h128 top 2048 b1 656": _sparse(128, (1,), 32768, "fp8_ds_mla"),
}

# Prompts in the expanded form, of keys whose last 64 dims are those of all heads.
MLA_PROMPTS = {
    "192/128 s4096": _gpu_prefill((4096,) * 2, 128, head_dim=(192, 128)),
    "192/128 s8192": _gpu_prefill((8192,) * 2, 128, head_dim=(192, 128)),
}
