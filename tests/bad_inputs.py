# SPDX-License-Identifier: Apache-2.0
"""Calls that must be refused: (what is wrong, exception, argument that the message names, call)."""

import numpy as np

import flashplan as fp
from scene import half, int64, integers, read_only, zeros

NAN, INF = float("nan"), float("inf")
VALUE, TYPE, UNSUPPORTED = ValueError, TypeError, fp.UnsupportedError

OPTIONS = [
    ("num_qo_heads zero", VALUE, "num_qo_heads", lambda s: s.attention(num_qo_heads=0)),
    ("num_qo_heads negative", VALUE, "num_qo_heads", lambda s: s.attention(num_qo_heads=-4)),
    ("num_qo_heads text", TYPE, "num_qo_heads", lambda s: s.attention(num_qo_heads="4")),
    ("num_kv_heads zero", VALUE, "num_kv_heads", lambda s: s.attention(num_kv_heads=0)),
    ("num_kv_heads no divisor", VALUE, "num_qo_heads", lambda s: s.attention(num_kv_heads=3)),
    ("head_dim zero", VALUE, "head_dim_(qk|vo)", lambda s: s.attention(head_dim=0)),
    ("head_dim vo zero", VALUE, "head_dim_(qk|vo)", lambda s: s.attention(head_dim=(8, 0))),
    ("head_dim huge", VALUE, "head_dim_(qk|vo)", lambda s: s.attention(head_dim=1 << 20)),
    ("head_dim of three", VALUE, "head_dim", lambda s: s.attention(head_dim=(8, 8, 8))),
    ("head_dim text", TYPE, "head_dim", lambda s: s.attention(head_dim="64")),
    ("page_size zero", VALUE, "page_size", lambda s: s.attention(page_size=0)),
    ("page_size negative", VALUE, "page_size", lambda s: s.attention(page_size=-16)),
    ("window_left -2", VALUE, "window_left", lambda s: s.attention(window_left=-2)),
    ("softmax_scale NaN", VALUE, "softmax_scale", lambda s: s.attention(softmax_scale=NAN)),
    ("softmax_scale infinite", VALUE, "softmax_scale", lambda s: s.attention(softmax_scale=INF)),
    ("softmax_scale zero", VALUE, "softmax_scale", lambda s: s.attention(softmax_scale=0.0)),
    ("softmax_scale tiny", VALUE, "softmax_scale", lambda s: s.attention(softmax_scale=1e-40)),
    ("softcap negative", VALUE, "softcap", lambda s: s.attention(softcap=-1.0)),
    ("softcap tiny", VALUE, "softcap", lambda s: s.attention(softcap=1e-40)),
    ("softcap zero in float32", VALUE, "softcap", lambda s: s.attention(softcap=1e-60)),
    ("softcap NaN", VALUE, "softcap", lambda s: s.attention(softcap=NAN)),
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
    ("batch_invariant number", TYPE, "batch_invariant", lambda s: s.attention(batch_invariant=1)),
    ("softcap text", TYPE, "softcap", lambda s: s.attention(softcap="high")),
    ("num_ctas huge", VALUE, "num_ctas", lambda s: s.attention(num_ctas=1 << 20)),
    ("q_dtype float8", UNSUPPORTED, "q_dtype", lambda s: s.attention(q_dtype="float8_e4m3fn")),
    ("q_dtype unknown", UNSUPPORTED, "q_dtype", lambda s: s.attention(q_dtype="float128")),
    ("kv_dtype other", UNSUPPORTED, "kv_dtype", lambda s: s.attention(kv_dtype="float16")),
    ("o_dtype float8", UNSUPPORTED, "o_dtype", lambda s: s.attention(o_dtype="float8_e5m2")),
    ("variant", UNSUPPORTED, "variant", lambda s: s.attention(variant="alibi")),
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
]

