# SPDX-License-Identifier: Apache-2.0
"""trtllm_fmha_v2_prefill with FlashInfer's layouts and masks, against the reference."""

import math

import numpy as np
import pytest

from flashinfer_cases import Batch, Case, poisoned

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402

SCALE = 0.3
NO_WORKSPACE = torch.zeros(16, dtype=torch.uint8)
LAYOUTS = ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"]
LENS = [30, 4, 17]


def batch_of(rng, layout="SEPARATE_Q_K_V", qo_lens=LENS, kv_lens=LENS, **options):
    options |= {"layout": layout[-3:] if "PAGED" in layout else "NHD", "cache": "one"}
    heads = (4, 4) if layout == "PACKED_QKV" else (4, 2)
    case = Case(sm_scale=SCALE, **{"causal": True, "page_size": 8, "heads": heads, **options})
    return Batch(torch, rng, case, qo_lens, kv_lens)


def prefill(batch, layout="SEPARATE_Q_K_V", **changed):
    q, k, v = (batch.joined(parts) for parts in (batch.q, batch.k, batch.v))
    table = None
    if layout == "PACKED_QKV":
        qkv = torch.stack((q, k, v), 1)
    elif layout == "CONTIGUOUS_Q_KV":
        qkv = (q, torch.stack((k, v), 1))
    elif layout == "SEPARATE_Q_K_V":
        qkv = (q, k, v)
    else:
        indptr, indices, _ = batch.page_table()
        table = torch.full((len(batch.kv_lens), 6), -7, dtype=torch.int32)
        for row, begin, end in zip(table, indptr.tolist(), indptr.tolist()[1:]):
            row[: end - begin] = indices[begin:end]
        qkv = (q, batch.pages())
    arguments = {
        "qkv": qkv,
        "input_layout": layout,
        "workspace_buffer": NO_WORKSPACE,
        "seq_lens": torch.tensor(batch.kv_lens, dtype=torch.int32),
        "max_q_len": max(batch.qo_lens),
        "max_kv_len": max(batch.kv_lens),
        "bmm1_scale": SCALE,
        "bmm2_scale": 1.0,
        "batch_size": len(batch.kv_lens),
        "cum_seq_lens_q": batch.ends(batch.qo_lens),
        "cum_seq_lens_kv": batch.ends(batch.kv_lens),
        "block_tables": table,
        **({} if batch.sinks is None else {"sinks": [torch.tensor(batch.sinks)]}),
    }
    return flashinfer.prefill.trtllm_fmha_v2_prefill(**arguments | changed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, {}),
        ({}, {"mask_mode": "CAUSAL", "skip_softmax_threshold_scale_factor": 500.0}),
        ({"window_left": 6}, {"mask_mode": "SLIDING_WINDOW", "window_left": 6}),
        ({"causal": False}, {"mask_mode": "PADDING"}),
        ({"logits_soft_cap": 2.0}, {"logits_soft_cap_scale": 2.0}),
    ],
)
def test_layouts_and_masks(rng, layout, options, named):
    for qo_lens in (LENS, [3, 2, 1]):
        if layout == "PACKED_QKV" and qo_lens != LENS:
            continue
        batch = batch_of(rng, layout, qo_lens, **options)
        batch.sinks = rng.standard_normal(4).astype(np.float32)
        batch.check(prefill(batch, layout, **named))


@pytest.mark.parametrize("cap", [None, 2.0])
def test_statistics(rng, cap):
    """A maximum and a sum, as FlashInfer's tests read them."""
    batch = batch_of(rng, logits_soft_cap=cap)
    out = poisoned(torch, sum(LENS), 4, 64)
    o, stats = prefill(batch, logits_soft_cap_scale=cap, save_softmax_stats=True, out=out)
    assert o is out
    factor = math.sqrt(64) * (1.0 if cap else SCALE)
    batch.check(o, factor * stats[..., 0] + torch.log(stats[..., 1]), base2=False)


