# SPDX-License-Identifier: Apache-2.0
"""run(): see bad_inputs.py."""

import numpy as np

import flashplan as fp
from scene import half, int64, integers, read_only, sharing, table_beyond, zeros

NAN, INF = float("nan"), float("inf")
VALUE, TYPE = ValueError, TypeError

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
    ("bound stream", TYPE, "stream", lambda s: s.bind(stream=None)),
    ("kv_lens short", VALUE, "kv_lens", lambda s: s.run(kv_lens=integers(9))),
    ("kv_lens int16", TYPE, "kv_lens", lambda s: s.run(kv_lens=integers(9, 6, dtype="i2"))),
    ("kv_lens float", TYPE, "kv_lens", lambda s: s.run(kv_lens=zeros(2))),
    ("kv_lens of rank 2", VALUE, "kv_lens", lambda s: s.run(kv_lens=integers([9, 6]))),
    ("kv_lens list", TYPE, "kv_lens", lambda s: s.run(kv_lens=[9, 6])),
    ("kv_lens every other", VALUE, "kv_lens", lambda s: s.run(kv_lens=integers(9, 0, 6, 0)[::2])),
    ("kv_lens inside out", VALUE, "out", lambda s: inside(s, "out", "kv_lens")),
    ("kv_lens inside lse", VALUE, "lse", lambda s: inside(s, "lse", "kv_lens")),
    ("mask without custom_mask", VALUE, "mask", lambda s: s.run(mask=words(4, 1))),
    ("no mask", VALUE, "mask", lambda s: s.run_masked(mask=None)),
    ("mask short", VALUE, "mask", lambda s: s.run_masked(mask=words(3, 1))),
    ("mask narrow", VALUE, "mask", lambda s: s.run_masked(mask=words(4, 0))),
    ("mask of rank 1", VALUE, "mask", lambda s: s.run_masked(mask=words(4))),
    ("mask of bools", TYPE, "mask", lambda s: s.run_masked(mask=zeros(4, 3, dtype=bool))),
    ("mask int32", TYPE, "mask", lambda s: s.run_masked(mask=zeros(4, 1, dtype="i4"))),
    ("mask uint64", TYPE, "mask", lambda s: s.run_masked(mask=zeros(4, 1, dtype="u8"))),
    ("mask list", TYPE, "mask", lambda s: s.run_masked(mask=[[7]] * 4)),
    ("mask reversed", VALUE, "mask", lambda s: s.run_masked(mask=words(4, 1)[::-1])),
    ("mask inside out", VALUE, "out", lambda s: s.run_masked(mask=s.out.view.view("u4")[:, 0])),
    ("sinks for kv heads", VALUE, "sinks", lambda s: s.run(sinks=zeros(2))),
    ("sinks of rank 2", VALUE, "sinks", lambda s: s.run(sinks=zeros(1, 4))),
    ("sinks every other", VALUE, "sinks", lambda s: s.run(sinks=zeros(8)[::2])),
    ("sinks float16", TYPE, "sinks", lambda s: s.run(sinks=half(4))),
    ("sinks float64", TYPE, "sinks", lambda s: s.run(sinks=np.ones(4))),
    ("sinks int32", TYPE, "sinks", lambda s: s.run(sinks=zeros(4, dtype="i4"))),
    ("sinks list", TYPE, "sinks", lambda s: s.run(sinks=[0.0] * 4)),
    ("sinks a number", TYPE, "sinks", lambda s: s.run(sinks=0.5)),
    ("sinks inside out", VALUE, "out", lambda s: s.run(sinks=s.out.view[0, 0, :4])),
    ("sinks inside lse", VALUE, "lse", lambda s: s.run(sinks=s.lse.view[0])),
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
    ("q_scale of wide queries", VALUE, "q_scale", lambda s: s.run(q_scale=2.0)),
    ("q_scale in a tensor", VALUE, "q_scale", lambda s: s.run(q_scale=ones(1))),
    ("k_scale NaN", VALUE, "k_scale", lambda s: s.run(k_scale=NAN)),
    ("k_scale zero", VALUE, "k_scale", lambda s: s.run(k_scale=0.0)),
    ("k_scale tiny", VALUE, "k_scale", lambda s: s.run(k_scale=1e-40)),
    ("k_scale tiny beside softmax_scale", VALUE, "k_scale", lambda s: s.run(k_scale=2e-38)),
    ("v_scale tiny", VALUE, "v_scale", lambda s: s.run(v_scale=1e-40)),
    ("k_scale over float", VALUE, "k_scale", lambda s: s.run(k_scale=10**400)),
    ("k_scale text", TYPE, "k_scale", lambda s: s.run(k_scale="1")),
    ("v_scale infinite", VALUE, "v_scale", lambda s: s.run(v_scale=INF)),
    ("v_scale negative", VALUE, "v_scale", lambda s: s.run(v_scale=-1.0)),
    ("k_scale a list", TYPE, "k_scale", lambda s: s.run(k_scale=[1.0])),
    ("k_scale for query heads", VALUE, "k_scale", lambda s: s.run(k_scale=ones(4))),
    ("k_scale of rank 2", VALUE, "k_scale", lambda s: s.run(k_scale=ones(1, 2))),
    ("k_scale every other", VALUE, "k_scale", lambda s: s.run(k_scale=ones(4)[::2])),
    ("k_scale float16", TYPE, "k_scale", lambda s: s.run(k_scale=half(2))),
    ("k_scale int32", TYPE, "k_scale", lambda s: s.run(k_scale=zeros(2, dtype="i4"))),
    ("k_scale with a zero", VALUE, r"k_scale\[1\]", lambda s: s.run(k_scale=floats(1, 0))),
    ("k_scale all tiny", VALUE, r"k_scale\[0\]", lambda s: s.run(k_scale=floats(2e-38))),
    ("v_scale with NaN", VALUE, r"v_scale\[1\]", lambda s: s.run(v_scale=floats(1, NAN))),
    ("v_scale for no head", VALUE, "v_scale", lambda s: s.run(v_scale=ones(0))),
    ("v_scale float64", TYPE, "v_scale", lambda s: s.run(v_scale=zeros(2, dtype="f8"))),
    ("k_scale inside out", VALUE, "out", lambda s: s.run(k_scale=in_scales(s.out.view))),
    ("v_scale inside lse", VALUE, "lse", lambda s: s.run(v_scale=in_scales(s.lse.view))),
    ("stream text", VALUE, "stream", lambda s: s.run(stream="fast")),
    ("pdl text", TYPE, "pdl", lambda s: s.run(pdl="yes")),
    ("pdl number", TYPE, "pdl", lambda s: s.run(pdl=1)),
    ("run before plan", RuntimeError, "run", lambda s: unplanned(s)),
    ("v with fewer pages", VALUE, r"block_table\[1, 0\]", lambda s: fewer_pages(s, "v")),
    ("k with fewer pages", VALUE, r"block_table\[1, 0\]", lambda s: fewer_pages(s, "k")),
    ("block_table inside out", VALUE, "out", lambda s: inside(s, "out", "block_table")),
    ("block_table inside lse", VALUE, "lse", lambda s: inside(s, "lse", "block_table")),
    ("page_indptr inside out", VALUE, "out", lambda s: inside(s, "out", "page_indptr")),
    ("page_indices inside out", VALUE, "out", lambda s: inside(s, "out", "page_indices")),
    ("q inside lse", VALUE, "lse", lambda s: inside(s, "lse", "q")),
    ("v inside lse", VALUE, "lse", lambda s: inside(s, "lse", "v")),
    ("out over the end of v", VALUE, "out", lambda s: over_the_end(s, "out", "v")),
    ("lse over the end of k", VALUE, "lse", lambda s: over_the_end(s, "lse", "k")),
    ("out inside the workspace", VALUE, "out", lambda s: inside_workspace(s, "out")),
    ("lse inside the workspace", VALUE, "lse", lambda s: inside_workspace(s, "lse")),
    ("k inside the workspace", VALUE, "workspace", lambda s: inside_workspace(s, "k")),
    ("out sharing rows", VALUE, "out", lambda s: s.run(out=sharing(4, 4, 8))),
    ("lse sharing rows", VALUE, "lse", lambda s: s.run(lse=sharing(4, 4))),
    ("q of another byte order", TYPE, "q", lambda s: s.run(q=zeros(4, 4, 8, dtype=">f4"))),
    ("k in a structure", VALUE, "k", lambda s: s.run(k=structure_field(9, 4, 2, 8))),
    ("out in a structure", VALUE, "out", lambda s: s.run(out=structure_field(4, 4, 8))),
]