PLAN = [
    ("qo_indptr empty", VALUE, "qo_indptr", lambda s: s.plan(qo_indptr=[])),
    ("qo_indptr from 1", VALUE, r"qo_indptr\[0\]", lambda s: s.plan(qo_indptr=[1, 3, 4])),
    ("qo_indptr decreasing", VALUE, r"qo_indptr\[2\]", lambda s: s.plan(qo_indptr=[0, 3, 2])),
    ("qo_indptr short", VALUE, "(qo_indptr|kv_lens)", lambda s: s.plan(qo_indptr=[0, 3])),
    ("qo_indptr long", VALUE, "(qo_indptr|kv_lens)", lambda s: s.plan(qo_indptr=[0, 1, 2, 3])),
    ("qo_indptr int64", TYPE, "qo_indptr", lambda s: s.plan(qo_indptr=int64(0, 3, 4))),
    (
        "qo_indptr float",
        TYPE,
        "qo_indptr",
        lambda s: s.plan(qo_indptr=integers(0, 3, 4, dtype="f4")),
    ),
    ("qo_indptr matrix", VALUE, "qo_indptr", lambda s: s.plan(qo_indptr=integers([0, 3, 4]))),
    ("qo_indptr text", TYPE, "qo_indptr", lambda s: s.plan(qo_indptr="034")),
    ("qo_indptr of floats", TYPE, r"qo_indptr\[1\]", lambda s: s.plan(qo_indptr=[0, 3.5, 4])),
    ("qo_indptr over int32", VALUE, r"qo_indptr\[2\]", lambda s: s.plan(qo_indptr=[0, 3, 1 << 40])),
    ("too many tokens", VALUE, r"qo_indptr\[2\]", lambda s: s.plan(qo_indptr=[0, 3, 5])),
    ("kv_lens negative", VALUE, r"kv_lens\[1\]", lambda s: s.plan(kv_lens=[9, -3])),
    ("kv_lens int64", TYPE, "kv_lens", lambda s: s.plan(kv_lens=int64(9, 6))),
    ("kv_lens unsigned", TYPE, "kv_lens", lambda s: s.plan(kv_lens=integers(9, 6, dtype="u4"))),
    ("kv_lens scalar", TYPE, "kv_lens", lambda s: s.plan(kv_lens=9)),
    ("kv_lens matrix", VALUE, "kv_lens", lambda s: s.plan(kv_lens=integers([9, 6]))),
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
    ("kv_indptr int64", TYPE, "kv_indptr", lambda s: s.plan_ragged(kv_indptr=int64(0, 9, 15))),
    (
        "kv_lens sum over int32",
        VALUE,
        "kv_lens",
        lambda s: s.plan_ragged(kv_lens=[2**31 - 1] * 2, kv_indptr=None),
    ),
]

