# SPDX-License-Identifier: Apache-2.0
"""pack_mask(), merge_states() and set_num_threads(): see bad_inputs.py."""

import flashplan as fp
from scene import half, integers, sharing, zeros

VALUE, TYPE = ValueError, TypeError

MASKS = [
    ("pack_mask of integers", TYPE, "bools", lambda s: fp.pack_mask(integers([1, 0]))),
    ("pack_mask of words", TYPE, "bools", lambda s: fp.pack_mask(zeros(2, 3, dtype="u4"))),
    ("pack_mask of None", TYPE, "bools", lambda s: fp.pack_mask(None)),
    ("pack_mask ragged", TYPE, "bools", lambda s: fp.pack_mask([[True], [True, False]])),
    ("pack_mask of rank 1", VALUE, "bools", lambda s: fp.pack_mask([True, False])),
    ("pack_mask of rank 3", VALUE, "bools", lambda s: fp.pack_mask(zeros(1, 2, 3, dtype=bool))),
]

MERGE = [
    ("merge o_a rank", VALUE, "o_a", lambda s: s.merge(o_a=zeros(4, 8))),
    ("merge o_b shape", VALUE, "o_b", lambda s: s.merge(o_b=zeros(4, 4, 9))),
    ("merge o_b dtype", TYPE, "o_b", lambda s: s.merge(o_b=half(4, 4, 8))),
    ("merge o_a dtype", TYPE, "o_a", lambda s: s.merge(o_a=zeros(4, 4, 8, dtype="i4"))),
    ("merge lse_a dtype", TYPE, "lse_a", lambda s: s.merge(lse_a=half(4, 4))),
    ("merge lse_b shape", VALUE, "lse_b", lambda s: s.merge(lse_b=zeros(4, 5))),
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
    ("merge base2 number", TYPE, "base2", lambda s: s.merge(base2=2)),
    ("merge text", TYPE, "o_a", lambda s: s.merge(o_a="state")),
    ("merge no states", VALUE, "o_a", lambda s: s.merge_stacked(zeros(0, 4, 4, 8), zeros(0, 4, 4))),
    (
        "merge stacked counts",
        VALUE,
        "lse_a",
        lambda s: s.merge_stacked(zeros(3, 4, 4, 8), zeros(2, 4, 4)),
    ),
    (
        "merge stacked state dtype",
        TYPE,
        r"lse_a\[0\]",
        lambda s: s.merge_stacked(zeros(3, 4, 4, 8), half(3, 4, 4)),
    ),
    (
        "merge stacked lse shape",
        VALUE,
        r"lse_a\[0\]",
        lambda s: s.merge_stacked(zeros(3, 4, 4, 8), zeros(3, 4, 5)),
    ),
    (
        "merge out over a stacked state",
        VALUE,
        "out",
        lambda s: merge_over_a_stacked_state(s),
    ),
    ("merge stacked rank", VALUE, "o_a", lambda s: s.merge_stacked(zeros(4, 4, 8), zeros(4, 4))),
    ("merge out sharing", VALUE, "out", lambda s: s.merge(out=sharing(4, 4, 8, step=7))),
    ("merge lse sharing", VALUE, "lse", lambda s: s.merge(lse=sharing(4, 4, step=1))),
    ("merge lse inside o_a", VALUE, "lse", lambda s: merge_inside(s, "o_a")),
    ("merge lse inside o_b", VALUE, "lse", lambda s: merge_inside(s, "o_b")),
    ("merge out with other strides", VALUE, "out", lambda s: merge_transposed(s)),
    (
        "merge very many states",
        VALUE,
        "o_a",
        lambda s: s.merge_stacked(zeros(10**7, 1, 0, 8), zeros(10**7, 1, 0)),
    ),
]

OTHER = [
    ("no threads", VALUE, "num_threads", lambda s: fp.set_num_threads(0)),
    ("threads text", TYPE, "num_threads", lambda s: fp.set_num_threads("two")),
]


def merge_overlapping(scene):
    memory = zeros(6, 4, 8)
    return scene.merge(o_a=memory[:4], out=memory[2:])


def merge_over_a_stacked_state(scene):
    memory = zeros(20, 4, 8)
    return scene.merge_stacked(memory[:12].reshape(3, 4, 4, 8), zeros(3, 4, 4), out=memory[6:10])


def merge_inside(scene, name):
    memory = zeros(4, 4, 8)
    return scene.merge(**{name: memory, "lse": memory.reshape(-1)[:16].reshape(4, 4)})


def merge_transposed(scene):
    """An output in the memory of an input, with heads and tokens exchanged."""
    memory = zeros(4, 4, 8)
    return scene.merge(o_b=memory, out=memory.swapaxes(0, 1))