def ones(*shape):
    return np.ones(shape, np.float32)


def floats(*values):
    return np.array(values, np.float32)


def in_scales(output):
    """Scales that are memory of an output."""
    return output.reshape(-1)[:2]


def words(*shape):
    return zeros(*shape, dtype=np.uint32)


def broadcast(out):
    strides = (0, *out.strides[1:])
    return np.lib.stride_tricks.as_strided(out, out.shape, strides)


def unplanned(scene):
    i = scene.inputs
    scene.attention().run(i.q, i.k, i.v, block_table=i.block_table, out=scene.out.view)


def fewer_pages(scene, name):
    """Ids that only the other cache has: the smaller one decides."""
    table = table_beyond(4 if name == "v" else 5)
    pages = 4 if name == "v" else 5
    return scene.run(**{name: getattr(scene.inputs, name)[:pages], "block_table": table})


def inside(scene, output, name):
    """A call whose `name` is memory of `output`: valid before it is written."""
    memory = {"out": scene.out, "lse": scene.lse}[output].view.reshape(-1)
    if name in ("q", "v"):
        rows = np.lib.stride_tricks.as_strided(memory, (9, 4, 2, 8), (0, 0, 0, 4))
        return scene.run(**{name: rows if name == "v" else rows[:4, :, 0]})
    numbers = memory.view(np.int32)
    tables = {
        "block_table": numbers[:6].reshape(2, 3),
        "page_indptr": numbers[:3],
        "page_indices": numbers[:5],
        "kv_lens": numbers[:2],
    }
    run = scene.run if name in ("block_table", "kv_lens") else scene.run_csr
    return run(**{name: tables[name]})