RUN = [
    ("q of rank 2", VALUE, "q", lambda s: s.run(q=zeros(4, 32))),
    ("q of rank 6", VALUE, "q", lambda s: s.run(q=zeros(4, 4, 8, 1, 1, 1))),
    ("q heads", VALUE, "q", lambda s: s.run(q=zeros(4, 5, 8))),
    ("q head_dim", VALUE, "q", lambda s: s.run(q=zeros(4, 4, 9))),
    ("q short", VALUE, "q", lambda s: s.run(q=zeros(3, 4, 8))),
    ("q dtype", TYPE, "q", lambda s: s.run(q=half(4, 4, 8))),
    ("q integer", TYPE, "q", lambda s: s.run(q=zeros(4, 4, 8, dtype="i4"))),
    ("q float64", TYPE, "q", lambda s: s.run(q=zeros(4, 4, 8, dtype="f8"))),
    ("q complex", TYPE, "q", lambda s: s.run(q=zeros(4, 4, 8, dtype="c8"))),
    ("q list", TYPE, "q", lambda s: s.run(q=[[1.0]])),
    ("q None", TYPE, "q", lambda s: s.run(q=None)),
    ("q transposed", VALUE, "q", lambda s: s.run(q=zeros(4, 8, 4).swapaxes(1, 2))),
    ("q reversed", VALUE, "q", lambda s: s.run(q=zeros(4, 4, 8)[::-1])),
    ("k of rank 3", VALUE, "k", lambda s: s.run(k=s.inputs.k[0])),
    ("k heads", VALUE, "k", lambda s: s.run(k=zeros(9, 4, 3, 8))),
    ("k page_size", VALUE, "k", lambda s: s.run(k=zeros(9, 5, 2, 8))),
    ("k head_dim", VALUE, "k", lambda s: s.run(k=zeros(9, 4, 2, 7))),
    ("k dtype", TYPE, "k", lambda s: s.run(k=half(9, 4, 2, 8))),
    ("k object", TYPE, "k", lambda s: s.run(k=object())),
    ("k every other element", VALUE, "k", lambda s: s.run(k=zeros(9, 4, 2, 16)[..., ::2])),
    ("v head_dim", VALUE, "v", lambda s: s.run(v=zeros(9, 4, 2, 9))),
    ("v dtype", TYPE, "v", lambda s: s.run(v=half(9, 4, 2, 8))),
    ("v None", TYPE, "v", lambda s: s.run(v=None)),
    ("ragged k short", VALUE, "k", lambda s: s.run_ragged(k=zeros(14, 2, 8))),
    ("ragged v short", VALUE, "v", lambda s: s.run_ragged(v=zeros(14, 2, 8))),
    ("ragged k with pages", VALUE, "k", lambda s: s.run_ragged(k=zeros(15, 4, 2, 8))),
    (
        "ragged with block_table",
        VALUE,
        "block_table",
        lambda s: s.run_ragged(block_table=integers([0])),
    ),
    ("no page table", VALUE, "block_table", lambda s: s.run(block_table=None)),
    (
        "two page tables",
        VALUE,
        "block_table",
        lambda s: s.run_csr(block_table=s.inputs.block_table),
    ),
    ("half a page table", VALUE, "block_table", lambda s: s.run_csr(page_indices=None)),
    ("block_table short", VALUE, "block_table", lambda s: s.run(block_table=integers([0, 1, 2]))),
    (
        "block_table narrow",
        VALUE,
        "block_table",
        lambda s: s.run(block_table=integers([0, 1], [2, 3])),
    ),
    (
        "block_table int64",
        TYPE,
        "block_table",
        lambda s: s.run(block_table=zeros(2, 3, dtype="i8")),
    ),
    ("block_table float", TYPE, "block_table", lambda s: s.run(block_table=zeros(2, 3))),
    ("block_table of rank 1", VALUE, "block_table", lambda s: s.run(block_table=integers(0, 1, 2))),
    ("block_table list", TYPE, "block_table", lambda s: s.run(block_table=[[0, 1, 2], [3, 4, 5]])),
    (
        "page negative",
        VALUE,
        r"block_table\[1, 0\]",
        lambda s: s.run(block_table=integers([0, 1, 2], [-1, 1, 1])),
    ),
    (
        "page too high",
        VALUE,
        r"block_table\[0, 2\]",
        lambda s: s.run(block_table=integers([0, 1, 9], [0, 1, 1])),
    ),
    ("page_indptr short", VALUE, "page_indptr", lambda s: s.run_csr(page_indptr=integers(0, 3))),
    ("page_indptr int64", TYPE, "page_indptr", lambda s: s.run_csr(page_indptr=int64(0, 3, 5))),
    (
        "page_indptr negative",
        VALUE,
        "page_indptr",
        lambda s: s.run_csr(page_indptr=integers(-3, 3, 5)),
    ),
    (
        "page_indptr decreasing",
        VALUE,
        "page_indptr",
        lambda s: s.run_csr(page_indptr=integers(0, 3, 1)),
    ),
    (
        "page_indptr too far",
        VALUE,
        "page_indptr",
        lambda s: s.run_csr(page_indptr=integers(0, 3, 6)),
    ),
    (
        "page_indptr too few",
        VALUE,
        "page_indptr",
        lambda s: s.run_csr(page_indptr=integers(0, 2, 5)),
    ),
    (
        "page_indices int64",
        TYPE,
        "page_indices",
        lambda s: s.run_csr(page_indices=zeros(5, dtype="i8")),
    ),
    (
        "page_indices of rank 2",
        VALUE,
        "page_indices",
        lambda s: s.run_csr(page_indices=zeros(5, 1, dtype="i4")),
    ),
    (
        "page index negative",
        VALUE,
        r"page_indices\[3\]",
        lambda s: s.run_csr(page_indices=integers(0, 1, 2, -7, 4)),
    ),
    (
        "page index too high",
        VALUE,
        r"page_indices\[4\]",
        lambda s: s.run_csr(page_indices=integers(0, 1, 2, 3, 99)),
    ),
    ("out dtype", TYPE, "out", lambda s: s.run(out=half(4, 4, 8))),
    ("out short", VALUE, "out", lambda s: s.run(out=zeros(3, 4, 8))),
    ("out heads", VALUE, "out", lambda s: s.run(out=zeros(4, 2, 8))),
    ("out of rank 2", VALUE, "out", lambda s: s.run(out=zeros(4, 32))),
    ("out read-only", TYPE, "out", lambda s: s.run(out=read_only(s.out.view))),
    ("out list", TYPE, "out", lambda s: s.run(out=[])),
    ("out is q", VALUE, "out", lambda s: s.run(out=s.inputs.q)),
    ("out inside k", VALUE, "out", lambda s: s.run(out=s.inputs.k.reshape(-1, 4, 8))),
    ("out broadcast", VALUE, "out", lambda s: s.run(out=broadcast(s.out.view))),
    ("out transposed", VALUE, "out", lambda s: s.run(out=zeros(4, 8, 4).swapaxes(1, 2))),
    ("lse dtype", TYPE, "lse", lambda s: s.run(lse=half(4, 4))),
    ("lse heads", VALUE, "lse", lambda s: s.run(lse=zeros(4, 3))),
    ("lse transposed", VALUE, "lse", lambda s: s.run(lse=zeros(4, 9).T[:4])),
    ("lse read-only", TYPE, "lse", lambda s: s.run(lse=read_only(s.lse.view))),
    ("lse text", TYPE, "lse", lambda s: s.run(lse="yes")),
    ("lse inside out", VALUE, "(out|lse)", lambda s: s.run(lse=s.out.view.reshape(-1, 4)[:4])),
    ("k_scale NaN", VALUE, "k_scale", lambda s: s.run(k_scale=NAN)),
    ("k_scale zero", VALUE, "k_scale", lambda s: s.run(k_scale=0.0)),
    ("k_scale tiny", VALUE, "k_scale", lambda s: s.run(k_scale=1e-40)),
    ("k_scale tiny beside softmax_scale", VALUE, "k_scale", lambda s: s.run(k_scale=2e-38)),
    ("v_scale tiny", VALUE, "v_scale", lambda s: s.run(v_scale=1e-40)),
    ("k_scale text", TYPE, "k_scale", lambda s: s.run(k_scale="1")),
    ("v_scale infinite", VALUE, "v_scale", lambda s: s.run(v_scale=INF)),
    ("v_scale negative", VALUE, "v_scale", lambda s: s.run(v_scale=-1.0)),
    ("stream text", VALUE, "stream", lambda s: s.run(stream="fast")),
    ("run before plan", RuntimeError, "run", lambda s: unplanned(s)),
]

