# SPDX-License-Identifier: Apache-2.0
"""append_paged_kv() and rope_append_paged_kv(): see bad_inputs.py."""

import numpy as np

import flashplan as fp
from scene import half, int64, integers, read_only, sharing, zeros

NAN = float("nan")
VALUE, TYPE = ValueError, TypeError

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
    (
        "append kv_dtype",
        TYPE,
        "kv_dtype",
        lambda s: s.append(kv_dtype="float8_e4m3fn"),
    ),
    ("append kv_layout", VALUE, "kv_layout", lambda s: s.append(kv_layout="NDH")),
    ("append k_scale", VALUE, "k_scale", lambda s: s.append(k_scale=-2.0)),
    ("append k_scale tiny", VALUE, "k_scale", lambda s: s.append(k_scale=1e-41)),
    ("append v_scale", VALUE, "v_scale", lambda s: s.append(v_scale=NAN)),
    ("append k list", TYPE, "k", lambda s: s.append(k=[0.0])),
    ("append k inside k_cache", VALUE, "k_cache", lambda s: inside_cache(s, "k", "k")),
    ("append k inside v_cache", VALUE, "v_cache", lambda s: inside_cache(s, "k", "v")),
    ("append v inside k_cache", VALUE, "k_cache", lambda s: inside_cache(s, "v", "k")),
    ("append v inside v_cache", VALUE, "v_cache", lambda s: inside_cache(s, "v", "v")),
    (
        "append table inside k_cache",
        VALUE,
        "k_cache",
        lambda s: inside_cache(s, "block_table", "k"),
    ),
    ("append kv_lens inside v_cache", VALUE, "v_cache", lambda s: inside_cache(s, "kv_lens", "v")),
    ("append indptr inside k_cache", VALUE, "k_cache", lambda s: inside_cache(s, "indptr", "k")),
    ("append one cache", VALUE, "k_cache", lambda s: s.append(v_cache=s.inputs.k)),
    ("append k_cache sharing", VALUE, "k_cache", lambda s: s.append(k_cache=sharing(9, 4, 2, 8))),
    ("append v_cache pages", VALUE, r"block_table\[1, 1\]", lambda s: fewer_pages(s, "v")),
    ("append k_cache pages", VALUE, r"block_table\[1, 1\]", lambda s: fewer_pages(s, "k")),
    ("append page_size over int32", VALUE, "k_cache", lambda s: huge_pages(s, 2**32)),
    ("append page_size of 2**31", VALUE, "k_cache", lambda s: huge_pages(s, 2**31)),
    (
        "append int32 cache",
        TYPE,
        "k_cache",
        lambda s: s.append(k_cache=zeros(9, 4, 2, 8, dtype="i4")),
    ),
]

APPEND_SCALES = [
    ("append k_scale text", TYPE, "k_scale", lambda s: s.append(k_scale="one")),
    ("append k_scale list", TYPE, "k_scale", lambda s: s.append(k_scale=[0.5, 0.5])),
    ("append k_scale half", TYPE, "k_scale", lambda s: s.append(k_scale=half(2))),
    ("append k_scale heads", VALUE, "k_scale", lambda s: s.append(k_scale=floats(1, 1, 1))),
    ("append v_scale rank", VALUE, "v_scale", lambda s: s.append(v_scale=floats([1, 1]))),
    (
        "append k_scale with a zero",
        VALUE,
        r"k_scale\[1\]",
        lambda s: s.append(k_scale=floats(1, 0)),
    ),
    ("append v_scale of NaN", VALUE, r"v_scale\[0\]", lambda s: s.append(v_scale=floats(NAN))),
    ("append k_scale inside v_cache", VALUE, "v_cache", lambda s: inside_cache(s, "k_scale", "v")),
    ("append v_scale inside k_cache", VALUE, "k_cache", lambda s: inside_cache(s, "v_scale", "k")),
]