def over_the_end(scene, output, name):
    """An output that begins at the last element of an input."""
    shapes = {"out": (4, 4, 8), "lse": (4, 4), "v": (9, 4, 2, 8), "k": (9, 4, 2, 8)}
    size = int(np.prod(shapes[name]))
    memory = zeros(size - 1 + int(np.prod(shapes[output])))
    arguments = {name: memory[:size].reshape(shapes[name])}
    return scene.run(**arguments | {output: memory[size - 1 :].reshape(shapes[output])})


def inside_workspace(scene, name):
    shape = {"out": (4, 4, 8), "lse": (4, 4), "k": (9, 4, 2, 8)}[name]
    memory = zeros(1 << 20)
    attn = fp.Attention(**scene.options | {"workspace": memory, "num_ctas": 1})
    attn.plan([0, 3, 4], [9, 6])
    begin = -(memory.ctypes.data // 4) % 64 + 8
    i = scene.inputs
    arguments = {"q": i.q, "k": i.k, "v": i.v, "block_table": i.block_table, "out": scene.out.view}
    tensor = memory[begin : begin + int(np.prod(shape))].reshape(shape)
    return attn.run(**arguments | {name: tensor})


def structure_field(*shape):
    return zeros(*shape, dtype=np.dtype([("pad", "u1"), ("x", "f4")]))["x"]
