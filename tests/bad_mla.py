# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: see bad_inputs.py."""

import numpy as np

import flashplan as fp
from scene import half, int64, integers, zeros

VALUE, TYPE = ValueError, TypeError
SHARED_TAIL = zeros(8, 4, 4)

OPTIONS = {
    "num_qo_heads": 4,
    "num_kv_heads": 1,
    "head_dim": (12, 8),
    "shared_kv": True,
    "softmax_scale": 0.25,
    "page_size": 4,
    "q_dtype": "float32",
    "device": "cpu",
}


def make(**changes):
    return fp.Attention(**OPTIONS | changes)


def run(k=None, q=None, options=None, **arguments):
    attn = make(**options or {})
    attn.plan([0, 3, 4], [9, 6])
    arguments = {"block_table": integers([0, 1, 2], [3, 4, 0])} | arguments
    q = zeros(4, 4, 12) if q is None else q
    return attn.run(q, zeros(9, 4, 12) if k is None else k, **arguments)


def run_whole(k, v, **arguments):
    """Without shared_kv."""
    return run(k, v=v, options={"shared_kv": False}, **arguments)


def run_ds_mla(k):
    return run(k, zeros(4, 4, 576), {"head_dim": (576, 512), "kv_dtype": "fp8_ds_mla"})


MLA = [
    ("shared_kv of two kv heads", VALUE, "num_kv_heads", lambda s: make(num_kv_heads=2)),
    ("shared_kv no number", TYPE, "shared_kv", lambda s: make(shared_kv="yes")),
    ("shared_kv values too long", VALUE, "head_dim_vo", lambda s: make(head_dim=(8, 12))),
    ("shared_kv no scale", VALUE, "softmax_scale", lambda s: make(softmax_scale=None)),
    ("shared_kv rope", VALUE, "rope", lambda s: make(rope=fp.Rope())),
    (
        "shared_kv variant",
        VALUE,
        "variant",
        lambda s: make(variant=fp.Variant("twice", logits="return 2.0f * logit;")),
    ),
    (
        "fp8_ds_mla of other dims",
        VALUE,
        "kv_dtype",
        lambda s: make(kv_dtype="fp8_ds_mla", q_dtype="bfloat16"),
    ),
    (
        "fp8_ds_mla without shared_kv",
        fp.UnsupportedError,
        "kv_dtype",
        lambda s: make(kv_dtype="fp8_ds_mla", shared_kv=False),
    ),
    (
        "fp8_ds_mla queries",
        fp.UnsupportedError,
        "q_dtype",
        lambda s: make(q_dtype="fp8_ds_mla"),
    ),
    ("ds_mla rows of 576", VALUE, "k", lambda s: run_ds_mla(zeros(9, 4, 576, dtype="u1"))),
    (
        "ds_mla pair",
        VALUE,
        "k_tail",
        lambda s: run_ds_mla((zeros(9, 4, 656, dtype="u1"), zeros(9, 4, 64, dtype="u1"))),
    ),
    ("ds_mla floats", TYPE, "k", lambda s: run_ds_mla(zeros(9, 4, 656))),
    ("shared v", VALUE, "v", lambda s: run(v=zeros(9, 4, 8))),
    ("shared v_scale", VALUE, "v_scale", lambda s: run(v_scale=0.5)),
    ("shared v_scale tensor", VALUE, "v_scale", lambda s: run(v_scale=np.ones(1, np.float32))),
    ("shared q dims", VALUE, "q", lambda s: run(q=zeros(4, 4, 8))),
    ("shared q of three", TYPE, "q", lambda s: run(q=(zeros(4, 4, 8),) * 3)),
    ("shared q half None", TYPE, "q", lambda s: run(q=(zeros(4, 4, 8), None))),
    ("q_tail dims", VALUE, "q_tail", lambda s: run(q=(zeros(4, 4, 8), zeros(4, 4, 5)))),
    ("q_tail rows", VALUE, "q_tail", lambda s: run(q=(zeros(4, 4, 8), zeros(3, 4, 4)))),
    ("q_tail dtype", TYPE, "q_tail", lambda s: run(q=(zeros(4, 4, 8), half(4, 4, 4)))),
    ("q whole with a tail", VALUE, "q", lambda s: run(q=(zeros(4, 4, 12), zeros(4, 4, 4)))),
    ("shared k dims", VALUE, "k", lambda s: run(zeros(9, 4, 13))),
    ("shared k page", VALUE, "k", lambda s: run(zeros(9, 5, 12))),
    ("shared k heads", VALUE, "k", lambda s: run(zeros(9, 4, 2, 12))),
    ("shared k of rank 2", VALUE, "k", lambda s: run(zeros(9, 12))),
    ("shared k dtype", TYPE, "k", lambda s: run(half(9, 4, 12))),
    ("k_tail dims", VALUE, "k_tail", lambda s: run((zeros(9, 4, 8), zeros(9, 4, 3)))),
    ("k_tail page", VALUE, "k_tail", lambda s: run((zeros(9, 4, 8), zeros(9, 3, 4)))),
    ("k_tail dtype", TYPE, "k_tail", lambda s: run((zeros(9, 4, 8), half(9, 4, 4)))),
    ("k_tail short", VALUE, "block_table", lambda s: run((zeros(9, 4, 8), zeros(4, 4, 4)))),
    (
        "q_tail without shared_kv",
        VALUE,
        "q_tail",
        lambda s: run_whole(zeros(9, 4, 1, 12), zeros(9, 4, 1, 8), q=(zeros(4, 4, 8),) * 2),
    ),
    (
        "k_tail without shared_kv",
        VALUE,
        "k_tail",
        lambda s: run_whole((zeros(9, 4, 1, 8),) * 2, zeros(9, 4, 1, 8)),
    ),
    ("v missing", TYPE, "v", lambda s: run_whole(zeros(9, 4, 1, 12), None)),
    (
        "tails of no dims",
        VALUE,
        "q_tail",
        lambda s: run(zeros(9, 4, 8), (zeros(4, 4, 8),) * 2, {"head_dim": 8}),
    ),
    (
        "out in the tail of k",
        VALUE,
        "out",
        lambda s: run((zeros(9, 4, 8), SHARED_TAIL), out=SHARED_TAIL.reshape(4, 4, 8)),
    ),
]