APPEND = [
    ("append k rank", VALUE, "k", lambda s: s.append(k=zeros(3, 16))),
    ("append k short", VALUE, "k", lambda s: s.append(k=zeros(2, 2, 8))),
    ("append v short", VALUE, "v", lambda s: s.append(v=zeros(2, 2, 8))),
    ("append k heads", VALUE, "k", lambda s: s.append(k=zeros(3, 3, 8))),
    ("append v heads", VALUE, "v", lambda s: s.append(v=zeros(3, 1, 8))),
    ("append v head_dim", VALUE, "v", lambda s: s.append(v=zeros(3, 2, 9))),
    ("append v dtype", TYPE, "v", lambda s: s.append(v=half(3, 2, 8))),
    ("append k_cache dtype", TYPE, "(k|k_cache)", lambda s: s.append(k_cache=half(9, 4, 2, 8))),
    ("append k_cache rank", VALUE, "k_cache", lambda s: s.append(k_cache=zeros(9, 8, 8))),
    (
        "append k_cache read-only",
        TYPE,
        "k_cache",
        lambda s: s.append(k_cache=read_only(s.inputs.k)),
    ),
    (
        "append v_cache read-only",
        TYPE,
        "v_cache",
        lambda s: s.append(v_cache=read_only(s.inputs.v)),
    ),
    ("append v_cache page_size", VALUE, "v_cache", lambda s: s.append(v_cache=zeros(9, 3, 2, 8))),
    (
        "append indptr negative",
        VALUE,
        r"indptr\[0\]",
        lambda s: s.append(indptr=integers(-1, 2, 3)),
    ),
    (
        "append indptr decreasing",
        VALUE,
        r"indptr\[2\]",
        lambda s: s.append(indptr=integers(0, 2, 1)),
    ),
    ("append indptr int64", TYPE, "indptr", lambda s: s.append(indptr=int64(0, 2, 3))),
    ("append indptr short", VALUE, "(indptr|kv_lens)", lambda s: s.append(indptr=integers(0, 3))),
    (
        "append kv_lens negative",
        VALUE,
        r"kv_lens\[0\]",
        lambda s: s.append(kv_lens=integers(-9, 6)),
    ),
    (
        "append more than kv_len",
        VALUE,
        r"kv_lens\[1\]",
        lambda s: s.append(indptr=integers(0, 1, 3), kv_lens=integers(9, 1)),
    ),
    ("append kv_lens half", TYPE, "kv_lens", lambda s: s.append(kv_lens=half(2))),
    (
        "append block_table narrow",
        VALUE,
        "block_table",
        lambda s: s.append(block_table=integers([0], [1])),
    ),
    (
        "append page too high",
        VALUE,
        r"block_table\[0, 2\]",
        lambda s: s.append(block_table=integers([0, 1, 12], [3, 4, 5])),
    ),
    (
        "append page negative",
        VALUE,
        r"page_indices\[4\]",
        lambda s: s.append_csr(page_indices=integers(0, 1, 2, 3, -4)),
    ),
    (
        "append page_indptr too few",
        VALUE,
        "page_indptr",
        lambda s: s.append_csr(page_indptr=integers(0, 1, 5)),
    ),
    ("append kv_layout", VALUE, "kv_layout", lambda s: s.append(kv_layout="NDH")),
    ("append k_scale", VALUE, "k_scale", lambda s: s.append(k_scale=-2.0)),
    ("append k_scale tiny", VALUE, "k_scale", lambda s: s.append(k_scale=1e-41)),
    ("append v_scale", VALUE, "v_scale", lambda s: s.append(v_scale=NAN)),
    ("append k list", TYPE, "k", lambda s: s.append(k=[0.0])),
]

