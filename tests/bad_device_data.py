# SPDX-License-Identifier: Apache-2.0
"""check_device_data(): see bad_inputs.py."""

import flashplan as fp
from scene import int64, integers, zeros

VALUE, TYPE = ValueError, TypeError

DEVICE_DATA = [
    ("data of no Attention", TYPE, "attn", lambda s: fp.check_device_data(None, num_pages=9)),
    ("data before plan", RuntimeError, "check_device_data", lambda s: unplanned(s)),
    ("data without a table", VALUE, "block_table", lambda s: s.check(block_table=None)),
    (
        "data of two forms",
        VALUE,
        "block_table",
        lambda s: s.check(page_indptr=integers(0, 3, 5), page_indices=integers(0, 1, 2, 3, 4)),
    ),
    (
        "data of half a table",
        VALUE,
        "block_table",
        lambda s: s.check(block_table=None, page_indptr=integers(0, 3, 5)),
    ),
    ("data with a short table", VALUE, "block_table", lambda s: s.check(block_table=integers([0]))),
    (
        "data with lengths and a short table",
        VALUE,
        "block_table",
        lambda s: s.check(block_table=integers([0, 1, 2]), kv_lens=integers(9, 6)),
    ),
    ("data with a list", TYPE, "block_table", lambda s: s.check(block_table=[[0, 1, 2]] * 2)),
    ("data of int64", TYPE, "block_table", lambda s: s.check(block_table=int64([0], [1]))),
    ("data without num_pages", TYPE, "num_pages", lambda s: s.check(num_pages=None)),
    ("data of half a page", TYPE, "num_pages", lambda s: s.check(num_pages=8.5)),
    ("data of -1 pages", VALUE, "num_pages", lambda s: s.check(num_pages=-1)),
    ("data of 2**64 pages", VALUE, "num_pages", lambda s: s.check(num_pages=2**64)),
    ("data of fewer pages", VALUE, r"block_table\[0, 0\]", lambda s: s.check(num_pages=0)),
    ("data with short kv_lens", VALUE, "kv_lens", lambda s: s.check(kv_lens=integers(9))),
    ("data with float kv_lens", TYPE, "kv_lens", lambda s: s.check(kv_lens=zeros(2))),
    (
        "data with a long kv_len",
        VALUE,
        r"kv_lens\[1\]",
        lambda s: s.check(kv_lens=integers(9, 7)),
    ),
    (
        "data with a negative kv_len",
        VALUE,
        r"kv_lens\[0\]",
        lambda s: s.check(kv_lens=integers(-1, 6)),
    ),
    ("data with int32 slots", TYPE, "slot_mapping", lambda s: s.check(slot_mapping=integers(1))),
    ("data with rows of slots", VALUE, "slot_mapping", lambda s: s.check(slot_mapping=int64([1]))),
    (
        "data with a high slot",
        VALUE,
        r"slot_mapping\[1\]",
        lambda s: s.check(slot_mapping=int64(35, 36)),
    ),
    (
        "data with a slot below -1",
        VALUE,
        r"slot_mapping\[0\]",
        lambda s: s.check(slot_mapping=int64(-2)),
    ),
    (
        "data of ragged pages",
        VALUE,
        "block_table",
        lambda s: s.check_ragged(block_table=integers([0], [1]), num_pages=9),
    ),
    (
        "data of ragged slots",
        VALUE,
        "slot_mapping",
        lambda s: s.check_ragged(slot_mapping=int64(1), num_pages=9),
    ),
    ("data on a stream", VALUE, "stream", lambda s: s.check(stream=1)),
]


def unplanned(scene):
    return fp.check_device_data(
        scene.attention(), block_table=scene.inputs.block_table, num_pages=9
    )