def test_positions_by_slopes(rng):
    batch = batch_of(rng, pos_encoding_mode="ALIBI")
    batch.check(prefill(batch, pos_encoding_mode="alibi"))


def chunk_reference(batch, chunk):
    """o in float64: a query sees the keys of its own chunk, up to itself."""
    results = []
    for q, k, v in zip(*([x.astype(np.float64) for x in y] for y in (batch.q, batch.k, batch.v))):
        group = q.shape[1] // k.shape[1]
        for i, row in enumerate(q):
            position = i + len(k) - len(q)
            seen = slice(position // chunk * chunk, position + 1)
            o = np.zeros((q.shape[1], v.shape[2]))
            for head in range(q.shape[1]) if position >= 0 else ():
                logits = k[seen, head // group] @ row[head] * SCALE
                weights = np.exp(logits - logits.max())
                o[head] = weights / weights.sum() @ v[seen, head // group]
            results.append(o)
    return np.array(results)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 4, 8, 12, 64])
def test_chunks(rng, layout, chunk):
    """Also chunks that begin inside pages of 8 tokens, prompts behind other keys, and queries that
    see nothing, because they come before the first key."""
    for qo_lens in (LENS, [3, 2, 15], [30, 6, 1], [0, 4, 0]):
        if layout == "PACKED_QKV" and qo_lens != LENS:
            continue
        batch = batch_of(rng, layout, qo_lens)
        o = prefill(batch, layout, mask_mode="chunked", chunked_attention_size=chunk)
        np.testing.assert_allclose(o, chunk_reference(batch, chunk), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", ["Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"])
@pytest.mark.parametrize("named", [{}, {"mask_mode": "chunked", "chunked_attention_size": 12}])
def test_separate_caches(rng, layout, named):
    """Ids of k and of v are counted from the first page of k; those behind a length are no ids."""
    batch = batch_of(rng, layout)
    indptr, indices, _ = batch.page_table()
    cache = torch.stack(batch.pages().unbind(1))  # all pages of k, then all pages of v
    table = torch.full((3, 2, 6), -7, dtype=torch.int32)
    for row, begin, end in zip(table, indptr.tolist(), indptr.tolist()[1:]):
        row[0, : end - begin] = indices[begin:end]
        row[1, : end - begin] = indices[begin:end] + cache.shape[1]
    given = {"qkv": (batch.joined(batch.q), tuple(cache)), "block_tables": table, **named}
    o = prefill(batch, layout, **given)
    if named:
        np.testing.assert_allclose(o, chunk_reference(batch, 12), rtol=2e-5, atol=2e-5)
    else:
        batch.check(o)
    table[2, 1, 0] += 1
    with pytest.raises(fp.UnsupportedError, match="block_tables: expected a page of v at the same"):
        prefill(batch, layout, **given)
    with pytest.raises(ValueError, match="block_tables: separate k and v expect shape"):
        prefill(batch, layout, **given | {"block_tables": table[:, 0]})


@pytest.mark.parametrize("layout", ["PACKED_QKV", "CONTIGUOUS_Q_KV", "Q_PAGED_KV_NHD"])
@pytest.mark.parametrize("o_dtype", ["float8_e4m3fn", "bfloat16"])
def test_eight_bits(rng, layout, o_dtype):
    """Queries, keys and values of 8 bits; outputs of 8 bits are rounded once."""
    batch = batch_of(rng, layout, dtype="float8_e4m3fn")
    exact, _ = batch.expected()
    o = prefill(batch, layout, out_dtype=o_dtype, bmm2_scale=1.5)
    assert o.dtype == getattr(torch, o_dtype)
    step = 2**-4 if o_dtype == "float8_e4m3fn" else 2**-8
    np.testing.assert_allclose(o.float(), exact * 1.5, rtol=step + 0.03, atol=0.05)
    out = torch.empty(sum(LENS), 4, 64, dtype=getattr(torch, o_dtype))
    assert prefill(batch, layout, out=out, bmm2_scale=1.5) is out
    assert torch.equal(out.float(), o.float())
    default = prefill(batch, layout)
    assert default.dtype == torch.float8_e4m3fn


WRONG = [
    ({"input_layout": "QKV"}, "input_layout: expected one of PACKED_QKV, .* got 'QKV'"),
    ({"input_layout": "PACKED_QKV"}, "qkv: PACKED_QKV expects 1 tensors of 4 dimensions"),
    ({"input_layout": "Q_PAGED_KV_NHD"}, "block_tables is required for the Q_PAGED_KV_NHD"),
    (
        {"input_layout": "Q_PAGED_KV_NHD", "block_tables": torch.zeros(2, 3, dtype=torch.int32)},
        r"block_tables: expected 3 rows \(batch_size\), got 2",
    ),
    ({"mask_mode": "tree"}, "mask_mode: expected one of causal, .* got 'tree'"),
    ({"mask_mode": "padding", "window_left": 3}, "mask_mode: Sliding window attention requires"),
    (
        {"mask_mode": "padding", "chunked_attention_size": 4},
        "mask_mode: Chunked attention requires causal masking",
    ),
    ({"mask_mode": "chunked"}, r"chunked_attention_size: expected >= 1 \(chunked\), got 0"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_wrong_arguments(rng, changed, message):
    with pytest.raises(ValueError, match=message):
        prefill(batch_of(rng), **changed)


def test_wrong_shapes(rng):
    batch = batch_of(rng)
    q, k, v = (batch.joined(parts) for parts in (batch.q, batch.k, batch.v))
    with pytest.raises(ValueError, match=r"qkv: CONTIGUOUS_Q_KV expects shape .*, 2, .* got"):
        prefill(batch, input_layout="CONTIGUOUS_Q_KV", qkv=(q, torch.stack((k, v, v), 1)))
    with pytest.raises(fp.UnsupportedError, match="pos_encoding_mode: expected None or 'alibi'"):
        prefill(batch, pos_encoding_mode="rope")


def test_pages_that_can_not_be_divided(rng):
    """The distance of two pages is no whole number of pages of 4 tokens."""
    batch = batch_of(rng, "Q_PAGED_KV_NHD")
    batch.page_table()
    pages = batch.pages()
    odd = torch.zeros(len(pages), 2 * 8 * 2 * 64 + 64)
    odd[:, :-64] = pages.flatten(1)
    strides = (odd.stride(0), 8 * 2 * 64, 2 * 64, 64, 1)
    cache = odd.as_strided(pages.shape, strides)
    table = torch.zeros(3, 6, dtype=torch.int32)
    with pytest.raises(fp.UnsupportedError, match="qkv: expected a page stride that is a multiple"):
        prefill(
            batch,
            "Q_PAGED_KV_NHD",
            qkv=(batch.joined(batch.q), cache),
            block_tables=table,
            mask_mode="chunked",
            chunked_attention_size=4,
        )


def test_captures_need_lengths(rng, monkeypatch):
    batch = batch_of(rng)
    monkeypatch.setattr("flashplan.flashinfer._direct_fmha.is_capturing", lambda device: True)
    with pytest.raises(fp.UnsupportedError, match="mask_mode: expected none that needs lengths"):
        prefill(batch, mask_mode="chunked", chunked_attention_size=4)
    paged = batch_of(rng, "Q_PAGED_KV_NHD")
    paged.page_table()
    given = {"qkv": (paged.joined(paged.q), paged.pages().unbind(1))}
    table = torch.zeros(3, 2, 6, dtype=torch.int32)
    with pytest.raises(fp.UnsupportedError, match="qkv: expected pages of k and v in one tensor"):
        prefill(paged, "Q_PAGED_KV_NHD", **given, block_tables=table)