MERGE = [
    ("merge o_a rank", VALUE, r"(o_a|o\[0\])", lambda s: s.merge(o_a=zeros(4, 8))),
    ("merge o_b shape", VALUE, r"(o_b|o\[1\])", lambda s: s.merge(o_b=zeros(4, 4, 9))),
    ("merge o_b dtype", TYPE, r"(o_b|o\[1\])", lambda s: s.merge(o_b=half(4, 4, 8))),
    ("merge o_a dtype", TYPE, r"(o_a|o\[0\])", lambda s: s.merge(o_a=zeros(4, 4, 8, dtype="i4"))),
    ("merge lse_a dtype", TYPE, r"(lse_a|lse\[0\])", lambda s: s.merge(lse_a=half(4, 4))),
    ("merge lse_b shape", VALUE, r"(lse_b|lse\[1\])", lambda s: s.merge(lse_b=zeros(4, 5))),
    ("merge out shape", VALUE, "out", lambda s: s.merge(out=zeros(5, 4, 8))),
    ("merge out dtype", TYPE, "out", lambda s: s.merge(out=half(4, 4, 8))),
    ("merge lse shape", VALUE, "lse", lambda s: s.merge(lse=zeros(4))),
    ("merge lse dtype", TYPE, "lse", lambda s: s.merge(lse=integers([0]))),
    ("merge out over half an input", VALUE, "out", lambda s: merge_overlapping(s)),
    (
        "merge a tensor without lse",
        TYPE,
        "(lse_b|o_b)",
        lambda s: fp.merge_states(zeros(4, 4, 8), zeros(4, 4), zeros(4, 4, 8)),
    ),
    ("merge text", TYPE, r"(o_a|o\[0\])", lambda s: s.merge(o_a="state")),
    ("merge no states", VALUE, "o", lambda s: s.merge_stacked(zeros(0, 4, 4, 8), zeros(0, 4, 4))),
    (
        "merge stacked counts",
        VALUE,
        "lse",
        lambda s: s.merge_stacked(zeros(3, 4, 4, 8), zeros(2, 4, 4)),
    ),
    ("merge stacked rank", VALUE, "o", lambda s: s.merge_stacked(zeros(4, 4, 8), zeros(4, 4))),
]

OTHER = [
    ("no threads", VALUE, "num_threads", lambda s: fp.set_num_threads(0)),
    ("threads text", TYPE, "num_threads", lambda s: fp.set_num_threads("two")),
]

BAD = OPTIONS + PLAN + RUN + APPEND + MERGE + OTHER


def workspace():
    return zeros(1 << 24, dtype=np.uint8)


def broadcast(out):
    strides = (0, *out.strides[1:])
    return np.lib.stride_tricks.as_strided(out, out.shape, strides)


def unplanned(scene):
    i = scene.inputs
    scene.attention().run(i.q, i.k, i.v, block_table=i.block_table, out=scene.out.view)


def merge_overlapping(scene):
    memory = zeros(6, 4, 8)
    return scene.merge(o_a=memory[:4], out=memory[2:])