SLOTS = [
    ("slots int32", TYPE, "slot_mapping", lambda s: s.append_slots(slot_mapping=integers(1, 2))),
    ("slots list", TYPE, "slot_mapping", lambda s: s.append_slots(slot_mapping=[1, 2, 3])),
    ("slots rank", VALUE, "slot_mapping", lambda s: s.append_slots(slot_mapping=int64([1], [2]))),
    (
        "slots more than rows",
        VALUE,
        "slot_mapping",
        lambda s: s.append_slots(slot_mapping=int64(1, 2, 3, 4)),
    ),
    (
        "slots more than v's rows",
        VALUE,
        "slot_mapping",
        lambda s: s.append_slots(v=zeros(2, 2, 8)),
    ),
    (
        "slots below -1",
        VALUE,
        r"slot_mapping\[1\]",
        lambda s: s.append_slots(slot_mapping=int64(0, -2, 1)),
    ),
    (
        "slots behind the pages",
        VALUE,
        r"slot_mapping\[2\]",
        lambda s: s.append_slots(slot_mapping=int64(0, 35, 36)),
    ),
    (
        "slots of 2**40",
        VALUE,
        r"slot_mapping\[0\]",
        lambda s: s.append_slots(slot_mapping=int64(2**40, 0)),
    ),
    (
        "slots behind v's pages",
        VALUE,
        r"slot_mapping\[0\]",
        lambda s: s.append_slots(v_cache=zeros(8, 4, 2, 8), slot_mapping=int64(32)),
    ),
    ("slots and indptr", VALUE, "slot_mapping", lambda s: s.append_slots(indptr=integers(0, 3))),
    ("slots and kv_lens", VALUE, "slot_mapping", lambda s: s.append_slots(kv_lens=integers(3))),
    (
        "slots and a table",
        VALUE,
        "slot_mapping",
        lambda s: s.append_slots(block_table=s.inputs.block_table),
    ),
    (
        "slots and pages",
        VALUE,
        "slot_mapping",
        lambda s: s.append_slots(page_indptr=integers(0, 1)),
    ),
    (
        "slots and page ids",
        VALUE,
        "slot_mapping",
        lambda s: s.append_slots(page_indices=integers(0, 1)),
    ),
    ("positions alone", TYPE, "batch_indices", lambda s: s.append_positions(batch_indices=None)),
    ("requests alone", TYPE, "positions", lambda s: s.append_positions(positions=None)),
    ("positions int64", TYPE, "positions", lambda s: s.append_positions(positions=int64(0, 1, 2))),
    ("requests int64", TYPE, "batch_indices", lambda s: s.append_positions(batch_indices=int64(0))),
    ("fewer positions", VALUE, "positions", lambda s: s.append_positions(positions=integers(0))),
    (
        "more positions than rows",
        VALUE,
        "batch_indices",
        lambda s: s.append_positions(batch_indices=integers(0, 0, 1, 1)),
    ),
    (
        "positions and indptr",
        VALUE,
        "batch_indices",
        lambda s: s.append_positions(indptr=integers(0)),
    ),
    (
        "positions and lens",
        VALUE,
        "batch_indices",
        lambda s: s.append_positions(kv_lens=integers(9)),
    ),
    (
        "positions and slots",
        VALUE,
        "slot_mapping",
        lambda s: s.append_positions(slot_mapping=int64(0, 1, 2)),
    ),
    ("positions, no table", VALUE, "block_table", lambda s: s.append_positions(block_table=None)),
    (
        "request below -1",
        VALUE,
        r"batch_indices\[1\]",
        lambda s: s.append_positions(batch_indices=integers(0, -2, 1)),
    ),
    (
        "request behind the table",
        VALUE,
        r"batch_indices\[2\]",
        lambda s: s.append_positions(batch_indices=integers(0, -1, 99)),
    ),
    (
        "negative position",
        VALUE,
        r"positions\[1\]",
        lambda s: s.append_positions(positions=integers(0, -1, 2)),
    ),
    (
        "position behind the table",
        VALUE,
        "block_table",
        lambda s: s.append_positions(positions=integers(0, 1000, 2)),
    ),
    ("no slots, no indptr", TYPE, "indptr", lambda s: s.append_slots(slot_mapping=None)),
    ("no slots, no kv_lens", TYPE, "kv_lens", lambda s: s.append(kv_lens=None)),
    (
        "slots inside k_cache",
        VALUE,
        "k_cache",
        lambda s: s.append_slots(slot_mapping=s.inputs.k.reshape(-1)[:4].view(np.int64)),
    ),
]