def run_sparse(lists=None, **arguments):
    """Three tokens of 9 keys and one of 6, which list up to 5 each, in 9 pages of 4."""
    lists = np.tile(integers(0, 7, -1, 35, 3), (4, 1)) if lists is None else lists
    return run(options={"topk": 5}, **{"block_table": None, "topk_indices": lists} | arguments)


def lists_of(*row, rows=4, dtype="i4"):
    return np.tile(np.array(row, dtype), (rows, 1))


def run_few_keys(**arguments):
    """Tokens of which plan() was told 2 and 1 keys."""
    attn = make(topk=5)
    attn.plan([0, 3, 4], [2, 1])
    return attn.run(zeros(4, 4, 12), zeros(9, 4, 12), **arguments)


def run_tail(k_tail, k=None, options=None, **arguments):
    """Ragged keys of two heads of 8 + 4 dims."""
    wanted = {"shared_kv": False, "num_kv_heads": 2, "page_size": None} | (options or {})
    k, v = zeros(15, 2, 8) if k is None else k, zeros(15, 2, 8)
    return run(k, options=wanted, v=v, k_tail=k_tail, **{"block_table": None} | arguments)


SPARSE = [
    ("topk without shared_kv", VALUE, "topk", lambda s: make(topk=5, shared_kv=False)),
    ("topk of ragged keys", VALUE, "topk", lambda s: make(topk=5, page_size=None)),
    ("topk 0", VALUE, "topk", lambda s: make(topk=0)),
    ("topk text", TYPE, "topk", lambda s: make(topk="5")),
    ("topk window", VALUE, "window_left", lambda s: make(topk=5, window_left=3)),
    ("topk mask", VALUE, "custom_mask", lambda s: make(topk=5, custom_mask=True)),
    ("no lists", VALUE, "topk_indices", lambda s: run_sparse(topk_indices=None)),
    ("lists without topk", VALUE, "topk_indices", lambda s: run(topk_indices=lists_of(0))),
    (
        "list lengths without topk",
        VALUE,
        "topk_lens",
        lambda s: run(topk_lens=integers(0, 0, 0, 0)),
    ),
    ("lists of int64", TYPE, "topk_indices", lambda s: run_sparse(lists_of(0, dtype="i8"))),
    ("lists too long", VALUE, "topk_indices", lambda s: run_sparse(lists_of(*range(6)))),
    ("lists of nothing", VALUE, "topk_indices", lambda s: run_sparse(zeros(4, 0, dtype="i4"))),
    ("lists of few tokens", VALUE, "topk_indices", lambda s: run_sparse(lists_of(0, rows=3))),
    ("lists of rank 1", VALUE, "topk_indices", lambda s: run_sparse(integers(0, 1, 2, 3))),
    ("list lengths int64", TYPE, "topk_lens", lambda s: run_sparse(topk_lens=int64(1, 1, 1, 1))),
    ("few list lengths", VALUE, "topk_lens", lambda s: run_sparse(topk_lens=integers(1, 1, 1))),
    (
        "lists and block_table",
        VALUE,
        "block_table",
        lambda s: run_sparse(block_table=integers([0, 1, 2], [3, 4, 0])),
    ),
    ("lists and kv_lens", VALUE, "kv_lens", lambda s: run_sparse(kv_lens=integers(9, 6))),
    (
        "a key behind the planned ones",
        VALUE,
        r"topk_indices\[3, 1\]",
        lambda s: run_few_keys(topk_indices=integers([0, 1], [0, 1], [0, 1], [0, 1])),
    ),
    (
        "a key behind the planned ones within topk_lens",
        VALUE,
        r"topk_indices\[0, 3\]",
        lambda s: run_few_keys(
            topk_indices=lists_of(0, -1, 99, 35, 3), topk_lens=integers(4, 0, 0, 0)
        ),
    ),
    ("k_tail and a pair", TYPE, "k", lambda s: run((zeros(9, 4, 8),) * 2, k_tail=zeros(9, 4))),
    ("common k_tail dims", VALUE, "k", lambda s: run_tail(zeros(15, 3))),
    ("common k_tail of rank 3", VALUE, "k_tail", lambda s: run_tail(zeros(15, 2, 4))),
    ("common k_tail short", VALUE, "k_tail", lambda s: run_tail(zeros(14, 4))),
    ("common k_tail long", VALUE, "k_tail", lambda s: run_tail(zeros(15, 12))),
    ("common k_tail dtype", TYPE, "k_tail", lambda s: run_tail(half(15, 4))),
    (
        "out in a common k_tail",
        VALUE,
        "out",
        lambda s: run_tail(SHARED_TAIL.reshape(32, 4), out=SHARED_TAIL.reshape(4, 4, 8)),
    ),
]