ROPE_APPEND = [
    ("rope append q none", TYPE, "q", lambda s: s.rope_append(q=None)),
    ("rope append q rank", VALUE, "q", lambda s: s.rope_append(q=zeros(4, 32))),
    ("rope append q dtype", TYPE, "q", lambda s: s.rope_append(q=half(4, 4, 8))),
    ("rope append q dim", VALUE, "q", lambda s: s.rope_append(q=zeros(4, 4, 6))),
    (
        "rope append q short",
        VALUE,
        "q",
        lambda s: s.rope_append(q=zeros(3, 4, 8), out_q=s.out.view[:3]),
    ),
    ("rope append k short", VALUE, "k", lambda s: s.rope_append(k=zeros(3, 2, 8))),
    ("rope append k dtype", TYPE, "k", lambda s: s.rope_append(k=half(4, 2, 8))),
    ("rope append v dtype", TYPE, "v", lambda s: s.rope_append(v=half(4, 2, 8))),
    ("rope append v heads", VALUE, "v", lambda s: s.rope_append(v=zeros(4, 1, 8))),
    ("rope append narrow", TYPE, "k", lambda s: narrow_keys(s)),
    ("rope append caches differ", TYPE, "v_cache", lambda s: narrow_values(s)),
    ("rope append one dim", VALUE, "k", lambda s: one_dim(s)),
    ("rope append none", TYPE, "rope", lambda s: s.rope_append(rope=None)),
    (
        "rope append rotary_dim",
        VALUE,
        r"rope\.rotary_dim",
        lambda s: s.rope_append(rope=fp.Rope(rotary_dim=10)),
    ),
    ("rope append indptr none", TYPE, "indptr", lambda s: s.rope_append(indptr=None)),
    ("rope append kv_lens none", TYPE, "kv_lens", lambda s: s.rope_append(kv_lens=None)),
    (
        "rope append more than kv_len",
        VALUE,
        r"kv_lens\[1\]",
        lambda s: s.rope_append(kv_lens=integers(9, 1)),
    ),
    ("rope append page", VALUE, r"block_table\[0, 1\]", lambda s: s.rope_append(**wrong_page())),
    ("rope append k_scale", VALUE, "k_scale", lambda s: s.rope_append(k_scale=0.0)),
    (
        "rope append v_scale",
        VALUE,
        r"v_scale\[1\]",
        lambda s: s.rope_append(v_scale=floats(1, -1)),
    ),
    (
        "rope append out_q over k_scale",
        VALUE,
        "out_q",
        lambda s: s.rope_append(k_scale=s.out.view.reshape(-1)[:2]),
    ),
    ("rope append kv_layout", VALUE, "kv_layout", lambda s: s.rope_append(kv_layout="HDN")),
    ("rope append out_q shape", VALUE, "out_q", lambda s: s.rope_append(out_q=zeros(4, 4, 9))),
    ("rope append out_q dtype", TYPE, "out_q", lambda s: s.rope_append(out_q=half(4, 4, 8))),
    (
        "rope append out_q read-only",
        TYPE,
        "out_q",
        lambda s: s.rope_append(out_q=read_only(zeros(4, 4, 8))),
    ),
    ("rope append out_q over k", VALUE, "out_q", lambda s: rope_append_over(s, "k")),
    ("rope append out_q over v", VALUE, "out_q", lambda s: rope_append_over(s, "v")),
    (
        "rope append out_q over kv_lens",
        VALUE,
        "out_q",
        lambda s: s.rope_append(kv_lens=lengths_in(s.out.view)),
    ),
    ("rope append out_q moved", VALUE, "out_q", lambda s: moved_queries(s)),
    ("rope append q in k_cache", VALUE, "k_cache", lambda s: queries_in(s, "q", "k")),
    ("rope append q in v_cache", VALUE, "v_cache", lambda s: queries_in(s, "q", "v")),
    ("rope append out_q in k_cache", VALUE, "k_cache", lambda s: queries_in(s, "out_q", "k")),
    ("rope append out_q in v_cache", VALUE, "v_cache", lambda s: queries_in(s, "out_q", "v")),
]


def floats(*values):
    return np.array(values, np.float32)


def narrow_keys(scene):
    keys = zeros(4, 2, 8, dtype="float8_e5m2")
    cache = zeros(9, 4, 2, 8, dtype="float8_e5m2")
    return scene.rope_append(k=keys, v=keys, k_cache=cache, v_cache=cache.copy())


def narrow_values(scene):
    return scene.rope_append(v_cache=zeros(9, 4, 2, 8, dtype="float8_e5m2"))


def one_dim(scene):
    return scene.rope_append(
        q=zeros(4, 4, 1), k=zeros(4, 2, 1), k_cache=zeros(9, 4, 2, 1), out_q=zeros(4, 4, 1)
    )


def wrong_page():
    return {"block_table": integers([0, 9, 2], [3, 4, 5])}


def lengths_in(memory):
    return memory.reshape(-1)[:2].view(np.int32)


def rope_append_over(scene, name):
    memory = zeros(4, 4, 8)
    return scene.rope_append(out_q=memory, **{name: memory[:, 2:]})


def moved_queries(scene):
    memory = zeros(5, 4, 8)
    return scene.rope_append(q=memory[:4], out_q=memory[1:])


def queries_in(scene, name, cache):
    """A call whose q or out_q is memory of a cache."""
    memory = getattr(scene.inputs, cache).reshape(-1)[:128]
    return scene.rope_append(**{name: memory.reshape(4, 4, 8)})


def inside_cache(scene, name, cache):
    """A call whose `name` is memory of a cache."""
    memory = getattr(scene.inputs, cache).reshape(-1)
    views = {
        "k": memory[:48].reshape(3, 2, 8),
        "v": memory[:48].reshape(3, 2, 8),
        "block_table": memory[:6].view(np.int32).reshape(2, 3),
        "kv_lens": memory[:2].view(np.int32),
        "indptr": memory[:3].view(np.int32),
        "k_scale": memory[:2],
        "v_scale": memory[:2],
    }
    return scene.append(**{name: views[name]})


def fewer_pages(scene, name):
    """Ids that only the other cache has: the smaller one decides."""
    num_pages = 3 if name == "v" else 6
    table = integers([0, 1, 2], [0, num_pages, 8])
    pages = getattr(scene.inputs, name)[:num_pages]
    return scene.append(**{f"{name}_cache": pages, "block_table": table})


def huge_pages(scene, page_size):
    """Pages of more tokens than there is memory for: nothing of them is touched."""
    rows, memory = zeros(1, 1, 1), zeros(1, dtype=np.uint8)
    cache = np.lib.stride_tricks.as_strided(memory, (1, page_size, 1, 1), (0, 0, 0, 0))
    return fp.append_paged_kv(
        *(rows, rows, cache, cache, integers(0, 1), integers(2)),
        block_table=integers([-30000]),
        kv_dtype="float8_e4m3fn",
    )
